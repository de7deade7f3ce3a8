"""Tests of `repro report` with a home folder that is not writable: no library warns on standard error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro.kernels.cuda import compile as compiler

DRAW = (
    "from repro.report.figures.style import figure_style, make_axes\nwith figure_style():\n    make_axes(3.0)"
)
EXECUTE = f"""
import sys
from pathlib import Path
from repro.report.page import build
{DRAW}
build.write_notebooks(Path("results"), Path("out"), Path("."))
"""


def standard_error(program: str, folder: Path) -> str:
    """Return the standard error of a program in `folder`, with a home that is not writable, even by root."""
    base = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "MPL", "IPYTHON"))}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**base, "HOME": "/dev/null"},
        capture_output=True,
        text=True,
        check=True,
    ).stderr


def test_drawing_figures_writes_nothing_to_standard_error(tmp_path: Path) -> None:
    assert standard_error(DRAW, tmp_path) == ""


@pytest.mark.slow
def test_executing_notebooks_writes_nothing_to_standard_error(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="nbclient runs the notebooks; it is in the extra test")
    cell = "import matplotlib.pyplot\nimport repro\nprint(repro.__version__)"
    (tmp_path / "01_small.py").write_text(f"# %% [markdown]\n# # Small\n\n# %%\n{cell}\n")
    assert standard_error(EXECUTE, tmp_path) == ""
    assert (tmp_path / "out/01_small.html").is_file()


def test_cache_folder_without_a_home_is_not_writable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without an entry in /etc/passwd has no home folder. `~` must not name a folder in the current folder."""
    monkeypatch.delenv(compiler.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert compiler.cache_folder() == Path("/~/.cache/repro/kernels")
