"""The step on fake tensors of the device "cuda": `python -m tests.fake_cuda.audit RUNTIME.so`, a process of its own.

Reads cases as JSON lines {"name", "layout", "model", "training", "kernels", "fault"} and answers each with a line
{"name", "broken", "ran", "updates", "passes", "told"}: what CUDA would refuse, what computed each operator
(`repro.kernels.ran`), how often torch's AdamW was called, what the last step asked of the device (`counts.Pass`), and
the operators of a pass to which the host told something else than in the step before.  The operators of `repro::` run
as on a GPU, down to the launch, by the bindings; or, where "kernels" is false, as on one without NVRTC.  "fault" is
Python that runs first.  With "device_keys" the keys of dropouts are in device memory, as for captured passes.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    ctypes.CDLL(sys.argv[1]).install()  # before torch asks whether there is a runtime

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OPERATORS: dict[str, Callable[..., Any]] = {}
"""Name in `repro::` -> what CUDA tensors get."""


def _import_kernels() -> None:
    """Import `repro.kernels`, noting what it registers for CUDA."""
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
from repro.parallel.transports import NoTransport, Work  # noqa: E402
from repro.simulate.trace.recorder import innermost_line  # noqa: E402
from tests.fake_cuda.counts import Counts  # noqa: E402
from tests.fake_cuda.rules import broken  # noqa: E402
from tests.training import TINY, tiny  # noqa: E402

line = innermost_line(("repro",))


class Nothing:
    """A GPU whose launches do nothing."""

    processors = 132

    def __init__(self, counts: Counts):
        self.counts, self.source = counts, ""

    def load(self, program: Program) -> Nothing:
        found = Nothing(self.counts)
        found.source = program.source
        return found

    def launch(self, kernel: str, blocks: int, arguments: bytes) -> None:
        assert blocks > 0
        self.counts.kernel(f"{self.source}.{kernel}", (blocks, arguments))


def _no_nvrtc(index: int) -> Any:
    raise Unavailable("no NVRTC")


class Checked(NoTransport):
    """NCCL's demands of a message."""

    def __init__(self, found: Counter[str]):
        self.found = found

    def _look(self, *tensors: Tensor) -> None:
        for t in tensors:
            if t.device.type != "cuda" or not t.is_contiguous():
                self.found[f"a message on {t.device.type}, contiguous: {t.is_contiguous()}"] += 1
        if len({t.dtype for t in tensors}) > 1:
            self.found["a message of two dtypes"] += 1

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        self._look(tensor)
        return super().all_reduce(tensor, op)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        self._look(output, input)
        return super().reduce_scatter(output, input)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        self._look(output, input)
        return super().all_gather(output, input)

    def broadcast(self, tensor: Tensor, source: int) -> Work:
        self._look(tensor)
        return super().broadcast(tensor, source)

    def send(self, tensor: Tensor, to: int, channel: int) -> Work:
        self._look(tensor)
        return super().send(tensor, to, channel)

    def receive(self, tensor: Tensor, source: int, channel: int) -> Work:
        self._look(tensor)
        return super().receive(tensor, source, channel)


class Audit(TorchDispatchMode):
    """Notes what CUDA would refuse of every call that reaches an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.updates = 0
        """Calls of torch's AdamW."""
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        if space == "repro":
            with self:
                return OPERATORS[name](*args, **kwargs)
        for reason in broken(name, args, kwargs):
            self.found[f"{reason} in {line()}"] += 1
        self.updates += name == "_fused_adamw_"
        try:
            made = NO_FAKE.get(name, func)(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(f"{name} in {line()}: {error}") from error
        self.counts.operator(func, tree_leaves((args, kwargs)), tree_leaves(made))
        return made


NO_FAKE: dict[str, Callable[..., Any]] = {
    "_foreach_norm": lambda tensors, ord=2, dtype=None: [
        t.new_empty((), dtype=dtype or t.dtype) for t in tensors
    ],
    "_fused_adamw_": lambda *_, **__: None,
}
"""Operators whose results `FakeTensorMode` does not know without a runtime."""


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False, enable_gqa: bool = False
) -> Tensor:
    """torch's choice on a GPU, which one built without CUDA cannot make; without a mask always a causal one."""
    is_causal = attn_mask is None
    if is_causal and q.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=is_causal)[0]  # type: ignore[no-any-return]
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    bias = None if attn_mask is None else attn_mask.expand(q.shape[0], -1, -1, -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias, True, is_causal=is_causal)[0]  # type: ignore[no-any-return]


