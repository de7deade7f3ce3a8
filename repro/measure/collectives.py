"""What any engine communicates, counted from outside: every c10d operator that a process issues.

Collectives of `torch.distributed` are operators like others, whoever calls them (Python, DDP's C++ reducer, DTensor's
functional collectives), and a dispatch mode sees them with their tensors and process group.  An engine is not
asked.  Payloads and sent bytes are those of `repro.parallel.ledger`; barriers and receipts count nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from repro.measure.uncompiled import UncompiledMode, wrapped
from repro.parallel.ledger import SEND, CommLedger
from repro.parallel.mesh import Mesh

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
"""Operator -> what it is called here, and which of its arguments (or its result) is the whole message."""
_NOTHING_SENT = {
    *("c10d::barrier", "c10d::monitored_barrier_"),
    *("c10d::recv_", "c10d::recv_any_source_", "_c10d_functional::irecv"),
}


class CollectiveWatch(UncompiledMode):
    """Use as a context manager around a step.  Groups are named as the mesh has them, others by their ranks."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.ledger = CommLedger()
        self._names = names(mesh)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if wrapped(types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args, kwargs or {}, out)
        return out

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        name = func._schema.name
        of_group = any(
            argument.name in ("process_group", "group_name") for argument in func._schema.arguments
        )
        if not of_group or name in _NOTHING_SENT:
            return
        if name not in _MESSAGES:
            raise RuntimeError(f"{name}: a collective of which _MESSAGES does not say what it sends")
        op, message = _MESSAGES[name]
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | {
            **kwargs,
            "result": out,
        }
        ranks = _ranks(given)
        payload = sum(leaf.nbytes for leaf in tree_leaves(given[message]) if isinstance(leaf, Tensor))
        if len(ranks) > 1:
            self.ledger.count(op, self._names.get(frozenset(ranks), str(ranks)), len(ranks), payload, "")


def names(mesh: Mesh) -> dict[frozenset[int], str]:
    """What groups of ranks are called; where two of the mesh are the same ranks: dp, then tp, pp, embedding, world."""
    groups = (mesh.world, mesh.embedding, mesh.pp, mesh.tp, mesh.dp)
    return {frozenset(group.ranks): group.name for group in groups if group.size > 1}


def _ranks(given: Mapping[str, Any]) -> list[int]:
    """Of the collective's process group."""
    group = given.get("process_group")
    if group is None:
        group = dist.distributed_c10d._resolve_process_group(given["group_name"])
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return dist.get_process_group_ranks(group)
