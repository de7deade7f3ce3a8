"""Build of the report: a site of static HTML pages, and the executed notebooks of the folder reports/.

A notebook is a Python file in jupytext's percent format, which reads the store that `REPRO_RESULTS` names.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.accuracy.validate import published
from repro.claims.run_commands import ROOT, SuiteCatalogue
from repro.claims.table import summary
from repro.config.errors import ConfigError, require
from repro.report import evidence, views
from repro.report.evidence import STORE_VARIABLE
from repro.report.page.context import TEMPLATES, context, render_site, template
from repro.results.select import Selection, select
from repro.results.store import MAX_PRINTED_REMARKS
from repro.util import extras
from repro.util.console import print_json, print_page
from repro.util.files import replace_file

if TYPE_CHECKING:
    from repro.report.figures.style import Drawing


NOTEBOOKS_FOLDER = ROOT / "reports"
CELL_TIMEOUT_S = 300
"""Timeout of a notebook's cell, and of the start of a Jupyter kernel, in seconds."""
WIDGET_TYPE = "application/vnd.jupyter.widget-view+json"
MAX_PARALLEL_NOTEBOOKS = 2
"""Maximum number of notebooks that are executed at once."""


class CellFailed(Exception):
    """Failure of a notebook cell; the message is one line with file, cell and error."""


def find_notebooks(folder: Path = NOTEBOOKS_FOLDER) -> list[Path]:
    """Return the notebook files in `folder`, in the order of their numbers. Raises `ConfigError` if there are none."""
    found = sorted(folder.glob("[0-9][0-9]_*.py"))
    require(found, "--notebooks", str(folder), "a checkout with reports/*.py")
    return found


def write_notebooks(results: Path, out: Path, folder: Path = NOTEBOOKS_FOLDER) -> list[tuple[Path, str]]:
    """Execute the notebooks in `folder` on the records in `results`, and write each as HTML to the folder `out`.

    Returns the written pages with their titles. Raises `CellFailed`, and `ConfigError` without notebooks.
    """
    paths = find_notebooks(folder)
    with tempfile.TemporaryDirectory() as settings, ThreadPoolExecutor(MAX_PARALLEL_NOTEBOOKS) as pool:
        # An empty folder for IPython hides the user's settings, and replaces a home folder that cannot be written.
        os.environ["IPYTHONDIR"] = settings
        done = list(pool.map(execute, paths, [results.resolve()] * len(paths)))
        out.mkdir(parents=True, exist_ok=True)
        return [_save_notebook(path, notebook, out) for path, notebook in zip(paths, done, strict=True)]


def read_notebook(path: Path) -> Any:
    """Return the notebook in a file of jupytext's percent format."""
    import jupytext

    return jupytext.read(path)


def execute(path: Path, results: Path) -> Any:
    """Execute the notebook at `path` on the records in `results`; return it with its outputs. Raises `CellFailed`."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = read_notebook(path)
    timeouts: Any = dict.fromkeys(("timeout", "startup_timeout", "iopub_timeout"), CELL_TIMEOUT_S)
    kernel: Any = {"kernel_name": "python3", "extra_arguments": ["--log-level=ERROR"]}
    client = NotebookClient(
        notebook, resources={"metadata": {"path": str(path.parent)}}, **timeouts, **kernel
    )
    environment = {**os.environ, STORE_VARIABLE: str(results), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    try:
        client.execute(env=environment)
    except CellExecutionError as error:
        raise CellFailed(f"{path}: {_place(notebook)}: {error.ename}: {error.evalue}") from None
    except (CellTimeoutError, DeadKernelError) as error:
        raise CellFailed(f"{path}: {_place(notebook)}: {' '.join(str(error).split())}") from None
    return notebook


def _place(notebook: Any) -> str:
    """Return number and first line of the first code cell of a notebook that failed or did not run."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    bad = (
        number
        for number, cell in enumerate(code, 1)
        if cell.execution_count is None or any(output.output_type == "error" for output in cell.outputs)
    )
    number = next(bad, len(code))
    return f"code cell {number} ({code[number - 1].source.strip().splitlines()[0]})"


