"""Output of `repro validate`: predicted against published and measured values, and the unknowns to measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.accuracy.validate.published import (
    ALL_RATES,
    CALIBRATION,
    CLOSE_ERROR,
    FAMILIES,
    RATE,
    RATIO,
    RATIOS,
    FamilyStatistics,
    Point,
    claim_statistics,
    family_statistics,
    points,
)
from repro.accuracy.validate.unknowns import (
    LISTED_INPUTS,
    RankedInputs,
    UncertainInput,
    count_by_claim,
    format_range,
)
from repro.config.errors import ConfigError
from repro.simulate.time.calibration import BASES, BASIS_LABELS
from repro.util import files, units
from repro.util.console import WIDE_PAGE_COLUMNS, new_facts_table, new_table, print_json, stdout

if TYPE_CHECKING:
    from rich.console import Console

    from repro.accuracy.validate.implied_inputs import ImpliedInput
    from repro.accuracy.validate.machine import MachineErrors


FROM_INPUTS, WITH_MODEL_ERROR = "90 % from inputs", "with the model's error elsewhere"
MODEL_ERROR_NOTE = (
    f"{WITH_MODEL_ERROR}: the same, as much wider as nine of ten rows of other reports need, none of the row's own; no "
    "verdict rests on it."
)
SIMULATE_COMMAND = "repro run suites/NAME.toml --evidence simulated"


def print_validation(
    results: Path, json: bool, svg: Path | None, system: str, own: Sequence[Path] = ()
) -> int:
    """Compare predictions of the store `results`; return 0. `system`: also compare local measurements with it.

    `own`: additional ledger files.
    """
    from repro.report import evidence
    from repro.results.store import print_remarks

    seen = evidence.read_store(results, own)
    print_remarks(seen.torn)
    found = points(seen.judged, seen.records)
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
    console = stdout(WIDE_PAGE_COLUMNS)
    print_points(found, console)
    if machine is not None:
        print_machine_errors(machine, console)
    return 0


def print_coverage(results: Path, between: tuple[float, float], own: Sequence[Path] = ()) -> int:
    """Print how many published rates and ratios lie in their intervals; return 0 if both shares lie in `between`."""
    from repro.report import evidence
    from repro.results.store import print_remarks

    seen = evidence.read_store(results, own)
    print_remarks(seen.torn)
    console, least, most = stdout(), *between
    found = family_statistics(points(seen.judged, seen.records))
    together = [family for family in found if family.name in (ALL_RATES, RATIOS) and family.wider]
    parts = [(family, 100 * family.held_wider / family.wider) for family in together]
    if len(parts) < 2:
        console.print(
            f"Too little is predicted in this store; `{SIMULATE_COMMAND}` for the suites that claims name does it."
        )
        return 1
    as_promised = all(least <= part <= most for _, part in parts)
    counts = " and ".join(
        f"{family.held_wider} of {family.wider} {family.name.removeprefix('all ')}" for family, _ in parts
    )
    shares = " and ".join(f"{part:.0f} %" for _, part in parts)
    console.print(
        f"{counts} lie in their 90 % intervals {WITH_MODEL_ERROR}: {shares}, "
        f"{'' if as_promised else 'not both '}between {least:g} and {most:g} %."
    )
    return 0 if as_promised else 1


def validation_document(found: Sequence[Point], machine: MachineErrors | None = None) -> dict[str, Any]:
    """Return the validation as JSON data."""
    ratios = [point for point in found if point.kind == RATIO and not point.left_out]
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
        "families": [_statistics_of(family) for family in family_statistics(found)],
        "claims": [_statistics_of(claim) for claim in claim_statistics(found)],
        "ratios_on_the_right_side_of_1": sum(point.right_side for point in ratios),
        "ratios": len(ratios),
        "calibration": [point.name for point in found if point.left_out == CALIBRATION],
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
        "within_25_percent": family.close / family.points,
        "within_the_90_percent_interval": family.held / family.points,
        "with_the_models_error_elsewhere": {"points": family.wider, "held": family.held_wider},
    }


def print_points(found: Sequence[Point], console: Console) -> None:
    """Print all points by family, then the points that do not count, then the statistics."""
    if not found:
        console.print(
            f"Nothing is predicted in this store; `{SIMULATE_COMMAND}` for a suite that a claim names does it."
        )
        return
    counted = [point for point in found if not point.left_out]
    for name in FAMILIES:
        _print_group(
            name, [point for point in counted if (point.kind, point.family) == (RATE, name)], console
        )
    _print_group("Ratios", [point for point in counted if point.kind == RATIO], console)
    _print_group("Calibration: left out", [p for p in found if p.left_out == CALIBRATION], console)
    rest = [point for point in found if point.left_out not in ("", CALIBRATION)]
    _print_group("Not counted: bounds, means, and other rows about a run above", rest, console)
    _print_reasons([point for point in counted if abs(point.error) > CLOSE_ERROR], console)
    _print_statistics(found, console)


def _print_reasons(missed: Sequence[Point], console: Console) -> None:
    """Print the ledger's reasons for points with large errors, each reason once."""
    from rich.text import Text

    reasons: dict[str, list[str]] = {}
    for point in missed:
        reasons.setdefault(point.note or "nothing known", []).append(f"{point.claim} {point.label}")
    if not reasons:
        return
    headings = ("points", "why, as far as it is known")
    grid = new_table(*headings, left=2, wrap=headings, below=1)
    for note, names in reasons.items():
        grid.add_row(", ".join(names), note)
    console.print()
    console.print(Text(f"Farther off than {units.number(100 * CLOSE_ERROR)} %", style="bold cyan"))
    console.print(grid)


