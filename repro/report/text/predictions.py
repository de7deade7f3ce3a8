"""Implementation of `repro simulate`, `fit`, `plan`, `evaluate` and `export-weights`: check, compute, print.

Each command checks its input before it imports torch, so that an error is printed at once.
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.config import Experiment, Layout, Training, engines, models, words
from repro.config.errors import ConfigError, require
from repro.config.sizes import RANKS, at_most
from repro.config.system import System
from repro.engines.frameworks.files import LaunchFiles
from repro.measure.local_system import load_system
from repro.simulate.plan.candidates import (
    COST,
    DEFAULT_PLAN_ROWS,
    RANK_QUANTILES,
    LayoutQuery,
    PlanRequest,
    candidates,
    complete_experiment,
    device_memory_limit,
    parse_memory_size,
)
from repro.util import units
from repro.util.console import new_table, print_json, print_page, show_progress

if TYPE_CHECKING:
    from repro.simulate.step import Simulation


def print_simulation(
    model: str,
    query: LayoutQuery,
    timeline: Path | None,
    snapshot: Path | None,
    json: bool,
    details: bool,
    files: LaunchFiles,
) -> int:
    """Simulate one step of a model and print its memory, time and traffic; return 1 if it does not fit, else 0."""
    files.check(model)
    on = _system(query)
    experiment = _stated(files, model, query) or complete_experiment(model, query, on)
    found = _simulate(experiment, on, query, _memory_limit(on, query), record=timeline is not None)
    from repro.report.text.simulated_step import print_simulated_step
    from repro.simulate.step import NO_STEP_TIME, write_snapshot

    if timeline is not None:
        from repro.simulate.time.breakdown import write_chrome_trace

        if not found.fits:
            print(f"note: the timeline {timeline} is not written: {NO_STEP_TIME}", file=sys.stderr)
        elif found.time is None:
            says = f"cannot be written, since no times are predicted: {found.no_time}"
            raise ConfigError("timeline", str(timeline), says=says)
        else:
            write_chrome_trace(timeline, found.time.timeline.spans, [role.role.stage for role in found.roles])
    if snapshot is not None:
        write_snapshot(snapshot, found, expandable=query.expandable)
    if json:
        print_json(found.as_dict())
    else:
        print_simulated_step(found, on, _question(model, query, files.source), details=details)
    _write(files, experiment, on)
    return 0 if found.fits else 1


def print_versus(first: tuple[str, LayoutQuery], second: tuple[str, LayoutQuery], json: bool) -> int:
    """Simulate two queries (a model and a layout each), and print their differences; return 1 if one does not fit.

    If the second query has no global batch, the global batch of the first applies.
    """
    checked: list[tuple[Experiment, System, LayoutQuery, int | None]] = []
    for model, query in (first, second):
        on = _system(query)
        batch = {"global_batch": checked[0][0].layout.global_batch} if checked else {}
        query = replace(query, layout={**batch, **query.layout})
        experiment = complete_experiment(model, query, on)
        checked.append((experiment, on, query, _memory_limit(on, query)))
    found = [_simulate(*each) for each in checked]
    from repro.report.text.simulated_step import print_step_differences

    if json:
        print_json({name: simulation.as_dict() for name, simulation in zip("AB", found, strict=True)})
    else:
        print_step_differences(*found)
    return 0 if all(simulation.fits for simulation in found) else 1


def _memory_limit(system: System, query: LayoutQuery) -> int | None:
    limit = parse_memory_size(query.memory_limit)
    return None if limit is None else device_memory_limit(system, limit)


def _simulate(
    experiment: Experiment, system: System, query: LayoutQuery, limit: int | None, *, record: bool = False
) -> Simulation:
    """Simulate one step with memory, time and interval; `record`: also store the start and end of every operation."""
    from repro.simulate.step import simulate

    wanted = {"expandable": query.expandable, "time": True, "record": record, "interval": True}
    with show_progress(f"tracing one step of {experiment.model.name} on {query.gpus:,} GPUs"):
        return simulate(experiment, system, memory_limit=limit, **wanted)


def _stated(files: LaunchFiles, model: str, query: LayoutQuery) -> Experiment | None:
    """Return the experiment in the framework's file of `--from`, and print ignored settings; None without a file."""
    software = query.layout.get("software")
    is_valid = files.source is None or software is None
    require(is_valid, "software", software, says="cannot be combined with --from, whose file sets it")
    found, notes = files.read(model, query.gpus, query.layout, query.seq)
    for note in notes:
        print(f"note: {files.source}: {note}", file=sys.stderr)
    return found