def _save_notebook(path: Path, notebook: Any, out: Path) -> tuple[Path, str]:
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    # Widgets need a running kernel, and Jupyter's other templates load styles and scripts from the network.
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        shown = (one for one in cell.get("outputs", ()) if WIDGET_TYPE not in one.get("data", ()))
        cell.update({"outputs": list(shown)} if "outputs" in cell else {})
    bare = {"template_name": "basic", "exclude_input_prompt": True, "exclude_output_prompt": True}
    body, _ = HTMLExporter(**bare).from_notebook_node(notebook)
    title = title_of(notebook, path)
    styles = (HtmlFormatter(style=name) for name in ("default", "github-dark"))
    light, dark = (style.get_style_defs(".highlight") for style in styles)
    style = (TEMPLATES / "notebook.css").read_text(encoding="utf-8")
    style += light + "\n@media (prefers-color-scheme: dark) {\n" + dark + "\n}"
    page = template("notebook.html").render(title=title, style=style, body=body, source=path.name)
    target = out / f"{path.stem}.html"
    target.write_text(page, encoding="utf-8")
    return target, title


def title_of(notebook: Any, path: Path) -> str:
    """Return the first heading of a notebook; the name of its file if it has no heading."""
    found = re.search(r"^# (.+)$", "\n".join(cell.source for cell in notebook.cells), re.MULTILINE)
    return found[1].strip() if found else path.stem


MAX_LINKS = 100
"""Maximum number of links to experiment records below a figure of the report."""


@dataclass
class Report:
    """Paths of the files of an HTML report, and numbers of its claims and records."""

    page: Path
    claims: int
    verdicts: dict[str, int]
    experiments: int
    """Number of measured experiments in the report."""
    simulated: int
    comparisons: int
    figures: list[Path] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Command that creates the missing records of a figure, by the figure's id."""
    notebooks: list[Path] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Remarks about the results folder, such as unreadable lines and records of another measurement protocol."""

    def as_dict(self) -> dict[str, Any]:
        """Return the paths of the report's files, and the counts of its claims and records, as JSON data."""
        paths = {name: [str(path) for path in getattr(self, name)] for name in ("figures", "notebooks")}
        return {**vars(self), "page": str(self.page), **paths}


def build_report(results: Path, out: Path, *, notebooks: bool = False, own: Sequence[Path] = ()) -> Report:
    """Write the HTML report on the records in `results` to the folder `out`, with `notebooks` also the notebooks.

    `own`: additional files of claims, which the notebooks do not use. Raises `ConfigError` if `out` is not a
    writable folder, `ModuleNotFoundError` if a package is missing, and `CellFailed` if a cell of a notebook failed.
    """
    extras.require_extras("report", *(["notebooks"] if notebooks else []))
    from repro.report.figures import draw_all

    try:
        for folder in ("figures", "claims"):
            (out / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", str(out), f"a writable folder ({error.strerror})") from None
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
    figures = [_save_figure(drawing, out / "figures", report) for drawing in drawings]
    rendered = write_notebooks(results, out / "notebooks") if notebooks else []
    report.notebooks = [page for page, _ in rendered]
    values = context(found, chosen, figures, remarks, SuiteCatalogue())
    values["notebooks"] = [(f"notebooks/{page.name}", title) for page, title in rendered]
    for path, text in render_site(values).items():
        replace_file(out / path, text.encode())
    return report


def _save_figure(drawing: Drawing, folder: Path, report: Report) -> dict[str, Any]:
    """Write a figure as SVG and PNG, or remove its old files if it has no picture; return its data for templates."""
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
        remarks.append(f"{len(found.torn) - MAX_PRINTED_REMARKS} more lines of the store are not records")
    if not found.records:
        shown = "the report shows only published values, formulas and packaged measurements"
        remarks.append(f"no records in {found.results}: {shown}")
    if chosen.foreign:
        remarks.append(
            f"{chosen.foreign} records of another version of the measurement protocol are omitted, because they are "
            "not comparable"
        )
    failed = [record for record in [*chosen.measured, *chosen.simulated] if not record.conclusive]
    if failed:
        names = ", ".join(f"{record.label} ({record.outcome})" for record in failed[:6])
        more = f" and {len(failed) - 6} more" if len(failed) > 6 else ""
        remarks.append(f"experiments without a conclusive result: {names}{more}; `repro run` runs them again")
    findings = (finding for result in found.judged for finding in result.findings)
    if labels := dict.fromkeys(one.measured_on for one in findings if one.is_reference and one.decided):
        remarks.append(
            f"values measured on {'; '.join(labels)} come from reference records of this package, because this store "
            "has no such measurements"
        )
    return remarks


def print_report(results: Path, out: Path, json: bool, notebooks: bool, own: Sequence[Path] = ()) -> int:
    """Write the HTML report to the folder `out` and print a summary; return 1 if a notebook failed, else 0."""
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
        f"Report: {written.page}",
        f"{written.claims} claims: {counts}.",
        f"{written.experiments} measured experiments, {written.simulated} simulated, "
        f"{len(written.figures) // 2} figures{books}.",
        *(f"Note: {remark}." for remark in written.remarks),
    )
    return 0
