"""Tests of the notebook with controls: it shows the values that `repro simulate` prints for the same layout."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from repro import cli
from repro.report.figures.style import RED
from repro.report.page import build
from repro.util import units

pytest.importorskip("jupytext", reason="jupytext reads the notebooks; it is in the extra test")
pytest.importorskip("ipywidgets", reason="ipywidgets makes the controls; it is in the extra test")
SOURCE = build.NOTEBOOKS_FOLDER / "09_explore.py"


class Explorer:
    """The notebook after all of its cells ran in this process, without a front end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from IPython.core import display_functions

        self.outputs: dict[str, Any] = {}
        self.updates = 0
        monkeypatch.setattr(display_functions, "display", self.show)
        self.scope: dict[str, Any] = {"__name__": "__main__"}
        for cell in build.read_notebook(SOURCE).cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, SOURCE.name, "exec"), self.scope)

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
        sizes = {
            key: chosen[key] for key in ("model", "system", "gpus", "tp", "pp", "cp", "zero", "micro_batch")
        }
        options = [f"--{key.replace('_', '-')}={value}" for key, value in sizes.items()]
        replicas = chosen["gpus"] // (chosen["tp"] * chosen["pp"] * chosen["cp"])
        batch = replicas * chosen["micro_batch"] * chosen["micro_batches"]
        return [
            "simulate",
            *options,
            f"--global-batch={batch}",
            "--recompute" if chosen["recompute"] else "--no-recompute",
        ]


@pytest.fixture(scope="module")
def explorer() -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(io.StringIO()):
        yield Explorer(monkeypatch)


@pytest.fixture(autouse=True)
def _initial_controls(explorer: Explorer) -> None:
    explorer.choose(**explorer.scope["FIRST"])


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
    assert cells == [
        units.seconds(time["step_s"]),
        f"{low} to {high}",
        units.number(time["samples_per_s"]),
        units.number(rate / 1e12),
        units.percent(time["mfu"]),
    ]
    assert f"Peak memory: {units.size(found['memory']['reserved_bytes'])} of" in explorer.text


@pytest.mark.parametrize(
    ("name", "value"), [("micro_batch", 2), ("zero", 0), ("recompute", False), ("gpus", 128)]
)
def test_a_control_changes_the_output(explorer: Explorer, name: str, value: int) -> None:
    before = explorer.text, explorer.picture
    explorer.choose(**{name: value})
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
    shutil.copy(SOURCE, tmp_path)
    edited = tmp_path / "10_moved.py"
    edited.write_text(f"{SOURCE.read_text()}\n\n# %%\ncontrols['tp'].value = 3\n")
    still, changed = (build.execute(path, tmp_path / "results") for path in (tmp_path / SOURCE.name, edited))
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
