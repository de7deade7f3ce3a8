"""Tests of the notebooks: each runs on a store with records and on an empty store, and opens in Jupyter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from repro.config import ConfigError, models, systems
from repro.kernels.cuda import compile as compiler
from repro.report import evidence
from repro.report.evidence import STORE_VARIABLE, default_store, simulated_step
from repro.report.page import build

pytest.importorskip("jupytext", reason="jupytext reads the notebooks; it is in the extra test")
SOURCES = build.find_notebooks()
NAMES = (
    "01_memory", "02_model_size", "03_throughput", "04_turing_nlg",
    "05_megatron", "06_yuan", "07_kernels", "08_your_cluster", "09_explore",
)  # fmt: skip


def test_every_family_of_claims_has_a_notebook_with_short_cells() -> None:
    assert tuple(path.stem for path in SOURCES) == NAMES
    for path in SOURCES:
        notebook = build.read_notebook(path)
        assert notebook.metadata["kernelspec"]["name"] == "python3"
        assert notebook.cells[0].cell_type == "markdown"
        assert build.title_of(notebook, path) != path.stem
        assert all(len(cell.source.splitlines()) <= 45 for cell in notebook.cells)
        assert any("## Change something" in cell.source or "BEFORE" in cell.source for cell in notebook.cells)


@pytest.mark.slow
def test_notebook_runs_on_a_store_and_becomes_a_page(synthetic_results: Path, tmp_path: Path) -> None:
    """Run one notebook in a Jupyter kernel; continuous integration runs all of them on the store of `make smoke`."""
    pytest.importorskip("nbclient", reason="nbclient runs the notebooks; it is in the extra test")
    shutil.copy(SOURCES[0], tmp_path)
    ((page_file, title),) = build.write_notebooks(synthetic_results, tmp_path / "notebooks", tmp_path)
    text = page_file.read_text(encoding="utf-8").partition("</style>")[2]
    assert [word for word in ("<script", 'src="http', "<link", "Traceback") if word in text] == []
    assert title
    assert "states-z3-dp4" in text, "the notebook reads the experiments of the store"
    assert "data:image/png" in text


# `test_explore.py` runs the last notebook, which has controls.
@pytest.mark.parametrize("path", SOURCES[:-1], ids=lambda path: path.stem)
def test_notebook_runs_on_an_empty_store(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the cells in this process, without a kernel, and simulate a tiny model in every step."""
    import matplotlib
    import matplotlib.pyplot as plt

    def tiny_step(model: str, system: str, **layout: Any) -> dict[str, float | str]:
        assert model in models.model_names()
        assert system in systems.system_names()
        return simulated_step("gpt2-tiny", "dgx2", precision="fp16")

    monkeypatch.setattr(evidence, "simulated_step", cache(tiny_step))
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "results"))
    monkeypatch.chdir(path.parent)
    with matplotlib.rc_context({"backend": "agg"}):
        scope: dict[str, Any] = {"__name__": "__main__"}
        for number, cell in enumerate(build.read_notebook(path).cells):
            if cell.cell_type == "code":
                exec(compile(cell.source, f"{path.name}:{number}", "exec"), scope)
        plt.close("all")
    assert not (tmp_path / "results").exists()


def test_error_of_a_cell_names_its_number_and_source(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="nbclient runs the notebooks; it is in the extra test")
    path = tmp_path / "01_bad.py"
    path.write_text("# %% [markdown]\n# # Bad\n\n# %%\n1 + 1\n\n# %%\nraise KeyError('no such record')\n")
    with pytest.raises(build.CellFailed) as caught:
        build.execute(path, tmp_path)
    cause = "KeyError: 'no such record'"
    assert str(caught.value) == f"{path}: code cell 2 (raise KeyError('no such record')): {cause}"


def test_missing_notebooks_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a checkout with reports/\*\.py"):
        build.find_notebooks(tmp_path)


def test_default_store_is_found_from_the_folder_of_notebooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    (tmp_path / "results" / "records").mkdir(parents=True)
    (tmp_path / "reports").mkdir()
    monkeypatch.chdir(tmp_path / "reports")
    assert default_store() == tmp_path / "results"
    monkeypatch.setenv(STORE_VARIABLE, os.fspath(tmp_path))
    assert default_store() == tmp_path


DRAW = """
from repro.report.figures.style import figure_style, make_axes
with figure_style():
    make_axes(3.0)
"""
EXECUTE = """
from pathlib import Path
from repro.report.page import build
build.write_notebooks(Path("results"), Path("out"), Path("."))
"""


@pytest.mark.parametrize("program", [DRAW, pytest.param(EXECUTE, marks=pytest.mark.slow)])
def test_figures_and_notebooks_write_nothing_to_standard_error(program: str, tmp_path: Path) -> None:
    """The home is not writable, even by root."""
    if program == EXECUTE:
        pytest.importorskip("nbclient", reason="nbclient runs the notebooks; it is in the extra test")
    cell = "import matplotlib.pyplot\nimport repro\nprint(repro.__version__)"
    (tmp_path / "01_small.py").write_text(f"# %% [markdown]\n# # Small\n\n# %%\n{cell}\n")
    base = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "MPL", "IPYTHON"))}
    command = [sys.executable, "-c", program]
    environment = {**base, "HOME": "/dev/null"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert (tmp_path / "out/01_small.html").is_file() == (program == EXECUTE)


def test_cache_folder_without_a_home_is_not_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without an entry in /etc/passwd has no home folder. `~` must not name a folder in the current folder."""
    monkeypatch.delenv(compiler.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert compiler.cache_folder() == Path("/~/.cache/repro/kernels")
