"""Every notebook runs on a store with records and on an empty one, holds no number that the store should give,
and opens in Jupyter."""

from __future__ import annotations

import os
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from repro.config import ConfigError, models, systems
from repro.report import evidence
from repro.report.evidence import STORE_VARIABLE, default_store, simulated_step
from repro.report.page import build

pytest.importorskip("jupytext", reason="jupytext reads the notebooks; it is in the extra test")
SOURCES = build.find_notebooks()
NAMES = (
    "01_memory", "02_model_size", "03_throughput", "04_turing_nlg",
    "05_megatron", "06_yuan", "07_kernels", "08_your_cluster", "09_explore",
)  # fmt: skip


@lru_cache(maxsize=1)
def traced() -> dict[str, float | str]:
    return simulated_step("gpt2-tiny", "dgx2", precision="fp16")


def tiny_step(model: str, system: str, **layout: Any) -> dict[str, float | str]:
    """Stands for a trace of the notebook's own model, which the run in kernels does."""
    assert model in models.model_names()
    assert system in systems.system_names()
    return traced()


def test_there_is_one_for_every_family() -> None:
    assert tuple(path.stem for path in SOURCES) == NAMES


@pytest.mark.slow
def test_one_runs_on_a_store_and_becomes_a_page(synthetic_results: Path, tmp_path: Path) -> None:
    """In a kernel of its own, as all of them do in continuous integration on the store of `make smoke`."""
    pytest.importorskip("nbclient", reason="nbclient runs the notebooks; it is in the extra test")
    shutil.copy(SOURCES[0], tmp_path)
    ((page_file, title),) = build.write_notebooks(synthetic_results, tmp_path / "notebooks", tmp_path)
    page = page_file.read_text(encoding="utf-8")
    text = page.partition("</style>")[2]
    for foreign in ("<script", 'src="http', "<link", "Traceback"):
        assert foreign not in text
    assert title
    assert "states-z3-dp4" in text, "the store's own experiment, which the notebook found by itself"
    assert "data:image/png" in text


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_runs_on_an_empty_store(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells one after the other in this process, which costs no kernel; every step traced is a tiny one."""
    import matplotlib

    monkeypatch.setattr(evidence, "simulated_step", tiny_step)

    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "results"))
    monkeypatch.chdir(path.parent)
    with matplotlib.rc_context({"backend": "agg"}):
        scope: dict[str, Any] = {"__name__": "__main__"}
        for number, cell in enumerate(build.read_notebook(path).cells):
            if cell.cell_type == "code":
                exec(compile(cell.source, f"{path.name}:{number}", "exec"), scope)
        import matplotlib.pyplot as plt

        plt.close("all")
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_is_a_notebook_that_opens_and_says_what_it_is(path: Path) -> None:
    notebook = build.read_notebook(path)
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    assert notebook.cells[0].cell_type == "markdown"
    assert build.title_of(notebook, path) != path.stem
    assert all(len(cell.source.splitlines()) <= 45 for cell in notebook.cells)
    assert any("## Change something" in cell.source or "BEFORE" in cell.source for cell in notebook.cells)


def test_a_cell_that_fails_is_one_line_with_its_place(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="nbclient runs the notebooks; it is in the extra test")
    path = tmp_path / "01_bad.py"
    path.write_text("# %% [markdown]\n# # Bad\n\n# %%\n1 + 1\n\n# %%\nraise KeyError('no such record')\n")
    with pytest.raises(build.CellFailed) as caught:
        build.execute(path, tmp_path)
    assert (
        str(caught.value)
        == f"{path}: code cell 2 (raise KeyError('no such record')): KeyError: 'no such record'"
    )


def test_without_notebooks_the_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a checkout with reports/\*\.py"):
        build.find_notebooks(tmp_path)


def test_the_store_is_found_from_the_folder_of_the_notebooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    (tmp_path / "results" / "records").mkdir(parents=True)
    (tmp_path / "reports").mkdir()
    monkeypatch.chdir(tmp_path / "reports")
    assert default_store() == tmp_path / "results"
    monkeypatch.setenv(STORE_VARIABLE, os.fspath(tmp_path))
    assert default_store() == tmp_path
