"""Tests of all differentiable functions, with torch's operators and with the CUDA sources.

The tests compare values and gradients with a reference in fp64, and check saved tensors and dispatched operators.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from repro import kernels
from repro.kernels import dropout, gelu, glu, layernorm, rmsnorm, rope, softmax
from tests.kernels.gradients import assert_matches_fp64, with_gradients
from tests.kernels.on_cpu import placed

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
EPS = {"eps": 0.5}
"""Epsilon that is not negligible relative to a variance of 9."""
SCALE = {"scale": 0.3}
ROTATED = {"heads": 1, "head_width": 4, "width": 2, "base": 100.0}


class Function(NamedTuple):
    """A function of x and of vectors with the length of a row."""

    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    shapes: list[tuple[int, ...]]
    """Shapes of a small x and of the vectors."""
    options: dict[str, Any]
    saved: list[Any]
    """Tensors saved for backward: the name of an argument or result, or the shape of another tensor."""


def with_x_as_residual(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, bias, **plain: function(x, bias, x, 0.3, 7, 0, x.shape[1], 0, True, **plain)


dropout_functions = (with_x_as_residual(f) for f in (kernels.bias_dropout_residual, dropout.reference))
X, ROW = (2, 3, 8), (8,)
FUNCTIONS = {
    "layer_norm": Function(
        kernels.layer_norm, layernorm.reference, [X, ROW, ROW], EPS, ["x", (2, 3, 1), (2, 3, 1), "weight"]
    ),
    "rms_norm": Function(kernels.rms_norm, rmsnorm.reference, [X, ROW], EPS, ["x", (2, 3, 1), "weight"]),
    "bias_gelu": Function(kernels.bias_gelu, gelu.reference, [X, ROW], {}, ["x", "weight"]),
    "swiglu": Function(kernels.swiglu, glu.reference, [X], {}, ["x"]),
    "causal_softmax": Function(kernels.causal_softmax, softmax.reference, [(2, 5, 5)], SCALE, ["y"]),
    "rotary": Function(kernels.rotary, rope.reference, [X], ROTATED, []),
    "bias_dropout_residual": Function(*dropout_functions, [X, ROW], {}, []),
}
EVERY_FUNCTION = pytest.mark.parametrize("name", FUNCTIONS)


class OperatorNames(TorchDispatchMode):
    """Dispatch mode that records the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@EVERY_FUNCTION
def test_each_pass_dispatches_one_operator_and_saves_only_its_operands(name: str, device: str) -> None:
    function, _, shapes, options, expected = FUNCTIONS[name]
    leaves = [torch.randn(shape, device=device).requires_grad_() for shape in shapes]
    saved: list[Tensor] = []
    with OperatorNames() as seen:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            y = function(*leaves, **options)
        gradients = torch.autograd.grad(y, leaves, torch.ones_like(y))
    ours = [call for call in seen.calls if call.startswith("repro.")]
    backward = name if name == "rotary" else f"{name}_backward"
    assert ours == [f"repro.{name}.default", f"repro.{backward}.default"]
    others = {call.split(".")[1] for call in seen.calls if not call.startswith("repro.")}
    assert others <= {"ones_like", "add", "detach", "empty_strided", "_to_copy"}, others
    if device == "meta":
        return
    named = zip((y, *leaves), ("y", "x", "weight", "bias"), strict=False)
    names = {tensor.data_ptr(): argument for tensor, argument in named}
    assert [names.get(t.data_ptr(), t.shape) for t in saved] == expected
    with OperatorNames() as seen:
        plain = with_gradients(partial(function, plain=True, **options), torch.ones_like(y), *leaves)
    assert not any(call.startswith("repro.") for call in seen.calls)
    torch.testing.assert_close(plain, [y.detach(), *gradients])


@EVERY_FUNCTION
def test_gradcheck(name: str) -> None:
    function, _, shapes, options, _ = FUNCTIONS[name]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(partial(function, **options), leaves)


