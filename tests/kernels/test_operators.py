"""Tests of every operator: schema, meta function, cost, chunks of fp32, and bytes that the CUDA sources access."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from repro.kernels import cost, cross_entropy, dropout, glu, rmsnorm, softmax
from repro.kernels.families import FORMULAS
from repro.kernels.library import Cost
from tests.kernels.on_cpu import BINDINGS, COMPILER, HEADER, Host


def samples(dtype: torch.dtype, device: str = "cpu", large: bool = False) -> dict[str, tuple[Any, ...]]:
    """Return distinct arguments for every operator, in the order of its schema."""

    def tensor(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape).to(device, kind)

    def wide(*shape: int) -> Tensor:
        return tensor(*shape, kind=torch.float32).abs()

    def x() -> Tensor:
        return tensor(*row, h)

    def flat(make: Callable[[int], Tensor]) -> list[Tensor]:
        return [make(size) for size in sizes]

    row, h, sizes = ((3, 40), 64, (8195, 7)) if large else ((2, 3), 8, (5, 2))
    n, v = (9, 531) if large else (4, 6)
    statistic, s = (*row, 1), h if large else h // 2
    weights = softmax.reference(tensor(2, s, s, kind=torch.float32), 0.5).to(dtype)
    targets = torch.arange(n, device=device) if large else torch.tensor([0, 5, 9, 2], device=device)
    first = 0 if large else 3
    key = (7, 1, row[1] + 1, 1)
    scalars = [torch.tensor(value, device=device) for value in (1.0, 1e-3, 2.0, 0.0)]
    return {
        "layer_norm": (x(), tensor(h), tensor(h), 1e-5),
        "layer_norm_backward": (x(), x(), wide(*statistic), wide(*statistic), tensor(h)),
        "rms_norm": (x(), tensor(h), 1e-5),
        "rms_norm_backward": (x(), x(), wide(*statistic), tensor(h)),
        "swiglu": (x(),),
        "swiglu_backward": (tensor(*row, h // 2), x()),
        "rotary": (tensor(*row, 96), 2, 32, 16, 1e4, False)
        if large
        else (tensor(*row, 18), 2, 6, 4, 100.0, True),
        "bias_gelu": (x(), tensor(h)),
        "bias_gelu_backward": (x(), x(), tensor(h)),
        "bias_dropout_residual": (x(), tensor(h), x(), 0.3, *key),
        "bias_dropout_residual_backward": (x(), True, 0.3, *key),
        "causal_softmax": (tensor(2, s, s) if large else tensor(2, 3, s, s), 0.5),
        "causal_softmax_backward": (tensor(2, s, s), weights, 0.5),
        "cross_entropy_max": (tensor(n, v),),
        "cross_entropy_sums": (tensor(n, v), wide(n), targets, first),
        "cross_entropy_backward_": (tensor(n, v), wide(n), wide(2, n) + 1, targets, first, wide(n)),
        "adamw_": (
            *(flat(make) for make in (wide, tensor, wide, wide, tensor)),
            *(*scalars[:2], 0.9, 0.95, 1e-8, 0.1, *scalars[2:]),
        ),
        "norm_squared": (flat(lambda size: tensor(2 * size + 1)),),
        "sum_rows": (tensor(45, 64) if large else tensor(6, 8),),
    }


NAMES = sorted(samples(torch.float32))


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def geometry(tree: Any) -> list[tuple[Any, ...]]:
    return [(t.shape, t.dtype, t.stride()) for t in tensors_in(tree)]


def results_of(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Call an operator and return its results: returned tensors, and arguments after the call.

    The gradients of AdamW are omitted, because its contract allows any content after the call.
    """
    returned = getattr(torch.ops.repro, name).default(*arguments)
    if name == "adamw_":
        arguments = tuple(argument for i, argument in enumerate(arguments) if i != 1)
    return tensors_in((returned, arguments))


def test_every_operator_has_samples_formulas_and_bindings() -> None:
    assert set(FORMULAS) == set(NAMES) == set(BINDINGS)


@pytest.mark.parametrize("name", NAMES)
def test_schema_meta_function_and_flop_counter(name: str) -> None:
    """`opcheck` compares fp32; the shapes in bf16 show which results are fp32."""
    operator = getattr(torch.ops.repro, name).default
    torch.library.opcheck(
        operator, samples(torch.float32)[name], test_utils=("test_schema", "test_faketensor")
    )
    real, arguments = operator(*samples(torch.bfloat16)[name]), samples(torch.bfloat16, "meta")[name]
    with FlopCounterMode(display=False) as counter:
        meta = operator(*arguments)
    assert {t.device.type for t in tensors_in(meta)} <= {"meta"}
    assert geometry(meta) == geometry(real)
    assert counter.get_total_flops() == cost(name, *arguments).flops


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