def _write(files: LaunchFiles, experiment: Experiment, system: System) -> None:
    """Write the launch files that `--launch` requests, and print their names to standard error."""
    for line in files.write(experiment, int(system.devices_per_node.value or experiment.layout.world)):
        print(line, file=sys.stderr)


def _question(model: str, query: LayoutQuery, source: Path | None = None) -> str:
    """Return command-line options that repeat a prediction's model, system and devices, for a suggested command."""
    options = {
        "--model": model,
        "--from": str(source or ""),
        "--system": query.system,
        "--gpus": str(query.gpus),
        "--software": query.layout.get("software", ""),
        "--memory-limit": query.memory_limit,
        "--seq": str(query.seq or ""),
    }
    text = " ".join(f"{option} {shlex.quote(value)}" for option, value in options.items() if value)
    return text + " --expandable" * query.expandable


def _system(query: LayoutQuery) -> System:
    """Return the system that `query` names, and print a note to standard error if `query` needs more devices."""
    at_most("gpus", query.gpus, RANKS)
    on = load_system(query.system)
    nodes, devices = on.nodes.value or 0, on.devices_per_node.value or 0
    is_published = on.provenance is None and "memory" not in on.links
    if is_published and 0 < nodes * devices < query.gpus:
        size = f"{nodes * devices:,.0f} GPUs ({nodes:,.0f} nodes of {devices:,.0f})"
        text = f"{on.name} has {size}; the prediction for {query.gpus:,} GPUs assumes more nodes of the same kind"
        print(f"note: {text}", file=sys.stderr)
    if name := query.layout.get("software"):
        print(f"note: {engines.describe_software(name)}", file=sys.stderr)
    return on


def print_fit(
    query: LayoutQuery, model: str, sizes: dict[str, int], search: str, json: bool, details: bool
) -> int:
    """Print the largest model that fits in device memory and the limit of the next larger one; return 1 if none fits.

    If `query.layout` has no ZeRO stage, all stages are searched, but only stage 0 for JSON output.
    """
    from repro.report.text.fit_and_plan import print_fits
    from repro.simulate.plan import fit

    known = models.load_model(model) if model else None
    system, fits, remarks = _system(query), [], []
    stages: list[int | None] = [None]
    if not json and "zero" not in query.layout:
        software = query.layout.get("software")
        stages = [*map(int, engines.find_software(software).stages)] if software else [0, 1, 2, 3]
    for stage in stages:
        asked = query if stage is None else replace(query, layout={**query.layout, "zero": stage})
        try:
            question = fit.question_of(system, asked, known, sizes, search)
            with show_progress(f"searching for the largest model that fits on {query.gpus:,} GPUs"):
                answer = fit.fit_by_simulation(question)
        except ConfigError as error:
            if stage == stages[0]:
                raise
            remarks.append(f"ZeRO {stage} cannot be simulated: {error}.")
            continue
        fits.append((question, fit.fit_document(question, answer)))
        if question.layout.copies == 1:
            break
    if json:
        print_json(fits[0][1])
    else:
        print_fits(fits, _question(model or "MODEL", query), remarks, details=details)
    return 0 if any(document["largest"] is not None for _, document in fits) else 1


def print_measured_fit(
    query: LayoutQuery,
    model: str,
    sizes: dict[str, int],
    search: str,
    as_rank: int | None,
    of: int,
    results: Path,
    json: bool,
    details: bool,
) -> int:
    """Run trials of increasing size on real devices, and record the largest model that fits.

    Returns 1 if nothing fits or a trial fails, and 128 plus the number of a signal, after which no record is written.
    """
    from repro.launch.fit import plan_trials
    from repro.launch.job import Interrupt
    from repro.report.text.fit_and_plan import print_fits
    from repro.results.store import Store

    trials = plan_trials(query, models.load_model(model) if model else None, sizes, search, as_rank, of)
    began = time.perf_counter()
    with Interrupt() as interrupt:
        answer = trials.run(interrupt)
    seconds = time.perf_counter() - began
    document = trials.document(answer, seconds)
    if not interrupt:
        with Store(results) as store:
            document["record"] = store.append(trials.record(answer, seconds)).id
    if json:
        print_json(document)
    else:
        print_fits([(trials.question, document)], _question(model or "MODEL", query), details=details)
        if not interrupt:
            option = words.results_option(results)
            print(f"Recorded in {results}. `repro claims{option}` compares the result with published limits.")
    if interrupt:
        return 128 + interrupt.signal
    failed = answer.first_failing is not None and answer.first_failing.outcome != "oom"
    return 0 if answer.largest is not None and not failed else 1