Case = tuple[str, tuple[int, ...], torch.dtype, torch.dtype, int, dict[str, Any]]
CASES: list[Case] = [
    ("layer_norm", (5, 3, 136), BF16, BF16, 0, EPS),
    ("layer_norm", (7, 1600), FP16, FP32, 0, EPS),
    ("layer_norm", (3, 2, 37), FP32, FP32, 0, EPS),
    ("layer_norm", (40, 64), FP32, FP32, 1, EPS),
    ("rms_norm", (5, 3, 136), BF16, BF16, 0, EPS),
    ("rms_norm", (7, 1600), FP16, FP32, 0, EPS),
    ("rms_norm", (41, 64), FP32, FP32, 1, EPS),
    ("bias_gelu", (5, 3, 16), BF16, BF16, 0, {}),
    ("bias_gelu", (70, 48), FP32, FP32, 0, {}),
    ("bias_gelu", (9, 7), FP16, FP16, 0, {}),
    ("bias_gelu", (33, 16), FP32, FP32, 1, {}),
    ("swiglu", (5, 3, 80), BF16, BF16, 0, {}),
    ("swiglu", (1200, 16), FP16, FP16, 0, {}),
    ("swiglu", (7, 26), FP32, FP32, 0, {}),
    ("swiglu", (6, 32), FP32, FP32, 1, {}),
    ("causal_softmax", (2, 3, 24, 24), FP16, FP16, 0, SCALE),
    ("causal_softmax", (19, 19), FP32, FP32, 0, SCALE),
    ("causal_softmax", (2, 72, 72), BF16, BF16, 1, SCALE),
    ("causal_softmax", (1, 1), FP32, FP32, 0, SCALE),
    ("rotary", (2, 9, 96), BF16, BF16, 0, {"heads": 4, "head_width": 16, "width": 16, "base": 1e4}),
    ("rotary", (2, 9, 96), FP16, FP16, 1, {"heads": 4, "head_width": 16, "width": 16, "base": 1e4}),
    ("rotary", (1, 40, 30), FP32, FP32, 0, {"heads": 3, "head_width": 10, "width": 4, "base": 100.0}),
    ("rotary", (3, 5, 64), BF16, BF16, 0, {"heads": 1, "head_width": 32, "width": 16, "base": 5e5}),
    ("rotary", (3, 5, 64), FP16, FP16, 0, {"heads": 1, "head_width": 32, "width": 16, "base": 5e5}),
]
"""Function, shape and dtype of x, dtype of the vectors, offset of x from an aligned address in elements, options."""


def check(case: Case, implementation: object, transposed: bool = False) -> None:
    """Compare a function and its gradients with the reference; x and the gradient may be transposed."""
    name, shape, kind, weights, offset, options = case
    function, reference = (partial(each, **options) for each in FUNCTIONS[name][:2])
    torch.manual_seed(0)
    x = (3 * torch.randn(shape) + 1).to(kind)
    x, untouched = placed(x.t() if transposed else x, offset)
    x = x.t() if transposed else x
    vectors = [torch.randn(shape[-1]).to(weights) for _ in FUNCTIONS[name].shapes[1:]]
    grad = torch.randn_like(reference(x.double(), *vectors)).to(kind)
    # The gradient of softmax is computed from rounded weights. Torch's layer norm rounds sums of the gradients of the
    # weights to the dtype of the rows.
    is_rounded = implementation is None and name in ("layer_norm", "rms_norm")
    roundings, dtype = 8 if is_rounded or name == "causal_softmax" else 2, kind if is_rounded else None
    assert_matches_fp64(function, reference, grad, x, *vectors, roundings=roundings, dtype=dtype)
    untouched()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}-{case[4]}")
def test_function_and_gradients_match_fp64(case: Case, implementation: object) -> None:
    check(case, implementation)


@settings(max_examples=10)
@given(rows=st.integers(0, 40), chunk=st.integers(1, 500), transposed=st.booleans(), data=st.data())
@pytest.mark.parametrize("name", sorted({case[0] for case in CASES}))
def test_functions_of_any_number_of_rows(
    name: str, implementation: object, rows: int, chunk: int, transposed: bool, data: st.DataObject
) -> None:
    """Vary rows, strides and chunks for the row lengths of `CASES`; other lengths need other CUDA programs."""
    case = data.draw(st.sampled_from([case for case in CASES if case[0] == name]))
    _, shape, kind, weights, offset, options = case
    if name == "bias_gelu":  # one CUDA program for all lengths
        shape = (data.draw(st.integers(1, 90) | st.sampled_from([8, 64, 264])),)
        offset = data.draw(st.integers(0, 7))
    is_matrix = name not in ("causal_softmax", "rotary")
    shape = (rows, shape[-1]) if is_matrix else (1 + rows % 5, *shape[-2:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro.kernels.library.CPU_CHUNK", chunk)
        check((name, shape, kind, weights, offset, options), implementation, transposed and is_matrix)


ROWS, ODD = torch.ones(2, 3), torch.ones(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.layer_norm(ROWS, ODD, ODD), r"layer_norm of \[2, 3\]"),
        (lambda: kernels.rms_norm(ROWS, ODD), r"a weight of \[3\], not \[4\]"),
        (lambda: kernels.bias_gelu(ROWS, ODD), r"bias of \[3\], not \[4\]"),
        (lambda: kernels.swiglu(ROWS), r"swiglu of \[2, 3\] needs an even last dimension"),
        (lambda: kernels.causal_softmax(ODD, 1.0), r"needs scores \[..., s, s\]"),
        (lambda: kernels.causal_softmax(torch.ones(2, 3, 4), 1.0), r"needs scores \[..., s, s\]"),
        *(
            (lambda sizes=sizes: kernels.rotary(torch.ones(1, 2, 8), *sizes), r"rotary of \[1, 2, 8\] needs")
            for sizes in [(3, 4, 4), (1, 4, 3), (1, 4, 6), (1, 3, 2)]
        ),
    ],
)
def test_mismatched_sizes_are_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
