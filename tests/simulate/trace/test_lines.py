"""Which line asked for something: by the module that runs, wherever the code lies on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from repro.simulate.trace.recorder import innermost_line

SOURCE = "\n\ndef through(call):\n    return call()\n"


def module(name: str, file: str = "/somewhere.py") -> Callable[[Callable[[], Any]], Any]:
    """A function of a module of that name, which calls what it is given in its fourth line."""
    names: dict[str, Any] = {"__name__": name}
    exec(compile(SOURCE, file, "exec"), names)
    through: Callable[[Callable[[], Any]], Any] = names["through"]
    return through


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("repro.model.gpt", "repro/model/gpt.py:4"),
        ("repro.kernels.norm", "kernels/norm.py:4"),
        ("repro.model_of_others", "?"),
        ("repro.parallel.storage", "?"),
        ("tests.kernels.norm", "?"),
    ],
)
def test_a_line_of_the_packages(name: str, line: str) -> None:
    found = innermost_line(
        ("repro.model", "repro.parallel", "repro.kernels"), but=("repro.parallel.storage",)
    )
    assert module(name)(found) == line


def test_the_innermost_of_several_and_no_folder_of_that_name() -> None:
    found = innermost_line(("repro.model", "repro.kernels"))
    outer, inner = module("repro.model.gpt"), module("repro.model.layer")
    assert outer(lambda: inner(found)) == "repro/model/layer.py:4"
    others = module("torch.nn.functional", "/home/me/kernels/.venv/torch/nn/functional.py")
    assert outer(lambda: others(found)) == "repro/model/gpt.py:4"
