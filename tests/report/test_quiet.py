"""`repro report` where the home folder cannot be written: no library says so on standard error."""

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


def errors(program: str, folder: Path) -> str:
    """Return the standard error of a program in `folder`, with a home that takes no files, even from root."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "MPL", "IPYTHON"))}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**kept, "HOME": "/dev/null"},
        capture_output=True,
        text=True,
        check=True,
    ).stderr


def test_figures_are_drawn_without_a_word(tmp_path: Path) -> None:
    assert errors(DRAW, tmp_path) == ""


@pytest.mark.slow
def test_notebooks_are_executed_without_a_word(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="nbclient runs the notebooks; it is in the extra test")
    cell = "import matplotlib.pyplot\nimport repro\nprint(repro.__version__)"
    (tmp_path / "01_small.py").write_text(f"# %% [markdown]\n# # Small\n\n# %%\n{cell}\n")
    assert errors(EXECUTE, tmp_path) == ""
    assert (tmp_path / "out/01_small.html").is_file()


def test_a_user_without_a_home_has_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user is in no list; no error, and no folder named `~` in the current one."""
    monkeypatch.delenv(compiler.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert compiler.cache_folder() == Path("/~/.cache/repro/kernels")