class _Stream:
    """torch's streams and events, of which there is one."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: _Stream()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def stand_in() -> None:
    """Replace what needs a runtime: torch.cuda's own Python, pinned memory, and addresses."""
    for name in ("Stream", "Event", "current_stream", "stream", "synchronize"):
        setattr(torch.cuda, name, _Stream)
    FakeTensor.data_ptr = lambda self: 4096  # type: ignore[method-assign]
    FakeTensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    pinned: dict[int, Tensor] = {}
    FakeTensor.is_pinned = lambda self, *_: self.untyped_storage()._cdata in pinned  # type: ignore[method-assign]
    make = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        found = make(*size, **options)
        if pin_memory:
            pinned[found.untyped_storage()._cdata] = found
        return found

    def pin_memory(self: Tensor) -> Tensor:
        assert self.device.type == "cpu"
        return torch.empty(self.shape, dtype=self.dtype, pin_memory=True)

    torch.empty = empty  # type: ignore[assignment]
    torch.nn.functional.scaled_dot_product_attention = _attention
    bias = ModuleType(
        "torch.nn.attention.bias"
    )  # torch's own is a subclass of tensors, which fake ones cannot be
    bias.causal_lower_right = lambda queries, keys: None  # type: ignore[attr-defined]
    sys.modules[bias.__name__] = bias
    FakeTensor.pin_memory = pin_memory  # type: ignore[method-assign]
    split_parameter = tensor.split_parameter

    def really_on_meta(*arguments: Any, **options: Any) -> Any:
        # A fake parameter keeps its device among the attributes, which the one that replaces it takes over.
        with unset_fake_temporarily():
            return split_parameter(*arguments, **options)

    tensor.split_parameter = really_on_meta


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One step of the case, and what is wrong with it."""
    layout, model = Layout(**case["layout"]), replace(TINY, **case["model"])
    assert isinstance(model, Model)
    training: dict[str, Any] = {"dropout": 0.1, **case["training"]}
    assert set(training) <= set(Training.__dataclass_fields__)
    experiment = tiny(layout, model, **training)
    audit, before = Audit(), cuda_device.ran()
    cuda_device.cuda_launcher = _no_nvrtc if not case["kernels"] else lambda index: Nothing(audit.counts)  # type: ignore[assignment]
    device = torch.device("cuda")
    error = ""
    try:
        with FakeTensorMode(), audit:
            for rank in sorted({layout.group_of("pp", 0)[stage] for stage in (0, layout.pp - 1)}):
                mesh = meshes.build_mesh(layout, rank, lambda ranks: Checked(audit.found))
                engine = NativeEngine(experiment, mesh, device)
                inputs = BatchLoader(open_stream(experiment.training, model), layout, rank, device)
                steps = []
                for step in range(2):
                    audit.counts.passes = []
                    audit.counts.begins("input")
                    batches = inputs.micro_batches(step)
                    if case.get("device_keys"):
                        keys = torch.empty(
                            model.layers + 1, DROPOUT_SITES, 2, dtype=torch.int64, device=device
                        )
                        places = [replace(batch.place, keys=keys) for batch in batches]
                        batches = [
                            replace(batch, place=place) for batch, place in zip(batches, places, strict=True)
                        ]
                    engine.step(batches, audit.counts.begins)
                    inputs.prefetch(step + 1)
                    steps.append(audit.counts.passes)
                engine.synchronize()
    except Exception as raised:
        last = traceback.extract_tb(raised.__traceback__)[-8:]
        where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(last))
        error = f"{type(raised).__name__}: {raised} at {where}"
    found = [*([error] if error else []), *audit.found]
    ran = sorted({how for _, how in cuda_device.ran() - before})
    # What is made once is made in the first micro-batch.
    told = {name for k in (-3, -2) for name in steps[0][k].differs(steps[1][k])} if not error else set()
    return {
        "name": case["name"],
        "broken": found,
        "ran": ran,
        "updates": audit.updates,
        "passes": [(each.phase, each.launches, each.allocations) for each in audit.counts.passes],
        "told": sorted(told),
    }


def main() -> None:
    """Answer every case."""
    warnings.simplefilter("ignore")
    stand_in()
    with FakeTensorMode(), torch.no_grad():  # import and build once what all cases need
        x = torch.empty(2, 8, device="cuda")
        torch.native_layer_norm(x @ x.t() + 1, (2,), None, None, 1e-5)
    for asked in sys.stdin.readlines():
        # A child each, so that no fault and no cache of one case is seen by the next.
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        case = json.loads(asked)
        exec(case["fault"], {"torch": torch})
        print(json.dumps(run(case)), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
