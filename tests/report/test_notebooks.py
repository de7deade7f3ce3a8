"""Tests of the notebooks, which run on stores with and without records, and of the controls of the last notebook."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from repro import cli
from repro.config import ConfigError, models, systems
from repro.kernels.cuda import compile as compiler
from repro.report import evidence
from repro.report.evidence import STORE_VARIABLE, default_store, simulated_step
from repro.report.figures.style import RED
from repro.report.page import build
from repro.util import units

pytest.importorskip("jupytext", reason="jupytext reads the notebooks; it is in the extra test")
pytest.importorskip("ipywidgets", reason="ipywidgets makes the controls; it is in the extra test")
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


class Explorer:
    """The notebook after all of its cells ran in this process, without a front end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from IPython.core import display_functions

        self.outputs: dict[str, Any] = {}
        self.updates = 0
        monkeypatch.setattr(display_functions, "display", self.show)
        self.scope: dict[str, Any] = {"__name__": "__main__"}
        for cell in build.read_notebook(SOURCES[-1]).cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, SOURCES[-1].name, "exec"), self.scope)

    def show(self, output: Any, display_id: str, update: bool = False) -> None:
        assert update == (display_id in self.outputs)
        self.outputs[display_id] = output
        self.updates += update

    def choose(self, **values: Any) -> None:
        """Set the controls one after the other."""
        for name, value in values.items():
            self.scope["controls"][name].value = value

    @property
    def text(self) -> str:
        return str(self.outputs[self.scope["text"].display_id].data)

    @property
    def picture(self) -> bytes:
        output = self.outputs[self.scope["figure"].display_id]
        return output.data if isinstance(output.data, bytes) else b""

    @property
    def red_pixels(self) -> int:
        pixels = imread(io.BytesIO(self.picture))[..., :3]
        return int((abs(pixels - to_rgb(RED)).max(axis=-1) < 0.01).sum())

    def command(self) -> list[str]:
        """Return the command line for the layout of the controls."""
        chosen = {name: control.value for name, control in self.scope["controls"].items()}
        keys = ("model", "system", "gpus", "tp", "pp", "cp", "zero", "micro_batch")
        options = [f"--{key.replace('_', '-')}={chosen[key]}" for key in keys]
        replicas = chosen["gpus"] // (chosen["tp"] * chosen["pp"] * chosen["cp"])
        batch = replicas * chosen["micro_batch"] * chosen["micro_batches"]
        recompute = "--recompute" if chosen["recompute"] else "--no-recompute"
        return ["simulate", *options, f"--global-batch={batch}", recompute]


@pytest.fixture(scope="module")
def run_explorer() -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()):
        yield Explorer(monkeypatch)


@pytest.fixture
def explorer(run_explorer: Explorer) -> Explorer:
    """Return the notebook with its initial controls."""
    run_explorer.choose(**run_explorer.scope["FIRST"])
    return run_explorer


def test_initial_output_has_the_numbers_of_the_command(
    explorer: Explorer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explorer.updates >= 2
    assert explorer.picture.startswith(b"\x89PNG")
    assert not explorer.red_pixels
    assert cli.main([*explorer.command(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    time = found["time"]
    rate = found["flops"]["model"] / time["step_s"] / found["gpus"]
    low, high = (units.seconds(time["interval"][key]) for key in ("low_s", "high_s"))
    cells = explorer.text.splitlines()[-1].strip("| ").split(" | ")
    assert cells[:2] == [units.seconds(time["step_s"]), f"{low} to {high}"]
    numbers = (units.number(time["samples_per_s"]), units.number(rate / 1e12), units.percent(time["mfu"]))
    assert cells[2:] == [*numbers]
    assert f"Peak memory: {units.size(found['memory']['reserved_bytes'])} of" in explorer.text


@pytest.mark.parametrize(
    "change", [{"micro_batch": 2}, {"zero": 0}, {"recompute": False}, {"gpus": 128}], ids=str
)
def test_a_control_changes_the_output(explorer: Explorer, change: dict[str, int]) -> None:
    before = explorer.text, explorer.picture
    explorer.choose(**change)
    assert explorer.text != before[0]
    assert explorer.picture != before[1]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tp": 3}, "--gpus = 64: must be a multiple of tp x pp = 3 x 4 = 12"),
        ({"model": "turing-nlg-17b"}, "--tp = 8: must be a divisor of heads = 28 (turing-nlg-17b)"),
        ({"zero": 3}, "--zero = 3: must be 0, 1 or 2 with pp = 4"),
    ],
)
def test_invalid_layouts_show_the_error_of_the_command(
    explorer: Explorer, values: dict[str, Any], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    explorer.choose(**values)
    shown = explorer.text.strip("`\n")
    assert shown.startswith(f"error: {expected}")
    assert not explorer.picture
    assert cli.main(explorer.command()) == 2
    assert capsys.readouterr().err == f"{shown}\n"
    explorer.choose(**explorer.scope["FIRST"])
    assert explorer.picture, "a valid layout is drawn again"


def test_memory_above_the_limit_is_red(explorer: Explorer, capsys: pytest.CaptureFixture[str]) -> None:
    explorer.choose(zero=0, tp=4)
    assert cli.main(explorer.command()) == 1
    printed = " ".join(capsys.readouterr().out.split())
    cause = printed[printed.index("Cause: ") : printed.index(" are missing.")]
    assert f"{cause} are missing." in explorer.text
    assert cause.endswith(" GB")
    assert "No step time: the step does not fit the device's memory." in explorer.text
    red_pixels = explorer.red_pixels
    assert red_pixels
    explorer.choose(tp=2)
    assert explorer.red_pixels > red_pixels, "half as many shards need more memory"


@pytest.mark.slow
def test_a_control_changes_the_output_in_a_kernel(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="nbclient runs the notebooks; it is in the extra test")
    shutil.copy(SOURCES[-1], tmp_path)
    edited = tmp_path / "10_moved.py"
    edited.write_text(f"{SOURCES[-1].read_text()}\n\n# %%\ncontrols['tp'].value = 3\n")
    still, changed = (
        build.execute(path, tmp_path / "results") for path in (tmp_path / SOURCES[-1].name, edited)
    )
    _, text, figure = still.cells[-1].outputs
    assert "Fits: " in text.data["text/markdown"]
    assert "image/png" in figure.data
    _, text, figure = changed.cells[-2].outputs
    assert "error: --gpus = 64: must be a multiple of tp x pp" in text.data["text/markdown"]
    assert "image/png" not in figure.data
    page, _ = build.write_notebooks(tmp_path / "results", tmp_path / "pages", tmp_path)[0]
    html = page.read_text(encoding="utf-8")
    assert "<script" not in html, "the page has no controls"
    assert "data:image/png" in html
