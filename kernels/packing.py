"""Copies between tensors and consecutive ranges of a flat buffer (gradient buckets, parameter shards)."""

from __future__ import annotations

import torch
from torch import Tensor

from repro.kernels.cuda import packing as cuda
from repro.kernels.cuda.dispatch import use
from repro.kernels.library import Cost, Operand, operator


def reference_pack(tensors: list[Tensor], flat: Tensor) -> None:
    """The definition."""
    offset = 0
    for tensor in tensors:
        flat[offset : offset + tensor.numel()] = tensor.reshape(-1)
        offset += tensor.numel()


def reference_unpack(flat: Tensor, tensors: list[Tensor]) -> None:
    """The definition."""
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()


def _ranges(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Consecutive ranges of flat in the shapes of the tensors (as one call from Python)."""
    return list(torch._utils._unflatten_dense_tensors(flat, tensors))


@torch.no_grad()
def _pack(tensors: list[Tensor], flat: Tensor) -> None:
    torch._foreach_copy_(_ranges(flat, tensors), tensors)


@torch.no_grad()
def _unpack(flat: Tensor, tensors: list[Tensor]) -> None:
    torch._foreach_copy_(tensors, _ranges(flat, tensors))


def _shape(*_: object) -> None:
    return None


pack_operator = operator("pack(Tensor[] tensors, Tensor(a!) flat) -> ()", _pack, _shape)
unpack_operator = operator("unpack(Tensor flat, Tensor(a!)[] tensors) -> ()", _unpack, _shape)
use("pack", cuda.pack, _pack)
use("unpack", cuda.unpack, _unpack)


def _fits(flat: Tensor, tensors: list[Tensor]) -> None:
    need = sum(tensor.numel() for tensor in tensors)
    if flat.dim() != 1 or flat.numel() < need:
        raise ValueError(
            f"a 1-D buffer of at least {need} elements is needed, not one of shape {list(flat.shape)}"
        )


def pack(tensors: list[Tensor], flat: Tensor) -> None:
    """Copy every tensor into flat, one after the other, converted to the dtype of flat.

    What flat holds beyond the last tensor (padding) stays as it is. Raises ValueError when flat is too short.
    """
    _fits(flat, tensors)
    if tensors:
        pack_operator(tensors, flat)


def unpack(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy consecutive ranges of flat into the tensors, converted to the dtype of each.

    Gradients are not recorded, so parameters may be written. Raises ValueError when flat is too short.
    """
    _fits(flat, tensors)
    if tensors:
        unpack_operator(flat, tensors)


def pack_cost(tensors: list[Operand], flat: Operand) -> Cost:
    """Copies only."""
    return Cost(0, sum(t.nbytes for t in tensors), sum(t.numel for t in tensors) * flat.itemsize)


def unpack_cost(flat: Operand, tensors: list[Operand]) -> Cost:
    """Copies only."""
    return Cost(0, sum(t.numel for t in tensors) * flat.itemsize, sum(t.nbytes for t in tensors))
