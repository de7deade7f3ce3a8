"""`repro validate`: published against predicted, and predicted against measured, on a terminal or as JSON."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.validate.published import (
    CALIBRATION,
    CLOSE,
    FAMILIES,
    RATE,
    RATIO,
    Family,
    Point,
    families,
    points,
)

if TYPE_CHECKING:
    from rich.console import Console

    from repro.validate.machine import Machine

RUN = "repro run suites/NAME.toml --evidence simulated"


def command(results: Path, json: bool, svg: Path | None, system: str) -> int:
    """Compare what the store `results` predicts; 0.  `system`: also what was measured here, predicted on it."""
    from repro.report import evidence
    from repro.results.store import say

    seen = evidence.read(results)
    say(seen.torn)
    found = points(seen.judged, seen.records)
    machine = None
    if system:
        from repro import systems
        from repro.validate.machine import compare

        machine = compare(seen.records, systems.load(system))
    if svg is not None:
        _draw(found, svg)
    if json:
        sys.stdout.write(json_module.dumps(as_dict(found, machine), indent=2, ensure_ascii=False) + "\n")
        return 0
    from repro.cli.views.claims import make_console

    console = make_console()
    show(found, console)
    if machine is not None:
        show_machine(machine, console)
    return 0


def as_dict(found: Sequence[Point], machine: Machine | None = None) -> dict[str, Any]:
    """Plain JSON data."""
    ratios = [point for point in found if point.kind == RATIO and not point.left_out]
    document: dict[str, Any] = {
        "points": [
            {
                **vars(point),
                "name": point.name,
                "runs": list(point.runs),
                "error": point.error,
                "counts": not point.left_out,
            }
            for point in found
        ],
        "families": [
            {
                "name": family.name,
                "points": family.points,
                "median_error": family.median,
                "worst": family.worst.name,
                "worst_error": family.worst.error,
                "within_25_percent": family.close / family.points,
            }
            for family in families(found)
        ],
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


def show(found: Sequence[Point], console: Console) -> None:
    """All points by family, then what counts for nothing, then the statistics."""
    if not found:
        console.print(f"Nothing is predicted in this store; `{RUN}` for a suite that a claim names does it.")
        return
    counted = [point for point in found if not point.left_out]
    for name in FAMILIES:
        _table(name, [point for point in counted if (point.kind, point.family) == (RATE, name)], console)
    _table("Ratios", [point for point in counted if point.kind == RATIO], console)
    _table("Calibration: left out", [p for p in found if p.left_out == CALIBRATION], console)
    rest = [point for point in found if point.left_out not in ("", CALIBRATION)]
    _table("Not counted: bounds, means, and other rows about a run above", rest, console)
    _explained([point for point in counted if abs(point.error) > CLOSE], console)
    _statistics(found, console)


def _explained(missed: Sequence[Point], console: Console) -> None:
    """What the ledger says of the points that are far off, each reason once."""
    from rich.table import Table
    from rich.text import Text

    reasons: dict[str, list[str]] = {}
    for point in missed:
        reasons.setdefault(point.note or "nothing known", []).append(f"{point.claim} {point.label}")
    if not reasons:
        return
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0), header_style="bold")
    grid.add_column("points", ratio=1)
    grid.add_column("why, as far as it is known", ratio=2)
    for note, names in reasons.items():
        grid.add_row(", ".join(names), note)
    console.print()
    console.print(Text(f"Farther off than {100 * CLOSE:.0f} %", style="bold cyan"))
    console.print(grid)


def _table(title: str, group: Sequence[Point], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    if not group:
        return
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("claim", "row", "published", "predicted", "unit", "rate"):
        grid.add_column(name, justify="right" if name in ("published", "predicted", "rate") else "left")
    for point in group:
        side = point.kind == RATIO and not point.left_out and not point.right_side
        style = "red" if abs(point.error) > CLOSE or side else "green" if abs(point.error) <= 0.10 else ""
        grid.add_row(
            point.claim,
            point.label,
            f"{point.published:,.4g}",
            f"{point.predicted:,.4g}",
            point.unit,
            Text(f"{point.error:+.1%}{'  other side of 1' if side else ''}", style=style),
        )
    console.print()
    console.print(Text(title, style="bold cyan"))
    console.print(grid)


def _statistics(found: Sequence[Point], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("family", "points", "median |error|", "within 25 %", "worst", ""):
        grid.add_column(name, justify="left" if name in ("family", "") else "right")
    for family in families(found):
        grid.add_row(*_line(family))
    console.print()
    console.print(Text("Error of predicted rates", style="bold cyan"))
    console.print(grid)
    ratios = [point for point in found if point.kind == RATIO and not point.left_out]
    if ratios:
        right = sum(point.right_side for point in ratios)
        console.print(f"{right} of {len(ratios)} ratios on the right side of 1.", highlight=False)


def _line(family: Family) -> tuple[str, ...]:
    return (
        family.name,
        str(family.points),
        f"{family.median:.1%}",
        f"{family.close}/{family.points}",
        f"{family.worst.error:+.0%}",
        f"{family.worst.claim} {family.worst.label}",
    )


def show_machine(machine: Machine, console: Console) -> None:
    """Predicted against measured."""
    from rich.table import Table
    from rich.text import Text

    console.print()
    console.print(Text(f"Measured here, predicted on {machine.system}", style="bold cyan"))
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("experiment", "layout", "measured s", "predicted s", "error"):
        grid.add_column(name, justify="left" if name in ("experiment", "layout") else "right")
    for pair in machine.pairs:
        numbers = (f"{pair.measured:.4g}", f"{pair.predicted:.4g}", f"{pair.error:+.1%}")
        grid.add_row(pair.name, pair.layout, *numbers)
    console.print(grid)
    if machine.pairs:
        console.print(f"{len(machine.pairs)} runs, median |error| {machine.median:.1%}.", highlight=False)
    for name, reason in machine.missing.items():
        console.print(f"{name}: not predicted: {reason}", highlight=False)


def _draw(found: Sequence[Point], path: Path) -> None:
    """Write the scatter plot as a picture of its own."""
    from repro.report.figures import style, validation

    with style.look():
        drawing = validation.draw(found)
    if drawing.figure is None:
        from repro.config.errors import ConfigError

        raise ConfigError("svg", str(path), f"a store with predictions; `{RUN}` makes them")
    text = style.svg(drawing)
    if "xmlns=" not in text:
        text = text.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    path.write_text(text, encoding="utf-8")