def _print_group(title: str, group: Sequence[Point], console: Console) -> None:
    from rich.text import Text

    if not group:
        return
    headings = (
        "claim",
        "row",
        "published",
        "predicted",
        FROM_INPUTS,
        WITH_MODEL_ERROR,
        "unit",
        "rate",
        "rests on",
    )
    grid = new_table(*headings, left={"claim", "row", "unit", "rests on"}, wrap=headings)
    for point in group:
        side = point.kind == RATIO and not point.left_out and not point.right_side
        style = (
            "red" if abs(point.error) > CLOSE_ERROR or side else "green" if abs(point.error) <= 0.10 else ""
        )
        grid.add_row(
            point.claim,
            point.label,
            units.number(point.published),
            units.number(point.predicted),
            _interval_text((point.low, point.high) if point.low < point.high else None),
            _interval_text(point.wider),
            point.unit,
            Text(units.percent(point.error, sign=True) + "  other side of 1" * side, style=style),
            BASIS_LABELS[point.rests_on],
        )
    console.print()
    console.print(Text(title, style="bold cyan"))
    console.print(grid)


def _interval_text(interval: tuple[float, float] | None) -> str:
    return " to ".join(map(units.number, interval)) if interval else units.NO_VALUE


def _print_statistics(found: Sequence[Point], console: Console) -> None:
    from rich.text import Text

    headings = (
        "family",
        "points",
        "median |error|",
        "within 25 %",
        FROM_INPUTS,
        WITH_MODEL_ERROR,
        "worst",
        "",
    )
    grid = new_table(*headings, left={"family", ""}, wrap=headings)
    for family in family_statistics(found):
        grid.add_row(*_statistics_cells(family))
    by_claim = new_table("claim", "points", FROM_INPUTS, WITH_MODEL_ERROR)
    for claim in claim_statistics(found):
        by_claim.add_row(claim.name, str(claim.points), *_interval_counts(claim))
    console.print()
    console.print(Text("Published values in their 90 % interval, by claim", style="bold cyan"))
    console.print(by_claim)
    console.print(f"{FROM_INPUTS}: the interval that unknown inputs leave.", style="dim", markup=False)
    console.print(MODEL_ERROR_NOTE, style="dim", markup=False)
    console.print()
    used = {point.rests_on for point in found}
    for basis, meaning in BASES.items():
        if basis in used:
            console.print(f"rests on {BASIS_LABELS[basis]}: {meaning}.", style="dim", markup=False)
    console.print()
    console.print(Text("Error of predicted rates", style="bold cyan"))
    console.print(grid)
    ratios = [point for point in found if point.kind == RATIO and not point.left_out]
    if ratios:
        right = sum(point.right_side for point in ratios)
        console.print(f"{right} of {len(ratios)} ratios on the right side of 1.")


def _statistics_cells(family: FamilyStatistics) -> tuple[str, ...]:
    return (
        family.name,
        str(family.points),
        units.percent(family.median),
        f"{family.close}/{family.points}",
        *_interval_counts(family),
        units.percent(family.worst.error, sign=True),
        f"{family.worst.claim} {family.worst.label}",
    )


def _interval_counts(family: FamilyStatistics) -> tuple[str, str]:
    wider = f"{family.held_wider}/{family.wider}" if family.wider else units.NO_VALUE
    return f"{family.held}/{family.points}", wider


