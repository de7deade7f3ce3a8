"""Copies between tensors and consecutive ranges of a flat buffer (gradient buckets, parameter shards)."""

from __future__ import annotations

import torch
from torch import Tensor

from repro.kernels.cuda import packing as cuda
from repro.kernels.library import Cost, Operand, accumulation_dtype, operator


def reference_pack(tensors: list[Tensor], flat: Tensor, scale: float = 1.0) -> None:
    """The definition, in the dtype of the arguments."""
    offset = 0
    for tensor in tensors:
        flat[offset : offset + tensor.numel()] = tensor.reshape(-1) * scale
        offset += tensor.numel()


def reference_unpack(flat: Tensor, tensors: list[Tensor], scale: float = 1.0) -> None:
    """The definition, in the dtype of the arguments."""
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view(tensor.shape) * scale)
        offset += tensor.numel()


def _ranges(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Consecutive ranges of flat in the shapes of the tensors (as one call from Python)."""
    return list(torch._utils._unflatten_dense_tensors(flat, tensors))


@torch.no_grad()
def _pack(tensors: list[Tensor], flat: Tensor, scale: float) -> None:
    _copy(tensors, _ranges(flat, tensors), scale)


@torch.no_grad()
def _unpack(flat: Tensor, tensors: list[Tensor], scale: float) -> None:
    _copy(_ranges(flat, tensors), tensors, scale)


def _copy(sources: list[Tensor], targets: list[Tensor], scale: float) -> None:
    if scale == 1.0:
        torch._foreach_copy_(targets, sources)
        return
    for source, target in zip(sources, targets, strict=True):
        # Scaled in fp32 at least and rounded once, as a 16-bit gradient of a large loss scale needs it.
        target.copy_(source.to(accumulation_dtype(source.dtype)) * scale)


def _shape(*_: object) -> None:
    return None


pack_operator = operator(
    "pack(Tensor[] tensors, Tensor(a!) flat, float scale) -> ()", _pack, _shape, cuda.pack
)
unpack_operator = operator(
    "unpack(Tensor flat, Tensor(a!)[] tensors, float scale) -> ()", _unpack, _shape, cuda.unpack
)


def _fits(flat: Tensor, tensors: list[Tensor]) -> None:
    need = sum(tensor.numel() for tensor in tensors)
    if flat.dim() != 1 or flat.numel() < need:
        raise ValueError(
            f"a 1-D buffer of at least {need} elements is needed, not one of shape {list(flat.shape)}"
        )


def pack(tensors: list[Tensor], flat: Tensor, scale: float = 1.0) -> None:
    """Copy every tensor times scale into flat, one after the other, converted to the dtype of flat.

    What flat holds beyond the last tensor (padding) stays as it is. Products are fp32 and rounded once. Raises
    ValueError when flat is too short.
    """
    _fits(flat, tensors)
    if tensors:
        pack_operator(tensors, flat, scale)


def unpack(flat: Tensor, tensors: list[Tensor], scale: float = 1.0) -> None:
    """Copy consecutive ranges of flat, times scale, into the tensors, converted to the dtype of each.

    Gradients are not recorded, so parameters may be written. Raises ValueError when flat is too short.
    """
    _fits(flat, tensors)
    if tensors:
        unpack_operator(flat, tensors, scale)


def pack_cost(tensors: list[Operand], flat: Operand, *_: object) -> Cost:
    """Copies only; the product with the scale is no work."""
    return Cost(0, sum(t.nbytes for t in tensors), sum(t.numel for t in tensors) * flat.itemsize)


def unpack_cost(flat: Operand, tensors: list[Operand], *_: object) -> Cost:
    """Copies only; the product with the scale is no work."""
    return Cost(0, sum(t.numel for t in tensors) * flat.itemsize, sum(t.nbytes for t in tensors))
