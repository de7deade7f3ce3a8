"""`repro simulate`, `repro fit` and `repro plan`: check the question, find the answer, show it.

All that a person can get wrong is found out before torch is imported.
"""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Any

from repro import models, systems
from repro.cli.commands import layout_options
from repro.cli.commands.layout_options import Asked
from repro.config import Experiment, Training
from repro.config.errors import ConfigError, require
from repro.config.system import System


def simulate(model: str, asked: Asked, timeline: str, json: bool) -> int:
    """Trace one step of a model and print what it needs.  That it does not fit is an answer: 0."""
    on = systems.load(asked.system)
    experiment = _experiment(model, on, asked)
    limit = layout_options.size(asked.memory_limit)
    if limit is not None:
        limit = layout_options.limit_of(on, limit)
    from repro.cli.views.simulated_step import show
    from repro.simulate.step import simulate as run

    found = run(
        experiment,
        on,
        memory_limit=limit,
        expandable=asked.expandable,
        time=True,
        record=bool(timeline),
    )
    if timeline:
        from repro.simulate.time.perfetto import write

        if found.time is None:
            raise ConfigError("--timeline", timeline, f"times that can be predicted: {found.no_time}")
        write(Path(timeline), found.time.timeline.spans, [role.role.stage for role in found.roles])
    if json:
        print(jsonlib.dumps(found.as_dict()))
    else:
        show(found, on)
    return 0


def _experiment(model: str, system: System, asked: Asked) -> Experiment:
    sizes, complete = models.load(model), layout_options.complete(asked.layout, asked.gpus, system)
    return layout_options.named(
        lambda: Experiment(
            name="simulate", model=sizes, layout=complete, training=_training(asked.seq), system=system.name
        )
    )


def _training(seq: int) -> Training:
    require(seq >= 0, "--seq", seq, "a number of tokens")
    return Training(seq=seq)


def fit(asked: Asked, model: str, sizes: dict[str, int], search: str, json: bool) -> int:
    """Find the largest model that fits and the first that does not; 1 if nothing fits."""
    from repro.cli.views.fit_and_plan import show_fit
    from repro.simulate.plan import fit as fits

    known = models.load(model) if model else None
    question = fits.question_of(systems.load(asked.system), asked, known, sizes, search)
    answer = fits.simulated(question)
    document = fits.document(question, answer)
    if json:
        print(jsonlib.dumps(document))
    else:
        show_fit(question, document)
    return 0 if answer.largest is not None else 1


def plan(
    model: str,
    asked: Asked,
    json: bool,
    as_map: bool = False,
    tokens: float = 0.0,
    price_per_gpu_hour: float = 0.0,
) -> int:
    """List every sensible layout, best first, or draw tp against pp; 1 if none fits."""
    from repro.simulate.plan import candidates

    on, gpus, seq = systems.load(asked.system), asked.gpus, asked.seq
    sizes = models.load(model)
    require(sizes.architecture == "gpt", "--model", model, "a gpt; other models are only counted")
    require(gpus >= 1, "--gpus", gpus, "a whole number of at least 1")
    require(_training(seq).seq <= sizes.seq, "--seq", seq, f"at most the model's {sizes.seq} positions")
    require(0 <= tokens < 1e18, "--tokens", tokens, "a number of tokens")
    price = price_per_gpu_hour
    require(0 <= price < 1e9, "--price-per-gpu-hour", price, "a price")
    require(not price or tokens > 0, "--tokens", tokens, "how much to train, with --price-per-gpu-hour")
    require(not (as_map and tokens), "--tokens", tokens, "left out with --map, which predicts no time")
    given = asked.memory_limit.split(",")
    require(as_map or len(given) == 1, "--memory-limit", asked.memory_limit, "one size; --map takes several")
    limits = sorted({layout_options.limit_of(on, layout_options.size(text)) for text in given})
    request = candidates.Request(
        sizes, on, gpus, limits[0], seq or sizes.seq, asked.layout, asked.expandable, tokens, price
    )
    if as_map:
        return _map(request, limits, json)
    count = len(candidates.candidates(request))
    if not json:
        _say(f"{count} layouts of {sizes.name} on {gpus} GPUs ...")
    from repro.cli.views.fit_and_plan import show_plan
    from repro.host.workers import Workers
    from repro.simulate.plan.plan import plan as run
    from repro.simulate.plan.rows import OK, document

    with Workers() as workers:
        found = run(request, workers)
    if json:
        print(jsonlib.dumps([document(request, row) for row in found.rows]))
    else:
        show_plan(request, found)
    return 0 if any(row.outcome == OK for row in found.rows) else 1


def _map(request: Any, limits: list[int], json: bool) -> int:
    """Draw which tp and pp fit each of `limits` (bytes of a device's memory)."""
    from repro.cli.views.plan_map import show_map
    from repro.host.workers import Workers
    from repro.simulate.plan.grid import axes, grid, map_document
    from repro.simulate.plan.rows import OK

    tensor, stages = axes(request)
    if not json:
        _say(f"{len(tensor)} x {len(stages)} layouts of {request.model.name} on {request.gpus} GPUs ...")
    with Workers() as workers:
        cells = grid(request, tensor, stages, limits, workers)
    if json:
        print(jsonlib.dumps(map_document(request, cells, limits)))
    else:
        show_map(request, cells, limits)
    return 0 if any(row.outcome == OK for cell in cells for row in cell.rows.values()) else 1


def _say(text: str) -> None:
    """A word to a person who waits."""
    import sys

    if sys.stderr.isatty():
        print(text, file=sys.stderr)


__all__ = ["ConfigError", "fit", "plan", "simulate"]
