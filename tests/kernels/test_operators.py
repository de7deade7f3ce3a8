"""Tests of every operator: schema, meta function, registered cost, and chunks of fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from repro.kernels import cost, cross_entropy, dropout, glu, rmsnorm, softmax
from repro.kernels.families import FORMULAS
from tests.kernels.bindings import BINDINGS


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


def test_every_operator_has_samples_formulas_and_bindings() -> None:
    assert set(FORMULAS) == set(NAMES) == set(BINDINGS)


@pytest.mark.parametrize("name", NAMES)
def test_operators_pass_opcheck(name: str) -> None:
    arguments = samples(torch.float32)[name]
    torch.library.opcheck(
        getattr(torch.ops.repro, name).default, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("name", NAMES)
def test_meta_has_the_same_shapes_and_dtypes(name: str) -> None:
    """The test of bf16 shows which results are fp32; `opcheck` compares fp32."""
    operator = getattr(torch.ops.repro, name).default
    results = (operator(*samples(torch.bfloat16, device)[name]) for device in ("cpu", "meta"))
    real, meta = ([t for t in tree_leaves(each) if isinstance(t, Tensor)] for each in results)
    assert {t.device.type for t in meta} <= {"meta"}
    assert [(t.shape, t.dtype, t.stride()) for t in meta] == [(t.shape, t.dtype, t.stride()) for t in real]


@pytest.mark.parametrize("name", NAMES)
def test_costs_are_those_of_the_flop_counter_and_of_the_operands(name: str) -> None:
    arguments = samples(torch.bfloat16, "meta")[name]
    with FlopCounterMode(display=False) as counter:
        getattr(torch.ops.repro, name)(*arguments)
    price = cost(name, *arguments)
    assert counter.get_total_flops() == price.flops
    assert 0 < price.bytes_read <= sum(t.nbytes for t in tree_leaves(arguments) if isinstance(t, Tensor))
    assert price.bytes_written > 0


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
