"""Output of `repro validate`: predicted against published and measured values, and the uncertain inputs to measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from repro.accuracy.validate import published
from repro.accuracy.validate.published import FamilyStatistics, Point
from repro.accuracy.validate.unknowns import LISTED_INPUTS, UncertainInput, count_by_claim, format_range
from repro.config import words
from repro.config.errors import ConfigError
from repro.simulate.time.calibration import BASES, BASIS_LABELS
from repro.util import files, units
from repro.util.console import new_facts_table, new_table, print_json, print_page, stdout

if TYPE_CHECKING:
    from repro.accuracy.validate.implied_inputs import ImpliedInput
    from repro.accuracy.validate.machine import MachineErrors
    from repro.report.evidence import JudgedStore


WIDER_INTERVAL_NOTE = (
    "Wider interval: the 90 % interval, widened until 90 % of the values of other publications lie inside."
)
MAX_INPUTS = 10
"""Maximum number of uncertain system properties that are printed without `--details`."""
SIMULATE_COMMAND = "repro run suites/NAME.toml --evidence simulated"


def print_validation(
    results: Path, json: bool, details: bool, svg: Path | None, system: str, own: Sequence[Path] = ()
) -> int:
    """Print the errors of predicted values against published values, from the records in `results`; return 0.

    `system`: file of this machine, whose measured runs are also compared. `own`: additional files of claims.
    """
    seen = _read_store(results, own)
    found = published.points(seen.judged, seen.records)
    machine = None
    if system:
        from repro.accuracy.validate.machine import predict_measured_runs
        from repro.measure.local_system import load_system

        machine = predict_measured_runs(seen.records, load_system(system))
    if svg is not None:
        _write_scatter(found, svg)
    if json:
        print_json(validation_document(found, machine))
        return 0
    print_points(found, details)
    if machine is not None:
        print_machine_errors(machine, details)
    return 0


def print_coverage(results: Path, between: tuple[float, float], own: Sequence[Path] = ()) -> int:
    """Print the percentages of published rates and ratios in predicted intervals; return 0 if both are in `between`."""
    seen = _read_store(results, own)
    console, least, most = stdout(), *between
    found = published.family_statistics(published.points(seen.judged, seen.records))
    together = [
        family for family in found if family.name in (published.ALL_RATES, published.RATIOS) and family.wider
    ]
    parts = [(family, 100 * family.held_wider / family.wider) for family in together]
    if len(parts) < 2:
        print_page("The results folder has too few predictions.", command=SIMULATE_COMMAND, console=console)
        return 1
    as_promised = all(least <= part <= most for _, part in parts)
    counts = (f"{one.held_wider} of {one.wider} {one.name.removeprefix('all ')}" for one, _ in parts)
    shares = " and ".join(f"{part:.0f} %" for _, part in parts)
    text = f"{' and '.join(counts)} lie in their widened 90 % intervals: {shares}, "
    print_page(
        f"{text}{'' if as_promised else 'not both '}between {least:g} and {most:g} %.", console=console
    )
    return 0 if as_promised else 1


def _read_store(results: Path, own: Sequence[Path]) -> JudgedStore:
    """Return records and judged claims of a results folder, and print notes on unreadable lines to standard error."""
    from repro.report.evidence import read_store
    from repro.results.store import print_remarks

    seen = read_store(results, own)
    print_remarks(seen.torn)
    return seen


def validation_document(found: Sequence[Point], machine: MachineErrors | None = None) -> dict[str, Any]:
    """Return the JSON document of `repro validate`: every prediction with its error, and statistics by run family."""
    ratios = [point for point in found if point.kind == published.RATIO and not point.left_out]
    document: dict[str, Any] = {
        "points": [
            {
                **{key: value for key, value in vars(point).items() if key != "stated"},
                "name": point.name,
                "runs": list(point.runs),
                "reports": sorted(point.reports),
                "error": point.error,
                "counts": not point.left_out,
                "with_the_models_error_elsewhere": point.wider,
            }
            for point in found
        ],
        "families": [_statistics_of(family) for family in published.family_statistics(found)],
        "claims": [_statistics_of(claim) for claim in published.claim_statistics(found)],
        "memory_by_source": [_statistics_of(source) for source in published.source_statistics(found)],
        "ratios_on_the_right_side_of_1": sum(point.right_side for point in ratios),
        "ratios": len(ratios),
        "calibration": [point.name for point in found if point.left_out == published.CALIBRATION],
    }
    if machine is not None:
        document["machine"] = {
            "system": machine.system,
            "median_error": machine.median if machine.pairs else None,
            "pairs": [{**vars(pair), "error": pair.error} for pair in machine.pairs],
            "missing": dict(machine.missing),
        }
    return document


def _statistics_of(family: FamilyStatistics) -> dict[str, Any]:
    return {
        "name": family.name,
        "points": family.points,
        "median_error": family.median,
        "worst": family.worst.name,
        "worst_error": family.worst.error,
        "close": family.close / family.points,
        "close_error": published.close_error(family.worst.kind),
        "within_the_90_percent_interval": family.held / family.points,
        "with_the_models_error_elsewhere": {"points": family.wider, "held": family.held_wider},
    }


def print_points(found: Sequence[Point], details: bool) -> None:
    """Print prediction errors by family of published runs; `details`: also all predictions, and causes of errors."""
    if not found:
        print_page("The results folder has no predictions of published values.", command=SIMULATE_COMMAND)
        return
    families = published.family_statistics(found)
    ratios = [p for p in found if p.kind == published.RATIO and not p.left_out]
    text = ""
    for rates in (family for family in families if family.name == published.ALL_RATES):
        text = (
            f"Predicted rates: median error {units.percent(rates.median)}. The 90 % intervals of the predictions "
            f"contain {rates.held} of {rates.points} published rates. "
        )
    if ratios:
        text += f"{sum(p.right_side for p in ratios)} of {len(ratios)} ratios are on the same side of 1 as published. "
    for peaks in (family for family in families if family.name == published.PEAK_MEMORY):
        text += f"Predicted peak memory: median error {units.percent(peaks.median)}."
    headings = ["family", "rows", "median\nerror (%)", "error\nbelow 25 %*", "in 90 %\ninterval"]
    headings += ["in wider\ninterval", "largest\nerror (%)", "claim of the\nlargest error"]
    statistics = _statistics_table(headings, families)
    more = "--details lists all rows, the reasons of large errors, and peak memory by source."
    sources = published.source_statistics(found)
    by_source = [_statistics_table(["source of peak memory", *headings[1:]], sources)] if sources else []
    parts = [*by_source, *_point_tables(found)] if details else [more]
    note = f"*: for peak memory, errors below {units.number(100 * published.CLOSE_MEMORY_ERROR)} %."
    print_page(text.strip(), statistics, f"{note} {WIDER_INTERVAL_NOTE}", *parts)


def _statistics_table(headings: list[str], families: Sequence[FamilyStatistics]) -> Table:
    left = (headings[0], headings[-1])
    rows = (
        (
            *(
                family.name,
                str(family.points),
                f"{100 * family.median:.1f}",
                f"{family.close}/{family.points}",
            ),
            *_interval_counts(family),
            *(f"{100 * family.worst.error:+.1f}", family.worst.claim),
        )
        for family in families
    )
    return new_table(*headings, left=left, wrap=left, rows=rows)


def _point_tables(found: Sequence[Point]) -> list[str | Table]:
    """Return tables of predicted values by family of runs, of reasons of large errors, and of counts by claim."""
    counted = [point for point in found if not point.left_out]
    groups = {
        name: [p for p in counted if (p.kind, p.family) == (published.RATE, name)]
        for name in published.FAMILIES
    }
    groups |= {
        "Ratios": [point for point in counted if point.kind == published.RATIO],
        "Peak memory": [point for point in counted if point.kind == published.MEMORY],
        "Omitted: calibration values": [point for point in found if point.left_out == published.CALIBRATION],
        "Not counted in the errors: bounds, means, and further values of a run that is listed above": [
            point for point in found if point.left_out not in ("", published.CALIBRATION)
        ],
    }
    reasons: dict[str, list[str]] = {}
    for point in counted:
        if abs(point.error) > published.CLOSE_ERROR:
            reasons.setdefault(point.note or "unknown", []).append(f"{point.claim} {point.label}")
    left = f"rows with an error above {units.number(100 * published.CLOSE_ERROR)} %", "known reason"
    by_claim = ((c.name, str(c.points), *_interval_counts(c)) for c in published.claim_statistics(found))
    used = {point.rests_on for point in found}
    return [
        *(part for title, group in groups.items() if group for part in (title, _point_table(group))),
        new_table(
            *left, left=2, wrap=left, below=1, rows=((", ".join(n), why) for why, n in reasons.items())
        ),
        new_table("claim", "rows", "in 90 % interval", "in wider interval", rows=by_claim),
        *(f"{BASIS_LABELS[basis]}: {meaning}." for basis, meaning in BASES.items() if basis in used),
    ]


def _point_table(group: Sequence[Point]) -> Table:
    left = ("claim", "row", "unit", "basis")
    wrong = [
        point
        for point in group
        if point.kind == published.RATIO and not point.left_out and not point.right_side
    ]
    headings = ("published", "predicted", "90 % interval", "wider interval", "unit", "error (%)", "basis")
    rows = (
        (
            *(point.claim, point.label, units.number(point.published), units.number(point.predicted)),
            _interval_text((point.low, point.high) if point.low < point.high else None),
            *(_interval_text(point.wider), point.unit),
            f"{100 * point.error:+.1f}" + ", published ratio on the other side of 1" * (point in wrong),
            BASIS_LABELS[point.rests_on],
        )
        for point in group
    )
    return new_table("claim", "row", *headings, left=left, wrap=("claim", "row", *headings), rows=rows)


def _interval_text(interval: tuple[float, float] | None) -> str:
    return " to ".join(map(units.number, interval)) if interval else units.NO_VALUE


def _interval_counts(family: FamilyStatistics) -> tuple[str, str]:
    wider = f"{family.held_wider}/{family.wider}" if family.wider else units.NO_VALUE
    return f"{family.held}/{family.points}", wider


def print_machine_errors(machine: MachineErrors, details: bool) -> None:
    """Print the median error of step times predicted for this machine; `details`: also print each step time."""
    headings = ("experiment", "layout", "measured", "predicted", "error (%)", "basis")
    made = new_table(*headings, left={"experiment", "layout", "basis"}, wrap=headings)
    for pair in machine.pairs:
        times = units.seconds(pair.measured), units.seconds(pair.predicted)
        made.add_row(pair.name, pair.layout, *times, f"{100 * pair.error:+.1f}", BASIS_LABELS[pair.rests_on])
    text = f"{len(machine.pairs)} measured runs of this machine are predicted for the system {machine.system}"
    text += f": median error {units.percent(machine.median)}." if machine.pairs else "."
    missing = (f"{name} cannot be predicted: {reason}" for name, reason in machine.missing.items())
    print_page(text, *([made, *missing] if details else ()))


def _write_scatter(found: Sequence[Point], path: Path) -> None:
    """Draw predicted over published throughput to `path`. Raises `ConfigError` without predictions in the results."""
    from repro.report.figures import style, validation

    with style.figure_style():
        drawing = validation.draw_validation(found)
    if drawing.figure is None:
        says = f"cannot be drawn, since the results folder has no predictions; run `{SIMULATE_COMMAND}` first"
        raise ConfigError("--svg", str(path), says=says)
    files.write_file(path, style.to_svg(drawing))


def print_unknowns(results: Path, json: bool, details: bool, own: Sequence[Path] = ()) -> int:
    """Print the uncertain inputs of predictions in the results folder; return 0. `own`: additional files of claims."""
    seen = _read_store(results, own)
    if json:
        print_json({**seen.shopping_list.as_dict(), "implied": [one.as_dict() for one in seen.implied]})
        return 0
    found = seen.shopping_list.inputs
    answer = "No input is uncertain."
    for first in found[:1]:
        answer = (
            f"Largest of {len(found)} uncertainties: {words.describe_input(first.key)} of {first.system}, "
        )
        answer += f"which causes {units.percent(first.share)} of the widths of all prediction intervals."
    headings = ("input", "system", "value [range]", "rows", "decided\nrows", "share of\nwidth (%)")
    rows = [
        (
            one.key,
            one.system,
            format_range(one),
            str(len(one.rows)),
            str(len(one.settles)),
            f"{100 * one.share:.1f}",
        )
        for one in found[: None if details else MAX_INPUTS]
    ]
    print_page(
        answer,
        new_table(*headings, left=3, wrap=headings[:3], rows=rows),
        "Decided rows: predictions for which the input causes more than half of the uncertainty.",
        *(_input_details(found, seen.implied) if details else ["--details lists sources and measurements."]),
    )  # fmt: skip
    return 0


def _input_details(found: Sequence[UncertainInput], implied: Sequence[ImpliedInput]) -> list[str | Table]:
    """Return tables of uncertain inputs: source, how to measure them, and values that published results imply."""
    parts: list[str | Table] = []
    for one in found[:LISTED_INPUTS]:
        how, facts = one.measured_by, new_facts_table()
        facts.add_row("input", f"{one.key} of {one.system}")
        claims = f"{': ' * bool(one.possible)}{count_by_claim(one.possible)}"
        facts.add_row("verdicts", f"{len(one.possible)} possible{claims}")
        command = f"{how.command}: {how.fact}" if how.command else "no `repro` command measures this input"
        facts.add_row("measured by", command)
        facts.add_row("", how.how)
        facts.add_row("source", one.source)
        parts += [facts]
    order = sorted(implied, key=lambda one: one.contradiction is None)
    headings = ("input", "system", "value implied by published results")
    rows = ((one.key, one.system, one.words) for one in order)
    table = new_table(*headings, left=3, wrap=headings[2:], below=1, rows=rows)
    note = "If no single value suits all published results, sources contradict each other, or the model is wrong."
    return [*parts, table, note if implied else ""]
