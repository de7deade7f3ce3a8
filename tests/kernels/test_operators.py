"""Tests of every operator: schema, meta function, one dispatched operator per pass, and cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import repro.kernels as kernels
from repro.kernels import cost, cross_entropy, dropout, glu, rmsnorm, softmax
from repro.kernels.families import FORMULAS
from repro.kernels.library import Cost


def samples(dtype: torch.dtype, device: str = "cpu") -> dict[str, tuple[Any, ...]]:
    """Arguments for every operator, in the order of its schema."""

    def tensor(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape).to(device, kind)

    def wide(*shape: int) -> Tensor:
        return tensor(*shape, kind=torch.float32).abs()

    x, h, flat = tensor(2, 3, 8), tensor(8), [wide(5), wide(2)]
    weights = softmax.reference(tensor(2, 4, 4, kind=torch.float32), 0.5).to(dtype)
    targets = torch.tensor([0, 5, 9, 2], device=device)
    narrow = [t.to(dtype, copy=True) for t in flat]
    return {
        "layer_norm": (x, h, h, 1e-5),
        "layer_norm_backward": (x, x, wide(2, 3, 1), wide(2, 3, 1), h),
        "rms_norm": (x, h, 1e-5),
        "rms_norm_backward": (x, x, wide(2, 3, 1), h),
        "swiglu": (x,),
        "swiglu_backward": (tensor(2, 3, 4), x),
        "rotary": (tensor(2, 3, 18), 2, 6, 4, 100.0, True),
        "bias_gelu": (x, h),
        "bias_gelu_backward": (x, x, h),
        "bias_dropout_residual": (x, h, x, 0.3, 7, 1, 4, 1),
        "bias_dropout_residual_backward": (x, True, 0.3, 7, 1, 4, 1),
        "causal_softmax": (tensor(2, 3, 4, 4), 0.5),
        "causal_softmax_backward": (tensor(2, 4, 4), weights, 0.5),
        "cross_entropy_max": (tensor(4, 6),),
        "cross_entropy_sums": (tensor(4, 6), wide(4), targets, 3),
        "cross_entropy_backward_": (tensor(4, 6), wide(4), wide(2, 4), targets, 3, wide(4)),
        "adamw_": (
            flat,
            narrow,
            [wide(5), wide(2)],
            [wide(5), wide(2)],
            [tensor(5), tensor(2)],
            *(torch.tensor(v, device=device) for v in (1.0, 1e-3)),
            *(0.9, 0.95, 1e-8, 0.1),
            *(torch.tensor(v, device=device) for v in (2.0, 0.0)),
        ),
        "norm_squared": ([x, h],),
        "sum_rows": (tensor(6, 8),),
    }


NAMES = sorted(samples(torch.float32))


def results_of(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Call an operator and return its results: returned tensors, and arguments after the call.

    The gradients of AdamW are omitted, because its contract allows any content after the call.
    """
    returned = getattr(torch.ops.repro, name).default(*arguments)
    if name == "adamw_":
        arguments = tuple(argument for i, argument in enumerate(arguments) if i != 1)
    return [leaf for leaf in tree_leaves((returned, arguments)) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", NAMES)
def test_results_exclude_overwritten_gradients_only(name: str) -> None:
    """A fused AdamW stores scaled gradients, other implementations do not."""
    arguments = samples(torch.float32)[name]
    gradients = arguments[1] if name == "adamw_" else []
    found = {id(tensor) for tensor in results_of(name, arguments)}
    others = [
        t for t in tree_leaves(arguments) if isinstance(t, Tensor) and not any(t is g for g in gradients)
    ]
    assert {id(tensor) for tensor in others} <= found
    assert not {id(gradient) for gradient in gradients} & found


def test_every_operator_has_samples() -> None:
    assert set(FORMULAS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_operators_pass_opcheck(name: str) -> None:
    arguments = samples(torch.float32)[name]
    torch.library.opcheck(
        getattr(torch.ops.repro, name).default, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("name", NAMES)
def test_meta_has_the_same_shapes_and_dtypes(name: str, dtype: torch.dtype) -> None:
    operator = getattr(torch.ops.repro, name).default
    real, meta = operator(*samples(dtype)[name]), operator(*samples(dtype, "meta")[name])
    if real is None:
        assert meta is None
        return
    pairs = zip(*((t,) if isinstance(t, Tensor) else t for t in (real, meta)), strict=True)
    for a, b in pairs:
        assert b.device.type == "meta"
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


class OperatorNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("layer_norm", lambda x, h: kernels.layer_norm(x, h, h)),
        ("rms_norm", lambda x, h: kernels.rms_norm(x, h)),
        ("bias_gelu", lambda x, h: kernels.bias_gelu(x, h)),
        ("bias_dropout_residual", lambda x, h: kernels.bias_dropout_residual(x, h, x, 0.2, 1, 0, 3, 0, True)),
    ],
)
def test_forward_and_backward_dispatch_one_operator_each(
    name: str, call: Callable[[Tensor, Tensor], Tensor], device: str
) -> None:
    x = torch.randn(2, 3, 8, device=device, requires_grad=True)
    h = torch.randn(8, device=device, requires_grad=True)
    with OperatorNames() as seen:
        y = call(x, h)
        torch.autograd.grad(y, [x, h], torch.ones_like(y))
    ours = [c for c in seen.calls if c.startswith("repro.")]
    assert ours == [f"repro.{name}.default", f"repro.{name}_backward.default"]
    others = {c.split(".")[1] for c in seen.calls if not c.startswith("repro.")}
    assert others <= {"ones_like", "add", "detach", "empty_strided", "_to_copy"}, others


@pytest.mark.parametrize("name", NAMES)
def test_flop_counter_knows_every_operator(name: str) -> None:
    arguments = samples(torch.bfloat16, "meta")[name]
    with FlopCounterMode(display=False) as counter:
        getattr(torch.ops.repro, name)(*arguments)
    assert counter.get_total_flops() == cost(name, *arguments).flops


def test_costs_equal_values_computed_by_hand() -> None:
    assert cost("layer_norm", (2, 3, 8), (8,), (8,)) == Cost(8 * 48 + 4 * 6, 4 * 64, 4 * 48 + 8 * 6)
    assert cost("repro::bias_gelu.default", (4, 8), (8,), itemsize=2) == Cost(8 * 32, 2 * 40, 2 * 32)
    assert cost("bias_dropout_residual", (1, 2, 8), None, (1, 2, 8)) == Cost(16, 4 * 32, 4 * 16)
    assert cost("bias_dropout_residual", (1, 2, 8), (8,), (1, 2, 8), 0.1) == Cost(48, 4 * 40, 4 * 16)
    assert cost("bias_dropout_residual_backward", (1, 2, 8), False) == Cost(16, 64, 64)
    assert cost("cross_entropy_max", (4, 10), itemsize=2) == Cost(40, 80, 16)
    assert cost("causal_softmax", (2, 8, 8), 0.5, itemsize=2) == Cost(6 * 128, 256, 256)
    assert cost("causal_softmax_backward", (2, 8, 8), (2, 8, 8), 0.5, itemsize=2) == Cost(5 * 128, 512, 256)
    assert cost("norm_squared", [(4, 10), (3,)]) == Cost(86, 4 * 43, 4)
    assert cost("sum_rows", (6, 8), itemsize=2) == Cost(48, 96, 16)
    row, statistic = (2, 3, 8), (2, 3, 1)
    # Read or written: three tensors of 48 elements, two of 6 statistics, and three of 8 weights.
    assert cost("layer_norm_backward", row, row, statistic, statistic, (8,)) == Cost(
        14 * 48, 4 * (2 * 48 + 2 * 6 + 8), 4 * (48 + 2 * 8)
    )
    assert cost("rms_norm", (2, 3, 8), (8,)) == Cost(4 * 48 + 3 * 6, 4 * 56, 4 * 48 + 4 * 6)
    assert cost("rms_norm_backward", row, row, statistic, (8,)) == Cost(
        9 * 48, 4 * (2 * 48 + 6 + 8), 4 * (48 + 8)
    )
    assert cost("swiglu", (4, 16), itemsize=2) == Cost(3 * 32, 2 * 64, 2 * 32)
    assert cost("swiglu_backward", (4, 8), (4, 16), itemsize=2) == Cost(8 * 32, 2 * 96, 2 * 64)
    # Two of three heads of width 6 are rotated, 4 elements of each.
    assert cost("rotary", (2, 5, 18), 2, 6, 4) == Cost(3 * 10 * 8, 4 * 180, 4 * 180)
    assert cost("bias_gelu_backward", (4, 8), (4, 8), (8,), itemsize=2) == Cost(17 * 32, 2 * 72, 2 * 40)
    assert cost("bias_dropout_residual_backward", (1, 2, 8), True) == Cost(32, 64, 64 + 4 * 8)
    targets = torch.empty(4, dtype=torch.int64, device="meta")
    sums = Cost(3 * 40 + 4, 4 * 40 + 4 * 4 + 8 * 4, 2 * 4 * 4)
    assert cost("cross_entropy_sums", (4, 10), (4,), targets, 0) == sums
    # Read: logits, maxima, the first row of sums, targets, gradients of the loss. Written: logits.
    gradient = Cost(3 * 40 + 2 * 4, 4 * 40 + 4 * 4 + 4 * 4 + 8 * 4 + 4 * 4, 4 * 40)
    assert cost("cross_entropy_backward_", (4, 10), (4,), (2, 4), targets, 0, (4,)) == gradient
    bf16, fp32 = torch.empty(10, dtype=torch.bfloat16, device="meta"), torch.empty(10, device="meta")
    # 12 bytes of states read and written, 2 of gradient read, 2 of parameter written: 28 per parameter.
    assert cost("adamw_", [fp32], [bf16], [fp32], [fp32], [bf16]) == Cost(140, 140, 140)


class LargestResult(TorchDispatchMode):
    """Dispatch mode that records the largest number of elements of an fp32 result of torch's operators."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (cross_entropy._sums, ("rows", "row", "targets", 0)),
        (cross_entropy._backward, ("rows", "row", "sums", "targets", 0, "row")),
        (softmax._forward, ("squares", 0.5)),
        (softmax._backward, ("squares", "squares", 0.5)),
        (rmsnorm._forward, ("rows", "bias", 1e-5)),
        (rmsnorm._backward, ("rows", "rows", "row", "bias")),
        (glu._forward, ("rows",)),
        (dropout._forward, ("samples", "bias", "samples", 0.3, 7, 0, 15, 0)),
        (dropout._backward, ("samples", True, 0.3, 7, 0, 15, 0)),
    ],
)
def test_16_bit_rows_are_converted_to_fp32_in_chunks(
    function: Callable[..., Any], arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of 1000 elements has 15 of 60 rows of 64 elements, for every operator's definition of a row."""
    monkeypatch.setattr("repro.kernels.library.CPU_CHUNK", 500)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    tensors = {
        "rows": torch.randn(60, 64).bfloat16(),
        "squares": torch.randn(4, 15, 8, 8).bfloat16(),
        "samples": torch.randn(4, 15, 64).bfloat16(),
        "bias": torch.randn(64).bfloat16(),
        "row": torch.ones(60),
        "sums": torch.ones(2, 60),
        "targets": torch.arange(60),
    }
    with LargestResult() as seen:
        function(*(tensors.get(a, a) if isinstance(a, str) else a for a in arguments))
    assert seen.elements == 15 * 64


@pytest.mark.parametrize("name", NAMES)
def test_bytes_read_do_not_exceed_the_operands(name: str) -> None:
    arguments = samples(torch.float32, "meta")[name]
    flat = [t for a in arguments for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
    limit = sum(t.nbytes for t in flat)
    price = cost(name, *arguments)
    assert 0 < price.bytes_read <= limit
    assert price.bytes_written > 0


def test_cost_of_an_unknown_operator_is_an_error() -> None:
    with pytest.raises(ValueError, match="no operator repro::softmax"):
        cost("softmax", (1,))
