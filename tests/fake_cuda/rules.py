"""Requirements of CUDA operators on their operands that neither CPU operators nor `FakeTensorMode` check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

ONE_DTYPE: dict[str, tuple[int, ...]] = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "addmm": (0, 1, 2),
    "addmm_": (0, 1, 2),
    "addmv": (0, 1, 2),
    "baddbmm": (0, 1, 2),
    "baddbmm_": (0, 1, 2),
    "_scaled_dot_product_flash_attention": (0, 1, 2),
    "_scaled_dot_product_efficient_attention": (0, 1, 2),
    "native_layer_norm": (0, 2, 3),  # x, weight and bias: pytorch/pytorch#135969
    "native_layer_norm_backward": (0, 1, 5, 6),
    "gelu_backward": (0, 1),
    "scatter_add": (0, 3),
    "scatter_add_": (0, 3),
    "index_add": (0, 3),
    "index_add_": (0, 3),
    "index_copy_": (0, 3),
    "index_put": (0, 2),
    "index_put_": (0, 2),
    "lerp": (0, 1),
    "lerp_": (0, 1),
    "_fused_adamw_": (0, 1, 2, 3),
    "_foreach_lerp_": (0, 1),
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
        yield f"{name} on {' and '.join(sorted(map(_short, dtypes)))}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
