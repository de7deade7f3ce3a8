"""Program that audits steps on fake tensors of the device "cuda": `python -m tests.fake_cuda.audit RUNTIME.so`.

Each input line is a case in JSON: {"name", "layout", "model", "training", "kernels", "fault"}.
The operators of `repro::` run up to the kernel launch; with "kernels" false, they run as on a GPU without NVRTC.
"fault" is Python code that runs first. With "device_keys", dropout keys are in device memory, as for captured passes.
Output keys: "violations" of CUDA's rules, "ran" (the implementations that computed operators), "updates" (calls of
torch's AdamW), "passes" of the last step (`counts.Pass`), and "changed" (calls that differ from the preceding step).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1]).install()  # before torch looks for a CUDA runtime

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OPERATORS: dict[str, Callable[..., Any]] = {}
"""Implementation for CUDA tensors, by operator name in `repro::`."""


def _import_kernels() -> None:
    """Import `repro.kernels` and save its CUDA implementations in `OPERATORS`."""
    register = torch.library.Library.impl

    def impl(self: Any, name: str, function: Any, key: str = "", **more: Any) -> Any:
        if key == "CUDA":
            OPERATORS[name] = function
        return register(self, name, function, key, **more)

    torch.library.Library.impl = impl  # type: ignore[method-assign]
    import repro.kernels  # noqa: F401

    torch.library.Library.impl = register  # type: ignore[method-assign]


_import_kernels()

from repro.config import Layout, Model, Training  # noqa: E402
from repro.engines.native.engine import NativeEngine  # noqa: E402
from repro.kernels.cuda import device as cuda_device  # noqa: E402
from repro.kernels.cuda.program import Program, Unavailable  # noqa: E402
from repro.launch.rank.step_data import BatchLoader  # noqa: E402
from repro.model.data import open_stream  # noqa: E402
from repro.model.layer import DROPOUT_SITES  # noqa: E402
from repro.parallel import mesh as meshes  # noqa: E402
from repro.parallel import tensor  # noqa: E402
from repro.parallel.transports import NoTransport  # noqa: E402
from repro.simulate.trace.recorder import innermost_line  # noqa: E402
from tests.fake_cuda.counts import Counts  # noqa: E402
from tests.training import TINY, tiny  # noqa: E402

line = innermost_line(("repro",))


# Requirements of CUDA operators on their operands that neither CPU operators nor `FakeTensorMode` check.
FIRST_TWO = ("mm", "bmm", "mv", "dot", "gelu_backward", "lerp", "lerp_", "_foreach_lerp_")
FIRST_THREE = (
    *("addmm", "addmm_", "addmv", "baddbmm", "baddbmm_"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
)
ONE_DTYPE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(FIRST_TWO, (0, 1)),
    **dict.fromkeys(FIRST_THREE, (0, 1, 2)),
    **dict.fromkeys(("scatter_add", "scatter_add_", "index_add", "index_add_", "index_copy_"), (0, 3)),
    **dict.fromkeys(("index_put", "index_put_"), (0, 2)),
    "native_layer_norm": (0, 2, 3),  # x, weight and bias: pytorch/pytorch#135969
    "native_layer_norm_backward": (0, 1, 5, 6),
    "_fused_adamw_": (0, 1, 2, 3),
}
"""Indices of the arguments whose tensors must have the same dtype, by operator."""

SYNCS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "is_nonzero", "equal"}
"""Operators after which the host waits for the device."""


def violations(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[str]:
    """Yield the requirements of CUDA that a call of `aten::<name>` violates, and waits for the device."""
    tensors = [t for t in tree_leaves((arguments, keywords)) if isinstance(t, Tensor)]
    types = {t.device.type for t in tensors if t.dim()}
    if len(types) > 1 and name not in ("copy_", "_to_copy"):
        yield f"{name} on tensors of {' and '.join(sorted(types))}"
    if name in SYNCS and "cuda" in {t.device.type for t in tensors}:
        yield f"{name} waits for the device"
    if name == "copy_" and len(types) > 1:
        host = next(t for t in tensors if t.device.type == "cpu")
        if not host.is_pinned():
            yield "copy_ between the device and pageable memory"
    checked = [arguments[i] for i in ONE_DTYPE.get(name, ()) if i < len(arguments)]
    dtypes = {t.dtype for t in tree_leaves(checked) if isinstance(t, Tensor)}
    if len(dtypes) > 1:
        yield f"{name} on {' and '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}"


class FakeLauncher:
    """A kernel launcher that counts launches and runs no kernel."""

    processors = 132

    def __init__(self, counts: Counts):
        self.counts, self.source = counts, ""

    def load(self, program: Program) -> FakeLauncher:
        launcher = FakeLauncher(self.counts)
        launcher.source = program.source
        return launcher

    def launch(self, kernel: str, blocks: int, arguments: bytes) -> None:
        assert blocks > 0
        self.counts.add_kernel(f"{self.source}.{kernel}", (blocks, arguments))


def _no_nvrtc(index: int) -> Any:
    raise Unavailable("no NVRTC")


class CheckedTransport(NoTransport):
    """A transport that checks NCCL's requirements on tensors."""

    def __init__(self, messages: Counter[str]):
        self.messages = messages
        for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "receive"):
            vars(self)[name] = partial(self._check_and_run, getattr(self, name))

    def _check_and_run(self, collective: Callable[..., Any], *arguments: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        for t in tensors:
            if t.device.type != "cuda" or not t.is_contiguous():
                self.messages[f"collective on a {t.device.type} tensor, contiguous: {t.is_contiguous()}"] += 1
        if len({t.dtype for t in tensors}) > 1:
            self.messages["collective on two dtypes"] += 1
        return collective(*arguments)


class Audit(TorchDispatchMode):
    """A dispatch mode that records the violations of CUDA's rules by operator calls."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: Counter[str] = Counter()
        self.updates = 0
        """Number of calls of torch's AdamW."""
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        if space == "repro":
            with self:
                return OPERATORS[name](*args, **kwargs)
        for reason in violations(name, args, kwargs):
            self.messages[f"{reason} in {line()}"] += 1
        self.updates += name == "_fused_adamw_"
        try:
            results = NO_FAKE.get(name, func)(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(f"{name} in {line()}: {error}") from error
        self.counts.add_operator(func, tree_leaves((args, kwargs)), tree_leaves(results))
        return results


def _foreach_norm(tensors: list[Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [t.new_empty((), dtype=dtype or t.dtype) for t in tensors]


NO_FAKE = {"_foreach_norm": _foreach_norm, "_fused_adamw_": lambda *_, **__: None}
"""Replacements for operators that `FakeTensorMode` cannot run without a CUDA runtime."""


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """Call the attention operator that torch selects on a GPU; without a mask, attention is causal."""
    is_causal = attn_mask is None
    if is_causal and q.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=is_causal)[0]  # type: ignore[no-any-return]
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bias = None if attn_mask is None else attn_mask.expand(q.shape[0], -1, -1, -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias, True, is_causal=is_causal)[0]  # type: ignore[no-any-return]


class _Stream:
    """Replacement for torch's CUDA streams and events; its methods do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: _Stream()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def replace_cuda_runtime() -> None:
    """Replace the functions that need a CUDA runtime: streams, pinned memory and data pointers."""
    for name in ("Stream", "Event", "current_stream", "stream", "synchronize"):
        setattr(torch.cuda, name, _Stream)
    FakeTensor.data_ptr = lambda self: 4096  # type: ignore[method-assign]
    FakeTensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    pinned: dict[int, Tensor] = {}
    FakeTensor.is_pinned = lambda self, *_: self.untyped_storage()._cdata in pinned  # type: ignore[method-assign]
    make = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        result = make(*size, **options)
        if pin_memory:
            pinned[result.untyped_storage()._cdata] = result
        return result

    def pin_memory(self: Tensor) -> Tensor:
        assert self.device.type == "cpu"
        return torch.empty(self.shape, dtype=self.dtype, pin_memory=True)

    torch.empty = empty  # type: ignore[assignment]
    torch.nn.functional.scaled_dot_product_attention = _attention
    # torch's module returns a tensor subclass, which fake tensors do not support.
    bias = ModuleType("torch.nn.attention.bias")
    bias.causal_lower_right = lambda queries, keys: None  # type: ignore[attr-defined]
    sys.modules[bias.__name__] = bias
    FakeTensor.pin_memory = pin_memory  # type: ignore[method-assign]
    split_parameter = tensor.split_parameter

    def split_real_parameter(*arguments: Any, **options: Any) -> Any:
        # A fake parameter stores its device as an attribute, which the replacing parameter would copy.
        with unset_fake_temporarily():
            return split_parameter(*arguments, **options)

    tensor.split_parameter = split_real_parameter


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run two steps of the case on the first and the last stage, and return its output line."""
    layout, model = Layout(**case["layout"]), replace(TINY, **case["model"])
    assert isinstance(model, Model)
    training: dict[str, Any] = {"dropout": 0.1, **case["training"]}
    assert set(training) <= set(Training.__dataclass_fields__)
    experiment = tiny(layout, model, **training)
    audit, before = Audit(), cuda_device.ran()
    cuda_device.cuda_launcher = _no_nvrtc if not case["kernels"] else lambda index: FakeLauncher(audit.counts)  # type: ignore[assignment]
    device = torch.device("cuda")
    error = ""
    try:
        with FakeTensorMode(), audit:
            for rank in sorted({layout.group_of("pp", 0)[stage] for stage in (0, layout.pp - 1)}):
                mesh = meshes.build_mesh(layout, rank, lambda ranks: CheckedTransport(audit.messages))
                engine = NativeEngine(experiment, mesh, device)
                inputs = BatchLoader(open_stream(experiment.training, model), layout, rank, device)
                steps = []
                for step in range(2):
                    audit.counts.passes = []
                    audit.counts.begin_pass("input")
                    batches = inputs.micro_batches(step)
                    if case.get("device_keys"):
                        shape = (model.layers + 1, DROPOUT_SITES, 2)
                        keys = torch.empty(shape, dtype=torch.int64, device=device)
                        batches = [replace(each, place=replace(each.place, keys=keys)) for each in batches]
                    engine.step(batches, audit.counts.begin_pass)
                    inputs.prefetch(step + 1)
                    steps.append(audit.counts.passes)
                engine.synchronize()
    except Exception as raised:
        last = traceback.extract_tb(raised.__traceback__)[-8:]
        where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(last))
        error = f"{type(raised).__name__}: {raised} at {where}"
    # Compare the last micro-batch, because the first micro-batch creates persistent tensors.
    compared = [] if error else [steps[0][k].changed_calls(steps[1][k]) for k in (-3, -2)]
    return {
        "name": case["name"],
        "violations": [*([error] if error else []), *audit.messages],
        "ran": sorted({implementation for _, implementation in cuda_device.ran() - before}),
        "updates": audit.updates,
        "passes": [(each.phase, each.launches, each.allocations) for each in audit.counts.passes],
        "changed": sorted({name for changed in compared for name in changed}),
    }


def main() -> None:
    """Print the output line of each case that standard input has."""
    warnings.simplefilter("ignore")
    replace_cuda_runtime()
    with FakeTensorMode(), torch.no_grad():  # import and initialize common code once
        x = torch.empty(2, 8, device="cuda")
        torch.native_layer_norm(x @ x.t() + 1, (2,), None, None, 1e-5)
    for document in sys.stdin.readlines():
        # Each case runs in a child process, so that faults and caches do not affect other cases.
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        case = json.loads(document)
        exec(case["fault"], {"torch": torch})
        print(json.dumps(run(case)), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
