"""`repro report --notebooks`: execute the notebooks of reports/ on a store, and write each as one HTML file.

A notebook is a Python file with cells (jupytext's percent format), suitable for reviews, merges and linters. Each
notebook runs in its own kernel, which reads the store in `REPRO_RESULTS`.
"""

from __future__ import annotations

import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from repro.claims.run_commands import ROOT
from repro.config.errors import ConfigError
from repro.report.evidence import STORE_VARIABLE
from repro.report.page.context import TEMPLATES, template

NOTEBOOKS_FOLDER = ROOT / "reports"
CELL_TIMEOUT_S = 300
"""Timeout of a cell, and of the start of a kernel, in seconds."""
MAX_PARALLEL_NOTEBOOKS = 2
"""Maximum number of kernels that run at once."""


class CellFailed(Exception):
    """Failure of a cell; `str` is one line with file, cell and error."""


def find_notebooks(folder: Path = NOTEBOOKS_FOLDER) -> list[Path]:
    """Return the notebooks by number. Raises `ConfigError` if there is no checkout."""
    found = sorted(folder.glob("[0-9][0-9]_*.py"))
    if not found:
        raise ConfigError("--notebooks", str(folder), "a checkout with reports/*.py")
    return found


def write_notebooks(results: Path, out: Path, folder: Path = NOTEBOOKS_FOLDER) -> list[tuple[Path, str]]:
    """Execute every notebook on `results`, write `out`/NAME.html, and return the pages and their titles.

    Raises `CellFailed`, or as `find_notebooks`.
    """
    paths = find_notebooks(folder)
    with tempfile.TemporaryDirectory() as settings, ThreadPoolExecutor(MAX_PARALLEL_NOTEBOOKS) as pool:
        # IPython reads no settings of the user, and works where the home folder cannot be written.
        os.environ["IPYTHONDIR"] = settings
        done = list(
            pool.map(execute, paths, [results.resolve()] * len(paths))
        )  # a failure cancels the next ones
        out.mkdir(parents=True, exist_ok=True)
        return [_save(path, notebook, out) for path, notebook in zip(paths, done, strict=True)]


def read_notebook(path: Path) -> Any:
    """Return the notebook of a percent file."""
    import jupytext

    return jupytext.read(path)


def execute(path: Path, results: Path) -> Any:
    """Return the notebook at `path` with its outputs.  Raises `CellFailed`."""
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
    """Return number and first line of the cell that did not finish."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    bad = (
        number
        for number, cell in enumerate(code, 1)
        if cell.execution_count is None or any(output.output_type == "error" for output in cell.outputs)
    )
    number = next(bad, len(code))
    return f"code cell {number} ({code[number - 1].source.strip().splitlines()[0]})"


def _save(path: Path, notebook: Any, out: Path) -> tuple[Path, str]:
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    # A template without Jupyter's styles and scripts, which a browser would fetch from the network.
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
    """Return the first heading of the notebook, or its file name without one."""
    found = re.search(r"^# (.+)$", "\n".join(cell.source for cell in notebook.cells), re.MULTILINE)
    return found[1].strip() if found else path.stem
