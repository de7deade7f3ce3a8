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
from repro.config import words
from repro.config.errors import ConfigError
from repro.simulate.time.calibration import BASES, BASIS_LABELS
from repro.util import files, units
from repro.util.console import WIDE_PAGE_COLUMNS, new_facts_table, new_table, print_json, print_page, stdout

if TYPE_CHECKING:
    from rich.console import Console

    from repro.accuracy.validate.implied_inputs import ImpliedInput
    from repro.accuracy.validate.machine import MachineErrors


FROM_INPUTS, WITH_MODEL_ERROR = "90 % interval", "wider interval"
MODEL_ERROR_NOTE = (
    "Wider interval: widened until it includes nine of ten rows of other reports. No verdict uses it."
)
SIMULATE_COMMAND = "repro run suites/NAME.toml --evidence simulated"


def print_validation(
    results: Path, json: bool, details: bool, svg: Path | None, system: str, own: Sequence[Path] = ()
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
    print_points(found, console, details)
    if machine is not None:
        print_machine_errors(machine, console, details)
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
        f"{counts} lie in their wider 90 % intervals: {shares}, "
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


def print_points(found: Sequence[Point], console: Console, details: bool) -> None:
    """Print the errors by family; `details` adds all points, reasons of large errors, and claims."""
    if not found:
        print_page(console, "This store has no predictions of published values.", command=SIMULATE_COMMAND)
        return
    families, ratios = family_statistics(found), [p for p in found if p.kind == RATIO and not p.left_out]
    rates = next((family for family in families if family.name == ALL_RATES), None)
    parts = []
    if rates is not None:
        inside = f"{rates.held} of {rates.points} lie in the 90 % interval of uncertain inputs"
        parts += [f"Predicted rates: median error {units.percent(rates.median)}, and {inside}."]
    if ratios:
        right = sum(point.right_side for point in ratios)
        parts += [f"{right} of {len(ratios)} predicted ratios are on the right side of 1."]
    headings = (
        "family",
        "rows",
        "median\nerror (%)",
        "error below\n25 %",
        "in 90 %\ninterval",
        "in wider\ninterval",
        "largest\nerror (%)",
        "row of the largest error",
    )
    rows = (_statistics_cells(family) for family in families)
    statistics = new_table(*headings, left={"family", headings[-1]}, wrap=("family", headings[-1]), rows=rows)
    print_page(console, *parts, statistics, MODEL_ERROR_NOTE)
    if not details:
        print_page(console, "--details lists all rows, and the reasons of large errors.")
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
    by_claim = (
        (claim.name, str(claim.points), *_interval_counts(claim)) for claim in claim_statistics(found)
    )
    used = {point.rests_on for point in found}
    print_page(
        console,
        new_table("claim", "rows", FROM_INPUTS, WITH_MODEL_ERROR, rows=by_claim),
        *(f"{BASIS_LABELS[basis]}: {meaning}." for basis, meaning in BASES.items() if basis in used),
    )


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


def _statistics_cells(family: FamilyStatistics) -> tuple[str, ...]:
    return (
        family.name,
        str(family.points),
        f"{100 * family.median:.1f}",
        f"{family.close}/{family.points}",
        *_interval_counts(family),
        f"{100 * family.worst.error:+.1f}",
        f"{family.worst.claim} {family.worst.label}",
    )


def _interval_counts(family: FamilyStatistics) -> tuple[str, str]:
    wider = f"{family.held_wider}/{family.wider}" if family.wider else units.NO_VALUE
    return f"{family.held}/{family.points}", wider


def print_machine_errors(machine: MachineErrors, console: Console, details: bool) -> None:
    """Print the error of predictions for this machine; `details` adds predicted and measured step times."""
    headings = ("experiment", "layout", "measured", "predicted", "error (%)", "basis")
    rows = (
        (
            *(pair.name, pair.layout, units.seconds(pair.measured), units.seconds(pair.predicted)),
            *(f"{100 * pair.error:+.1f}", BASIS_LABELS[pair.rests_on]),
        )
        for pair in machine.pairs
    )
    print_page(
        console,
        f"{len(machine.pairs)} runs measured here, predicted on {machine.system}: median error "
        f"{units.percent(machine.median)}." if machine.pairs else f"No run measured here is predicted on {machine.system}.",
        *([new_table(*headings, left={"experiment", "layout", "basis"}, wrap=headings, rows=rows)] if details else []),
        *(f"{name}: not predicted: {reason}" for name, reason in machine.missing.items() if details),
    )  # fmt: skip


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


def print_unknowns(results: Path, json: bool, details: bool, own: Sequence[Path] = ()) -> int:
    """List the unknowns of the predictions in the store `results`; return 0. `own`: additional ledger files."""
    from repro.report import evidence
    from repro.results.store import print_remarks

    seen = evidence.read_store(results, own)
    print_remarks(seen.torn)
    console = stdout(WIDE_PAGE_COLUMNS)
    if json:
        print_json({**seen.shopping_list.as_dict(), "implied": [one.as_dict() for one in seen.implied]})
    elif details:
        print_measurements(seen.shopping_list, console)
        print_implied(seen.implied, console)
    else:
        _print_ranking(seen.shopping_list, console)
    return 0


def _print_ranking(found: RankedInputs, console: Console) -> None:
    """Print the uncertain inputs with the largest effect on the predictions of a store."""
    rows = (
        (
            *(one.key, one.system, format_range(one), str(len(one.rows)), str(len(one.settles))),
            f"{100 * one.share:.1f}",
        )
        for one in found.inputs[:MAX_RANKED_INPUTS]
    )
    headings = ("input", "system", "value [range]", "rows", "decided\nrows", "share of\nwidth (%)")
    first = found.inputs[0] if found.inputs else None
    print_page(
        console,
        f"Largest uncertainty: {words.describe_input(first.key)} of {first.system}, {units.percent(first.share)} of "
        f"the width of all intervals. {len(found.inputs)} inputs are uncertain." if first else "No input is uncertain.",
        new_table(*headings, left=3, wrap=headings[:3], rows=rows),
        "Decided rows: predictions for which the input has more than half of the uncertainty.",
        "--details lists sources, measurements, and the values that published rows imply.",
    )  # fmt: skip


MAX_RANKED_INPUTS = 10
"""Maximum number of printed inputs without `--details`."""
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
