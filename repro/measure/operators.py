"""Counts of the collectives (with bytes) and of the kernels that a training engine runs in one process.

A dispatch mode sees the collectives of `torch.distributed` as operators, for any caller (Python, DDP's C++ reducer,
DTensor).  Payloads and sent bytes are defined as in `repro.parallel.ledger`; barriers and receives are not counted.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from repro.kernels import ran
from repro.parallel.ledger import SEND, CommLedger
from repro.parallel.mesh import Mesh

COMPILER = "torch._dynamo"
"""Module of torch's compiler, whose import takes longer than most traces and steps."""
_MESSAGES: dict[str, tuple[str, str]] = {
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::allgather_coalesced_": ("all_gather", "output_lists"),
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::send": (SEND, "tensors"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "result"),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "result"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "result"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::isend": (SEND, "tensor"),
}
"""Collective of each communication operator of torch, and the argument (or `result`) that holds the full message."""
_WITHOUT_PAYLOAD = {
    *("c10d::barrier", "c10d::monitored_barrier_"),
    *("c10d::recv_", "c10d::recv_any_source_", "_c10d_functional::irecv"),
}
ALL_OPERATORS = "every operator"
"""Key under which all operators are counted together if no CUDA kernels run (CPU, or `kernels = "reference"`)."""


class UncompiledMode(TorchDispatchMode):
    """Dispatch mode without torch's check for `torch.compile`, which imports the compiler and slows every operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def has_wrapper_type(types: Iterable[type]) -> bool:
    """Return whether an operator's argument types include a wrapper type such as DTensor.

    If so, a dispatch mode returns `NotImplemented`, and torch calls the mode again for the operators on local tensors.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Prevent operators on `meta` from importing torch's compiler inside the context.

    Most of torch's shape functions in Python import the compiler at their first call, which takes seconds and retains
    tensors.  A stub module replaces the compiler, unless the compiler is imported already.
    """
    if COMPILER in sys.modules:
        yield
        return
    stand_in: Any = ModuleType(COMPILER)
    stand_in.disable = lambda function, *_, **__: function
    sys.modules[COMPILER] = stand_in
    try:
        yield
    finally:
        del sys.modules[COMPILER]


class CollectiveCounter(UncompiledMode):
    """Context manager that counts the collectives of a step in a `CommLedger`.

    The ledger names a process group by the mesh group with equal ranks, or else by the list of its ranks.
    """

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.ledger = CommLedger()
        self._names = group_names(mesh)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if has_wrapper_type(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args, kwargs or {}, out)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        name = func._schema.name
        names = [argument.name for argument in func._schema.arguments]
        if not {"process_group", "group_name"} & {*names} or name in _WITHOUT_PAYLOAD:
            return
        if name not in _MESSAGES:
            raise RuntimeError(f"{name}: unknown collective. Add it and its message to _MESSAGES")
        op, message = _MESSAGES[name]
        given = {**dict(zip(names, args, strict=False)), **kwargs, "result": out}
        ranks = _ranks(given)
        payload = sum(leaf.nbytes for leaf in tree_leaves(given[message]) if isinstance(leaf, Tensor))
        if len(ranks) > 1:
            self.ledger.count(op, self._names.get(frozenset(ranks), str(ranks)), len(ranks), payload, "")


def group_names(mesh: Mesh) -> dict[frozenset[int], str]:
    """Return each process group's name by its ranks; equal groups get the first of dp, tp, pp, embedding, world."""
    groups = (mesh.world, mesh.embedding, mesh.pp, mesh.tp, mesh.dp)
    return {frozenset(group.ranks): group.name for group in groups if group.size > 1}


def _ranks(given: Mapping[str, Any]) -> list[int]:
    """Return the ranks of a collective's process group. `given`: arguments of the collective's operator."""
    group = given.get("process_group")
    if group is None:
        group = dist.distributed_c10d._resolve_process_group(given["group_name"])
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return dist.get_process_group_ranks(group)


class KernelCounter:
    """Counter of the kernels that one experiment calls, in a process that runs several experiments in turns."""

    def __init__(self, device_type: str, *, plain: bool):
        """Create a counter of kernel calls. `plain`: whether torch's operators replace the project's CUDA kernels."""
        self._otherwise = "torch: kernels = reference" if plain else f"torch: on {device_type}"
        self._calls: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the kernel calls inside the context as calls of this counter's experiment."""
        before = ran()
        try:
            yield
        finally:
            self._calls += ran() - before

    def as_dict(self) -> dict[str, list[str]]:
        """Return, for each operator, the implementations that ran: `cuda`, `torch: REASON`, or both."""
        found: dict[str, list[str]] = {}
        for name, how in sorted(self._calls):
            found.setdefault(name, []).append(how)
        return found or {ALL_OPERATORS: [self._otherwise]}
