"""Tests of the source line of a traced operator: the module name decides, and the path of the file does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from repro import kernels
from repro.simulate.trace.recorder import innermost_line, line_of_step

SOURCE = "\n\ndef through(call):\n    return call()\n"


def module(name: str, file: str = "/somewhere.py") -> Callable[[Callable[[], Any]], Any]:
    """Return a function of a module with this name, which calls its argument in line 4 of the module."""
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
def test_only_lines_of_the_given_packages_are_found(name: str, line: str) -> None:
    found = innermost_line(
        ("repro.model", "repro.parallel", "repro.kernels"), but=("repro.parallel.storage",)
    )
    assert module(name)(found) == line


def test_the_innermost_line_of_the_packages_is_found() -> None:
    found = innermost_line(("repro.model", "repro.kernels"))
    outer, inner = module("repro.model.gpt"), module("repro.model.layer")
    assert outer(lambda: inner(found)) == "repro/model/layer.py:4"
    foreign = module("torch.nn.functional", "/home/me/kernels/.venv/torch/nn/functional.py")
    assert outer(lambda: foreign(found)) == "repro/model/gpt.py:4"


class Lines(TorchDispatchMode):
    """Record the file of every fused operator."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "repro":
            self.files[func._schema.name] = line_of_step().partition(":")[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "module", "inputs", "numbers"),
    [
        ("bias_gelu", "gelu", 2, ()),
        ("swiglu", "glu", 1, ()),
        ("layer_norm", "layernorm", 3, ()),
        ("rms_norm", "rmsnorm", 2, ()),
        ("causal_softmax", "softmax", 1, (0.5,)),
    ],
)
def test_both_passes_have_a_line_of_the_operators_module(
    name: str, module: str, inputs: int, numbers: tuple[float, ...]
) -> None:
    shapes = ((4, 4), (4,), (4,))[:inputs]
    tensors = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    with Lines() as lines:
        getattr(kernels, name)(*tensors, *numbers).sum().backward()
    file = f"kernels/{module}.py"
    assert lines.files == {f"repro::{name}": file, f"repro::{name}_backward": file}