def print_plan(
    model: str,
    query: LayoutQuery,
    json: bool,
    as_map: bool,
    tokens: float,
    price_per_gpu_hour: str,
    top: int | None,
    rank_by: str,
    details: bool,
    files: LaunchFiles,
) -> int:
    """Print the `top` best layouts, or with `as_map` which tp and pp degrees fit; return 1 if no layout fits, else 0.

    `query.system` may name several systems, separated by commas. Their layouts are ranked together.
    """
    files.check(model)
    says = "cannot be combined with --map"
    require(not (as_map and files.framework), "launch", files.framework, says=says)
    stated = _stated(files, model, query)
    if stated is not None:
        same = {key: getattr(stated.layout, key) for key in ("precision", "global_batch")}
        query = replace(query, layout={**same, **query.layout}, seq=stated.seq)
    gpus, seq, queries = query.gpus, query.seq, [replace(query, system=n) for n in query.system.split(",")]
    systems = [_system(each) for each in queries]
    is_unique = len({on.name for on in systems}) == len(systems)
    require(is_unique, "system", query.system, "one system, or different systems separated by commas")
    require(not as_map or len(systems) == 1, "system", query.system, "one system with --map")
    sizes = stated.model if stated else models.load_model(model)
    require(sizes.architecture == "gpt", "model", model, "a model with `architecture = gpt`")
    require(gpus >= 1, "gpus", gpus, "an integer of at least 1")
    sizes.check_sequence(Training(seq=seq).seq)
    require(0 <= tokens < 1e18, "tokens", tokens, "a number of tokens")
    prices = _prices(price_per_gpu_hour, len(systems))
    trained = "more than 0 with --price-per-gpu-hour and --rank-by cost, which need the number of tokens"
    require(tokens > 0 or not (price_per_gpu_hour or rank_by == COST), "tokens", tokens, trained)
    require(not (as_map and tokens), "tokens", tokens, says=f"{says}, because a map has no step times")
    require(top is None or top >= 1, "top", top, "a number of layouts of at least 1")
    require(top is None or not as_map, "top", top, says=f"{says}, because a map shows every tp and pp")
    require(rank_by in RANK_QUANTILES, "rank_by", rank_by, f"one of {', '.join(RANK_QUANTILES)}")
    given = query.memory_limit.split(",")
    require(as_map or len(given) == 1, "memory_limit", query.memory_limit, "one memory size without --map")
    requests = []
    for on, price in zip(systems, prices, strict=True):
        limit = device_memory_limit(on, parse_memory_size(given[0]))
        asked = limit, seq or sizes.seq, query.layout, query.expandable, tokens, price, rank_by
        requests.append(PlanRequest(sizes, on, gpus, *asked))
        says = f"needs the key device.price_per_hour, which {on.name} lacks, or --price-per-gpu-hour"
        require(rank_by != COST or requests[-1].price is not None, "rank_by", rank_by, says=says)
    if as_map:
        limits = sorted({device_memory_limit(systems[0], parse_memory_size(text)) for text in given})
        return _print_map(requests[0], limits, json)
    shown = top or DEFAULT_PLAN_ROWS - 2 * bool(tokens)  # `tokens` adds two lines on the training run
    count = sum(len(candidates(request)) for request in requests)
    from repro.util.processes import Workers

    with show_progress(f"{count:,} layouts of {sizes.name} on {gpus:,} GPUs"), Workers() as workers:
        workers.start()
        from repro.report.text.fit_and_plan import print_layouts
        from repro.simulate.plan.plan import search_layouts as run
        from repro.simulate.plan.planner import plan_experiment
        from repro.simulate.plan.rows import OK, plan_entry, rank_systems

        plans = []
        for request in requests:
            found = run(request, workers, shown, exhaustive=json and top is None)
            says = f"cannot be ranked with other systems, because it has no step time: {found.no_time}"
            require(len(requests) == 1 or not found.no_time, "system", request.system.name, says=says)
            plans.append((request, found))
    ranked = rank_systems([(request, found.rows) for request, found in plans])
    request, best = ranked[0]
    if json:
        print_json([plan_entry(*pair) for pair in ranked[:top]])
    else:
        question = _question(model, queries[systems.index(request.system)], files.source)
        if stated is not None:
            question += _defaults_again(stated.layout, best.layout)
        print_layouts(plans, ranked, shown, question, details=details)
    if best.outcome == OK:
        _write(files, plan_experiment(request, best.layout), request.system)
    return int(best.outcome != OK)


