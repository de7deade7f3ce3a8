"""`repro report`: read the store, judge the ledger, draw the figures, and write a site of static pages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.accuracy.validate import published
from repro.claims.run_commands import SuiteCatalogue
from repro.claims.table import summary
from repro.config.errors import ConfigError
from repro.report import evidence, views
from repro.report.page.context import context, render_site
from repro.results.select import Selection, select
from repro.results.store import MAX_PRINTED_REMARKS
from repro.util import extras
from repro.util.console import PAGE_COLUMNS, print_json, print_page, stdout
from repro.util.files import replace_file

if TYPE_CHECKING:
    from repro.report.figures.style import Drawing

MAX_LINKS = 100
"""Maximum number of a figure's records that a page lists and links."""


@dataclass
class Report:
    """Paths and counts of a written report."""

    page: Path
    claims: int
    verdicts: dict[str, int]
    experiments: int
    """Number of measured experiments."""
    simulated: int
    comparisons: int
    figures: list[Path] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Command by figure that creates the figure's missing records."""
    notebooks: list[Path] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Remarks on the store for the reader: incomplete lines, other protocols."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        paths = {name: [str(path) for path in getattr(self, name)] for name in ("figures", "notebooks")}
        return {**vars(self), "page": str(self.page), **paths}


def build_report(results: Path, out: Path, *, notebooks: bool = False, own: Sequence[Path] = ()) -> Report:
    """Write `out`/*.html, `out`/claims and `out`/figures; with `notebooks` also `out`/notebooks.

    `own`: additional ledger files, which the site includes and the notebooks omit.

    Raises `ConfigError` if `out` is not a writable folder, `ModuleNotFoundError` before any file is written if a
    package is missing, and `CellFailed` if a cell of a notebook failed.
    """
    extras.require_extras("report", *(["notebooks"] if notebooks else []))
    from repro.report.figures import draw_all
    from repro.report.page.notebooks import write_notebooks

    try:
        for folder in ("figures", "claims"):
            (out / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", str(out), f"a folder that can be written ({error.strerror})") from None
    found = evidence.read_store(results, own)
    chosen = select(found.records)
    points = published.points(found.judged, found.records)
    records = chosen.measured, chosen.comparisons, chosen.simulated
    drawings = draw_all(*records, points, found.judged, found.implied)
    remarks = _remarks(found, chosen)
    counts = summary(found.judged)["verdicts"]

    report = Report(
        page=out / "index.html",
        claims=len(found.judged),
        verdicts=counts,
        experiments=len(chosen.measured),
        simulated=len(chosen.simulated),
        comparisons=len(chosen.comparisons),
        missing={drawing.id: drawing.missing for drawing in drawings if drawing.missing},
        remarks=remarks,
    )
    figures = [_save(drawing, out / "figures", report) for drawing in drawings]
    rendered = write_notebooks(results, out / "notebooks") if notebooks else []
    report.notebooks = [page for page, _ in rendered]
    values = context(found, chosen, figures, remarks, SuiteCatalogue())
    values["notebooks"] = [(f"notebooks/{page.name}", title) for page, title in rendered]
    for path, text in render_site(values).items():
        replace_file(out / path, text.encode())
    return report


def _save(drawing: Drawing, folder: Path, report: Report) -> dict[str, Any]:
    """Write a figure's two files and return its data for the template. Old files of an empty figure are removed."""
    from repro.report.figures import style

    writers = {"svg": lambda: style.to_svg(drawing).encode(), "png": lambda: style.to_png(drawing)}
    for ending, write in writers.items():
        path = folder / f"{drawing.id}.{ending}"
        if drawing.figure is None:
            path.unlink(missing_ok=True)
        else:
            replace_file(path, write())
            report.figures.append(path)
    return {
        "id": drawing.id,
        "title": drawing.title,
        "caption": drawing.caption,
        "records": {name: views.anchor(drawing.evidence, name) for name in drawing.records[:MAX_LINKS]},
        "more_records": max(0, len(drawing.records) - MAX_LINKS),
        "missing": drawing.missing,
        "is_drawn": drawing.figure is not None,
    }


def _remarks(found: evidence.JudgedStore, chosen: Selection) -> list[str]:
    remarks = found.torn[:MAX_PRINTED_REMARKS]
    if len(found.torn) > MAX_PRINTED_REMARKS:
        remarks.append(f"and {len(found.torn) - MAX_PRINTED_REMARKS} more lines that are no records")
    if not found.records:
        shown = "the site shows the ledger, analytic evidence and reference records only"
        remarks.append(f"no records in {found.results}: {shown}")
    if chosen.foreign:
        foreign = f"{chosen.foreign} records of another measurement protocol"
        remarks.append(f"{foreign} are left out: not comparable")
    failed = [record for record in [*chosen.measured, *chosen.simulated] if not record.conclusive]
    if failed:
        names = ", ".join(f"{record.label} ({record.outcome})" for record in failed[:6])
        more = f" and {len(failed) - 6} more" if len(failed) > 6 else ""
        remarks.append(f"without a conclusive result: {names}{more}; the next `repro run` runs them again")
    findings = (finding for result in found.judged for finding in result.findings)
    if labels := dict.fromkeys(one.measured_on for one in findings if one.is_reference and one.decided):
        values = f"values as measured on {'; '.join(labels)} come from reference records of this package"
        remarks.append(f"{values}: this store has no such results")
    return remarks


def print_report(results: Path, out: Path, json: bool, notebooks: bool, own: Sequence[Path] = ()) -> int:
    """Write the report on the store `results` to `out` and print its path; return 0, or 1 if a notebook failed.

    `own`: additional ledger files.
    """
    from repro.report.page.notebooks import CellFailed

    try:
        written = build_report(results, out, notebooks=notebooks, own=own)
    except CellFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if json:
        print_json(written.as_dict())
        return 0
    counts = ", ".join(f"{count} {verdict}" for verdict, count in written.verdicts.items() if count)
    books = f", {len(written.notebooks)} notebooks" * bool(written.notebooks)
    print_page(
        stdout(PAGE_COLUMNS),
        f"Report: {written.page}",
        f"{written.claims} claims: {counts}.",
        f"{written.experiments} measured experiments, {written.simulated} simulated, "
        f"{len(written.figures) // 2} figures{books}.",
        *(f"Note: {remark}." for remark in written.remarks),
    )
    return 0
