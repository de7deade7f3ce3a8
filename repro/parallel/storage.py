"""Tensors that say what they are for.

Memory is accounted by `Category`.  The category is a mark on the storage, so that it
travels with every view, costs nothing in a step and needs no registry that outlives an experiment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from repro.config.enums import Category


def mark(tensor: Tensor, category: Category) -> Tensor:
    """`tensor`, its storage marked as being for `category`."""
    whole = tensor.untyped_storage()
    whole.category = category  # type: ignore[attr-defined]
    watcher = getattr(whole, "watcher", None)
    if watcher is not None:  # somebody follows this storage (repro.simulate)
        watcher.marked(whole, category)
    return tensor


def category_of(storage: torch.UntypedStorage) -> Category | None:
    """The mark of a storage; None for what autograd and operators allocate."""
    return getattr(storage, "category", None)


def empty(numel: int, like: Tensor, category: Category, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised flat tensor [numel] on `like`'s device, in its dtype unless another is given."""
    return mark(torch.empty(numel, dtype=dtype or like.dtype, device=like.device), category)


def zeros(numel: int, like: Tensor, category: Category, dtype: torch.dtype | None = None) -> Tensor:
    """A zeroed flat tensor [numel] on `like`'s device, in its dtype unless another is given."""
    return mark(torch.zeros(numel, dtype=dtype or like.dtype, device=like.device), category)


def empty_on_host(numel: int, like: Tensor, category: Category) -> Tensor:
    """An uninitialised flat tensor [numel] in host memory, page-locked where `like` is on a GPU.

    Where `like` has no data (`meta`), neither has the result.
    """
    device = "meta" if like.is_meta else "cpu"
    return mark(torch.empty(numel, dtype=like.dtype, device=device, pin_memory=like.is_cuda), category)


def release(tensor: Tensor) -> None:
    """Free the tensor's memory; it and its views keep their shapes and come back with `restore`."""
    _resize(tensor, 0)


def restore(tensor: Tensor) -> None:
    """Give a released tensor its memory back, contents undefined."""
    _resize(tensor, tensor.numel() * tensor.element_size())


def _resize(tensor: Tensor, size: int) -> None:
    """Resize the tensor's storage and tell whoever follows it (`watcher`): no operator does it."""
    whole = tensor.untyped_storage()
    if whole.nbytes() != size:
        whole.resize_(size)
        watcher = getattr(whole, "watcher", None)
        if watcher is not None:
            watcher.resized(whole, size)


def is_released(tensor: Tensor) -> bool:
    """Whether `release` freed the memory."""
    return tensor.untyped_storage().nbytes() == 0