def _prices(text: str, count: int) -> list[float]:
    """Return the price of a GPU hour for each of `count` systems; 0 for each system if the text is empty."""
    try:
        found = [float(part) for part in text.split(",")] if text else [0.0] * count
    except ValueError:
        found = []
    known = len(found) == count and all(0 < price < 1e9 for price in found)
    what = f"{words.count_noun(count, 'price')} above 0, separated by commas"
    require(known or not text, "price_per_gpu_hour", text, what)
    return found


def _defaults_again(stated: Layout, found: Layout) -> str:
    """Return the options that set keys of the launch file's layout `stated` back to their defaults, as in `found`."""
    text = ""
    for key in (field.name for field in fields(Layout) if field.name not in ("dp", "stage_layers")):
        value, default = getattr(found, key), getattr(Layout, key)
        if value == default != getattr(stated, key):
            option = key.replace("_", "-")
            text += f" --no-{option}" if default is False else f" --{option} {value}"
    return text


def _print_map(request: PlanRequest, limits: list[int], json: bool) -> int:
    """Print which tp and pp degrees fit into device memories of `limits` bytes; return 1 if no layout fits, else 0."""
    from repro.report.text.fit_and_plan import print_plan_map
    from repro.simulate.plan.plan import map_axes, map_document, search_map
    from repro.simulate.plan.rows import OK
    from repro.util.processes import Workers

    tensor, stages = map_axes(request)
    what = f"{len(tensor)} x {len(stages)} layouts of {request.model.name} on {request.gpus:,} GPUs"
    with show_progress(what), Workers() as workers:
        workers.start()
        cells = search_map(request, tensor, stages, limits, workers)
    if json:
        print_json(map_document(request, cells, limits))
    else:
        print_plan_map(request, cells, limits)
    return 0 if any(row.outcome == OK for cell in cells for row in cell.rows.values()) else 1


def print_scores(
    weights: Path, task: str, data: Path, layout: Layout, results: Path, json: bool, **how: Any
) -> int:
    """Evaluate weights on a task and print scores; return 1 if a rank failed. Raises `ConfigError` for bad input."""
    from repro.quality.evaluate.run import EvaluationOptions, run_evaluation

    options = EvaluationOptions(weights=weights, task=task, data=data, layout=layout, **how)
    try:
        record, signal = run_evaluation(options, results)
    except ConfigError as error:
        known = error.key in ("tp", "pp", "dp", "zero", "micro_batch", "precision") and not error.file
        raise error.for_key(f"--{error.key.replace('_', '-')}") if known else error from None
    if signal:
        return 128 + signal
    if json:
        print_json(record.as_dict())
        return int(record.outcome != "ok")
    way = record.way
    scores = [
        (name, units.percent(value) if name.startswith("accuracy") else f"{value:,.10g}")
        for name, value in record.metrics.items()
    ]
    print_page(
        f"{record.name}: {record.outcome}. {record.reason}".rstrip(),
        new_table("score", "value", rows=scores),
        f"Protocol {way['name']}: {way['source']}.",
        *(f"{line}." for line in way["rules"]),
        *(f"Not specified: {line}." for line in way["left_open"]),
        *(f"Published: {line}." for line in way["published"]),
    )
    return int(record.outcome != "ok")


def print_exported_weights(weights: Path, output: Path, vocab: int, model: str, json: bool) -> int:
    """Export model weights to the folder `output` and print its files; return 0. Raises `ConfigError` for bad input."""
    from repro.quality.weights import open_weights
    from repro.quality.weights.huggingface import export_huggingface

    source = open_weights(weights, models.load_model(model) if model else None)
    source.check()
    written = export_huggingface(source, output, vocab)
    if json:
        print_json({"weights": source.kind, "files": [str(path) for path in written]})
        return 0
    sizes = source.model
    print_page(
        f"{output}: weights of {source.kind}, {sizes.layers} layers of width {sizes.hidden}, "
        f"{sizes.vocab} tokens.",
        new_table("file", "size", rows=[(path.name, units.size(path.stat().st_size)) for path in written]),
    )
    return 0