def print_machine_errors(machine: MachineErrors, console: Console) -> None:
    """Print predicted and measured step times of this machine."""
    from rich.text import Text

    console.print()
    console.print(Text(f"Measured here, predicted on {machine.system}", style="bold cyan"))
    headings = ("experiment", "layout", "measured", "predicted", "error", "rests on")
    grid = new_table(*headings, left={"experiment", "layout", "rests on"}, wrap=headings)
    for pair in machine.pairs:
        times = units.seconds(pair.measured), units.seconds(pair.predicted)
        error = units.percent(pair.error, sign=True)
        grid.add_row(pair.name, pair.layout, *times, error, BASIS_LABELS[pair.rests_on])
    console.print(grid)
    if machine.pairs:
        console.print(f"{len(machine.pairs)} runs, median |error| {units.percent(machine.median)}.")
    for name, reason in machine.missing.items():
        console.print(f"{name}: not predicted: {reason}")


def _write_scatter(found: Sequence[Point], path: Path) -> None:
    """Write the scatter plot as a separate picture."""
    from repro.report.figures import style, validation

    with style.figure_style():
        drawing = validation.draw_validation(found)
    if drawing.figure is None:
        raise ConfigError(
            "--svg", str(path), says=f"needs a store with predictions; `{SIMULATE_COMMAND}` makes them"
        )
    files.write_file(path, style.to_svg(drawing))


def print_unknowns(results: Path, json: bool, own: Sequence[Path] = ()) -> int:
    """List the unknowns of the predictions in the store `results`; return 0. `own`: additional ledger files."""
    from repro.report import evidence
    from repro.results.store import print_remarks

    seen = evidence.read_store(results, own)
    print_remarks(seen.torn)
    if json:
        print_json({**seen.shopping_list.as_dict(), "implied": [one.as_dict() for one in seen.implied]})
    else:
        console = stdout(WIDE_PAGE_COLUMNS)
        print_measurements(seen.shopping_list, console)
        print_implied(seen.implied, console)
    return 0


MIN_LISTED_WIDTH_SHARE = 0.001
"""Minimum share of the width of all intervals for which an unknown is listed."""


def print_measurements(found: RankedInputs, console: Console) -> None:
    """Print the first unknowns in detail, and one line for each other unknown."""
    from rich.text import Text

    if not found.inputs:
        console.print("No row of this store has a predicted time that unknown numbers leave in doubt.")
        return
    console.print(Text(found.words))
    for number, one in enumerate(found.inputs[:LISTED_INPUTS], 1):
        console.print()
        console.print(Text(f"{number}. {one.key} of {one.system}", style="bold cyan"))
        console.print(_unknown_facts(one, found))
    rest = [one for one in found.inputs[LISTED_INPUTS:] if one.share >= MIN_LISTED_WIDTH_SHARE]
    headings = ("also", "of", "value [range]", "rows", "settles", "width")
    grid = new_table(*headings, left=2, wrap=headings[:2])
    for one in rest:
        counts = str(len(one.rows)), str(len(one.settles)), units.percent(one.share)
        grid.add_row(one.key, one.system, format_range(one), *counts)
    console.print()
    console.print(grid)
    few = len(found.inputs) - LISTED_INPUTS - len(rest)
    if few > 0:
        console.print(
            f"{few} more carry less than {units.percent(MIN_LISTED_WIDTH_SHARE)} of the width each: --json has them."
        )


def print_implied(found: Sequence[ImpliedInput], console: Console) -> None:
    """Print the value of each unknown that the rows imply, contradictions first."""
    from rich.text import Text

    if not found:
        return
    console.print()
    console.print(Text("What the sources imply, all other unknowns at their best values", style="bold cyan"))
    grid = new_table("unknown", "of", "what its rows need", left=3, wrap=("what its rows need",), below=1)
    for one in sorted(found, key=lambda one: one.contradiction is None):
        grid.add_row(one.key, one.system, one.words)
    console.print(grid)
    console.print(CONTRADICTION_NOTE, style="dim", markup=False)


CONTRADICTION_NOTE = (
    "Where no single value serves all rows, their sources contradict each other or the model is wrong for some of "
    "them: which of the two cannot be told from them."
)


def _unknown_facts(one: UncertainInput, found: RankedInputs) -> object:
    how, grid = one.measured_by, new_facts_table()
    grid.add_row("value [range]", format_range(one))
    grid.add_row(
        "rows",
        f"settles {len(one.settles)} of {found.rows}, moves {len(one.rows)}; {units.percent(one.share)} of the width",
    )
    grid.add_row(
        "possible",
        f"{len(one.possible)} of {found.possible} verdicts{': ' * bool(one.possible)}{count_by_claim(one.possible)}",
    )
    grid.add_row("measured by", f"{how.command}: {how.fact}" if how.command else "not by repro calibrate")
    grid.add_row("", how.how)
    grid.add_row("source", one.source)
    return grid