ACCESS = np.dtype([("address", np.uint64), ("size", np.uint32), ("write", np.uint32)])
SANITIZER_OPTIONS = ["-fsanitize=kernel-address", "-fno-sanitize-address-use-after-scope"]
for _parameter in ("instrumentation-with-call-threshold", "stack", "globals"):
    SANITIZER_OPTIONS += ["--param", f"asan-{_parameter}=0"]


class CountingHost(Host):
    """Host whose programs log their memory accesses."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.headers = [HEADER, HEADER.with_name("counting.h")]
        self.options = SANITIZER_OPTIONS
        self.accesses: list[np.ndarray[Any, Any]] = []

    def after_launch(self, library: ctypes.CDLL) -> None:
        count = ctypes.c_size_t()
        library.counted.restype = ctypes.c_void_p
        address = library.counted(ctypes.byref(count))
        if count.value:
            raw = ctypes.string_at(address, count.value * ACCESS.itemsize)
            self.accesses.append(np.frombuffer(raw, ACCESS))

    def accessed_bytes(self, tensor: Tensor, *, write: bool) -> tuple[int, int]:
        """Return (bytes accessed at least once, bytes of all accesses) of a tensor."""
        found = np.concatenate(self.accesses)
        start, size = tensor.data_ptr(), tensor.nbytes
        is_inside = (found["address"] >= start) & (found["address"] < start + size)
        found = found[(found["write"] == write) & is_inside]
        times = np.zeros(size + 1, np.int64)
        first = (found["address"] - np.uint64(start)).astype(np.int64)
        np.add.at(times, first, 1)
        np.add.at(times, first + found["size"], -1)
        times = times.cumsum()[:-1]
        return int((times > 0).sum()), int(times.sum())


@pytest.fixture(scope="module")
def counting_host(tmp_path_factory: pytest.TempPathFactory) -> CountingHost:
    if COMPILER is None:
        pytest.skip("needs g++ to run the CUDA sources on the CPU")
    return CountingHost(tmp_path_factory.mktemp("counting"))


@pytest.mark.parametrize("name", BINDINGS)
def test_operands_are_read_once_and_results_written_once(name: str, counting_host: CountingHost) -> None:
    """The results also have the shapes, dtypes and strides of the meta function."""
    arguments = samples(torch.bfloat16, large=True)[name]
    on_meta = tree_map_only(Tensor, lambda t: t.to("meta"), arguments)
    counting_host.accesses.clear()
    results = tensors_in(counting_host.call(BINDINGS[name], *arguments))
    assert geometry(results) == geometry(getattr(torch.ops.repro, name).default(*on_meta))
    operands = [t for t in tensors_in(arguments) if t.dim()]
    written = {t.data_ptr(): t for t in [*operands, *results] if t.nbytes}
    read = [counting_host.accessed_bytes(t, write=False) for t in operands]
    wrote = [counting_host.accessed_bytes(t, write=True) for t in written.values()]
    if name == "cross_entropy_backward_":  # the sanitizer reports a read with a write of one address once
        wrote[0] = (max(read[0][0], wrote[0][0]),) * 2
    price = cost(name, *arguments)
    assert sum(distinct for distinct, _ in wrote) == sum(total for _, total in wrote) == price.bytes_written
    if name.startswith("causal_softmax"):
        # The formula includes the masked scores of future positions, which this kernel does not read.
        assert 0.5 * price.bytes_read < sum(distinct for distinct, _ in read) < 0.6 * price.bytes_read
    else:
        assert sum(distinct for distinct, _ in read) == price.bytes_read
    largest = max(t.nbytes for t in operands)
    repeated = {"cross_entropy_sums": 9 * 2}.get(name, 0)  # the targets' logits
    for tensor, (distinct, total) in zip(operands, read, strict=True):
        if tensor.nbytes == largest:
            assert total - distinct == repeated, "a large operand is read from memory twice"


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
    layer_norm = cost("layer_norm_backward", row, row, statistic, statistic, (8,))
    assert layer_norm == Cost(14 * 48, 4 * (2 * 48 + 2 * 6 + 8), 4 * (48 + 2 * 8))
    assert cost("rms_norm", (2, 3, 8), (8,)) == Cost(4 * 48 + 3 * 6, 4 * 56, 4 * 48 + 4 * 6)
    rms_norm = cost("rms_norm_backward", row, row, statistic, (8,))
    assert rms_norm == Cost(9 * 48, 4 * (2 * 48 + 6 + 8), 4 * (48 + 8))
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


def test_cost_of_an_unknown_operator_is_an_error() -> None:
    with pytest.raises(ValueError, match="no operator repro::softmax"):
        cost("softmax", (1,))
