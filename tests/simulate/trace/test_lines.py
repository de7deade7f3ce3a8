"""Tests of the source line of a traced operator: the module name decides, and the path of the file does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from repro import kernels
from repro.simulate.trace.recorder import innermost_line, line_of_step

SOURCE = "\n\ndef through(call):\n    return call()\n"


@pytest.mark.parametrize(
    ("modules", "line"),
    [
        (["repro.model.gpt"], "repro/model/gpt.py:4"),
        (["repro.kernels.norm"], "kernels/norm.py:4"),
        (["repro.model_of_others"], "?"),
        (["repro.parallel.storage"], "?"),
        (["tests.kernels.norm"], "?"),
        (["repro.model.gpt", "repro.model.layer"], "repro/model/layer.py:4"),
        (["repro.model.gpt", "torch.nn.functional"], "repro/model/gpt.py:4"),
    ],
)
def test_the_innermost_line_of_the_given_packages_is_found(modules: list[str], line: str) -> None:
    """Each module has a function that calls the function of the next module in line 4."""
    packages = ("repro.model", "repro.parallel", "repro.kernels")
    call = innermost_line(packages, but=("repro.parallel.storage",))
    for name in reversed(modules):
        names: dict[str, Any] = {"__name__": name}
        exec(compile(SOURCE, "/home/me/kernels/.venv/somewhere.py", "exec"), names)
        call = lambda through=names["through"], inner=call: through(inner)
    assert call() == line


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
