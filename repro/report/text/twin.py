"""Output of `repro twin`: compared experiments, their scaled-down copies (twins), and the speed ratios of both."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from repro.accuracy.twins.derive import Twin, TwinOptions, derive, useful_rate
from repro.accuracy.twins.numbers import ScaledRatio, ratio_of, similarity_numbers
from repro.accuracy.twins.suite import NamedTwin, claim_comparisons, named_comparisons, suite_text
from repro.claims.reader import load_ledger
from repro.claims.run_commands import SuiteCatalogue
from repro.config import words
from repro.config.errors import ConfigError, require
from repro.measure.local_system import load_system
from repro.util import files, units
from repro.util.console import new_table, print_json, print_page

if TYPE_CHECKING:
    from repro.config import Experiment

CALIBRATE_COMMAND = "repro calibrate --system local --gpus {ranks} --suite SUITE.toml --output FILE.toml"

MAX_RATIOS = 8
"""Maximum number of speed ratios of scaled-down experiments that `repro twin` prints."""


def print_twin(
    names: Sequence[str],
    machine: Path | None,
    choice: TwinOptions,
    within: str,
    between: str,
    write: Path | None,
    json: bool,
    details: bool,
) -> int:
    """Print scaled-down copies of experiments, or of claims' experiments (`names`); write them to suite `write`.

    `within`, `between`: bytes/s of the originals' links inside and between nodes, as lists; empty: those of the system.
    """
    for key in ("ranks", "part", "layers"):
        require(getattr(choice, key) >= 1, f"--{key}", getattr(choice, key), "1 or more")
    require(choice.steps >= 2, "--steps", choice.steps, "2 or more, because the first step is not timed")
    for key in ("width", "tp"):
        require(getattr(choice, key) >= 0, f"--{key}", getattr(choice, key), "0 (automatic) or more")
    rates = [_parse_rates("--within", within), _parse_rates("--between", between)]
    compared, claims = _originals(names)
    if machine is None:
        right = f"a system file of this machine, written by: {CALIBRATE_COMMAND.format(ranks=choice.ranks)}"
        raise ConfigError("--machine", expected=right)
    system = load_system(machine)
    found = []
    for inside, outside in itertools.product(*rates):
        chosen = replace(choice, within=inside, between=outside)
        ending = _variant_suffix(inside, outside)
        found += [NamedTwin(derive(members, system, chosen), ending) for members in compared]
    if write is not None:
        required = {f"--{key}": getattr(choice, key) for key in ("ranks", "part", "layers", "steps")}
        optional = {"--width": choice.width, "--tp": choice.tp, "--within": within, "--between": between}
        options = required | {key: value for key, value in optional.items() if value}
        arguments = [*names, "--machine", machine.name, *(part for pair in options.items() for part in pair)]
        made = " ".join(map(str, [*arguments, "--write", write]))
        text = suite_text(found, file=str(write), name=write.stem, arguments=made, claims=claims)
        files.replace_file(write, text)
    if json:
        print_json([_document(each.twin, each.ending) for each in found])
        return 0
    count = sum(len(each.twin.members) for each in found)
    parts = [part for each in found if details for part in _twin_details(each.twin)]
    print_page(
        *_describe_ratios(found),
        *parts,
        ""
        if details
        else "--details lists dimensionless numbers of published runs and twins, and effects of differences.",
        "" if write is None else f"{write}: {words.count_noun(count, 'experiment')}.",
        command="" if write is None else f"repro run {write}",
    )
    return 0


def _originals(names: Sequence[str]) -> tuple[list[list[Experiment]], list[str]]:
    """Return groups of experiments that are compared with each other, and the ids of the claims that compare them."""
    catalogue = SuiteCatalogue()
    if all("/" in name for name in names):
        return named_comparisons(names, catalogue.suites), []
    claims = {claim.id: claim for claim in load_ledger().claims}
    found: list[list[Experiment]] = []
    for name in names:
        if name not in claims:
            raise ConfigError("CLAIM", name, "the id of a claim (repro claims --all), or SUITE/EXPERIMENT...")
        found += claim_comparisons(claims[name], catalogue.suites)
    return found, list(names)


def _parse_rates(option: str, given: str) -> list[float]:
    """Return the link rates in bytes/s in an option value, separated by commas; `[0]` if the value is empty."""
    try:
        found = [float(part) for part in given.split(",")] if given else [0.0]
    except ValueError:
        found = []
    if not found or (given and not all(0 < rate < math.inf for rate in found)):
        raise ConfigError(option, given, "bytes/s greater than 0, or several with commas: 2.5e9,5e9")
    return found


def _variant_suffix(within: float, between: float) -> str:
    """Return the name suffix of a scaled-down experiment by link rates in bytes/s, such as `-between2.5` (2.5 GB/s)."""
    parts = (("within", within), ("between", between))
    return "".join(f"-{name}{rate / units.GB:g}" for name, rate in parts if rate)


def _ratios(twin: Twin) -> list[ScaledRatio]:
    return [ratio_of(member, twin.members[0], twin.scales[0]) for member in twin.members[1:]]


def _describe_ratios(found: Sequence[NamedTwin]) -> list[str | Table]:
    """Return tables of the speed ratios, and of the sizes, of original experiments and their scaled-down copies."""
    ratios = [(each.ending, each.twin, ratio) for each in found for ratio in _ratios(each.twin)]
    apart = [ratio.twin / ratio.original - 1 for _, _, ratio in ratios]
    compared = new_table("compared", "original\nratio", "twin\nratio", "difference\n(%)", "corrected\nratio")
    for (ending, twin, ratio), difference in list(zip(ratios, apart, strict=True))[:MAX_RATIOS]:
        name = f"{ratio.member} over {twin.members[0].original.name}{ending}"
        values = (f"{value:.3f}" for value in (ratio.original, ratio.twin))
        compared.add_row(name, *values, f"{100 * difference:+.1f}", f"{ratio.rest:.3f}")
    properties = ("degrees", "layers x width", "step (s)")
    headings = (f"{side}\n{size}" for size in properties for side in ("original", "twin"))
    sizes = new_table("experiment", *headings)
    for member in found[0].twin.members:
        both = member.original, member.twin
        degrees = (words.describe_layout(e.layout).partition(",")[0] for e in both)
        shapes = (f"{e.model.layers} x {e.model.hidden}" for e in both)
        steps = (units.number(p.step_s) for p in (member.before, member.after))
        sizes.add_row(member.original.name, *degrees, *shapes, *steps)
    note = "Ratio: FLOP/s per device over those of the baseline. Corrected: without the effects of the smaller scale."
    largest = units.percent(max(map(abs, apart), default=0.0))
    answer = f"The smaller scale changes the predicted speed ratio by {largest} or less."
    return [*([answer, compared, note] if apart else ["No experiments are compared."]), sizes]


def _twin_details(twin: Twin) -> list[str | Table]:
    """Return tables of scaled-down experiments' dimensionless numbers, and of how their changes affect speed ratios."""
    parts: list[str | Table] = []
    for member, scale in zip(twin.members, twin.scales, strict=True):
        headings = ("number", "original", "twin", "change", "reason")
        numbers = new_table(*headings, left={"number", "reason"}, wrap=("reason",))
        for n in similarity_numbers(member, twin.members[0]):
            values = units.number(n.original, 4), units.number(n.twin, 4)
            change = "new" if not n.original else units.percent(n.change, sign=True)
            numbers.add_row(n.name, *values, "equal" if n.kept else change, n.by)
        parts += [
            f"{member.original.name} ({member.original.system}) and its small-scale twin.",
            f"Basis of predicted times: {member.before.rests_on}, {member.after.rests_on}. Network: {member.network}.",
            f"Ratios of twin to original: hidden size {scale.width:g}, tokens per sample {scale.tokens:g}, "
            f"bytes per element {scale.element:g}, FLOP/s {scale.rate:.4g}.",
            numbers,
        ]
    parts += [f"Link without a limit: {reason}" for reason in twin.unlimited]
    for ratio in _ratios(twin):
        effects = {effect.difference: effect.ratio for effect in ratio.effects} | {
            "all conditions": ratio.rest
        }
        changes = {name: (value, 100 * (value / ratio.twin - 1)) for name, value in effects.items()}
        rows = ((name, f"{value:.3f}", f"{change:+.1f}") for name, (value, change) in changes.items())
        parts += [new_table(f"{ratio.member}: hypothetical condition", "ratio", "change (%)", rows=rows)]
    return parts


def _document(twin: Twin, ending: str) -> dict[str, Any]:
    """Return the JSON document of `repro twin` for one group of compared experiments and their scaled-down copies."""
    return {
        "variant": ending.lstrip("-"),
        "take_turns": [member.original.name for member in twin.together],
        "not_limited": twin.unlimited,
        "members": [
            {
                "original": member.original.name,
                "system": member.original.system,
                "scale": vars(scale),
                "twin": member.twin.as_dict(),
                "step_s": {"original": member.before.step_s, "twin": member.after.step_s},
                "rests_on": {"original": member.before.rests_on, "twin": member.after.rests_on},
                "flops_per_device": {
                    "original": useful_rate(member.before),
                    "twin": useful_rate(member.after),
                },
                "numbers": [{**vars(n), "kept": n.kept} for n in similarity_numbers(member, twin.members[0])],
            }
            for member, scale in zip(twin.members, twin.scales, strict=True)
        ],
        "ratios": [
            {**vars(ratio), "effects": [vars(effect) for effect in ratio.effects]} for ratio in _ratios(twin)
        ],
    }
