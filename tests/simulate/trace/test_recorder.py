"""Tests of traced operators: their source lines, and results that are recreated from their shape alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from repro import kernels
from repro.simulate.trace.events import Alloc
from repro.simulate.trace.recorder import TraceRecorder, innermost_line
from repro.simulate.trace.shapes import UNKNOWN_RESULT, _made, _shape

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
    """The module name decides, and the path of the file does not. Line 4 of each module calls the next module."""
    packages = ("repro.model", "repro.parallel", "repro.kernels")
    call = innermost_line(packages, but=("repro.parallel.storage",))
    for name in reversed(modules):
        names: dict[str, Any] = {"__name__": name}
        exec(compile(SOURCE, "/home/me/kernels/.venv/somewhere.py", "exec"), names)
        call = lambda through=names["through"], inner=call: through(inner)
    assert call() == line


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
    with TraceRecorder() as recorder:
        getattr(kernels, name)(*tensors, *numbers).sum().backward()
    made = [event for event in recorder.finish() if isinstance(event, Alloc)]
    files = {event.operator: event.line.partition(":")[0] for event in made if "repro." in event.operator}
    file = f"kernels/{module}.py"
    assert files == {f"repro.{name}": file, f"repro.{name}_backward": file}


def test_only_tensors_that_fill_their_storage_are_recreated() -> None:
    for full in (torch.empty(2, 3, device="meta"), torch.empty(4, 5, dtype=torch.half, device="meta").t()):
        known = (full.shape, full.stride(), full.dtype)
        assert _shape(full) == known
        recreated = _made(known)
        assert (recreated.shape, recreated.stride(), recreated.dtype, recreated.device) == (
            *known,
            full.device,
        )
    pair = _shape((torch.empty(2, device="meta"), None))
    assert pair == (tuple, ((torch.Size([2]), (1,), torch.float32), None))
    assert _made(pair)[1] is None
    wide = torch.empty(4, 6, device="meta")
    for value in (wide[:2], wide[:, :3], wide[:0], torch.empty(3), 7):
        assert _shape(value) is UNKNOWN_RESULT
    assert _shape((torch.empty(2, device="meta"), wide[:2])) is UNKNOWN_RESULT
