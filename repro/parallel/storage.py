"""Storages of tensors: dtype, memory category, allocation and release.

The memory `Category` is an attribute of the storage, so that all views of a storage share the category.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from repro.config.enums import Category

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Data type of torch for each precision of a layout."""
META = torch.device("meta")


def unobserved(device: torch.device = META) -> AbstractContextManager[None]:
    """Return a context in which a simulation does not record operators on `meta` tensors, such as views."""
    return torch._C._DisableTorchDispatch() if device.type == META.type else nullcontext()  # type: ignore[no-any-return]


def observer_of(tensor: Tensor) -> Any:
    """Return the object of a simulation that records events of the tensor's storage; None outside a simulation."""
    return getattr(tensor.untyped_storage(), "watcher", None)


def is_on_processors(tensor: Tensor) -> bool:
    """Return whether the tensor is on a CPU, or on `meta` in the simulation of a CPU."""
    return tensor.is_cpu or getattr(observer_of(tensor), "on_processors", False)


def call_once(like: Tensor, key: Hashable, call: Callable[[], None]) -> None:
    """Run `call`; a simulation instead repeats the recorded operators of an earlier call with an equal `key`.

    `call` may run operators, and must free all storages that it allocates. `like`: tensor on the device of the call.
    """
    repeat = getattr(observer_of(like), "call_once", None) if like.is_meta else None
    if repeat is None:
        call()
    else:
        repeat(key, call)


def mark(tensor: Tensor, category: Category) -> Tensor:
    """Set the memory category of the tensor's storage, and return the tensor."""
    storage = tensor.untyped_storage()
    storage.category = category  # type: ignore[attr-defined]
    if (observer := observer_of(tensor)) is not None:
        observer.marked(storage, category)
    return tensor


def category_of(storage: torch.UntypedStorage) -> Category | None:
    """Return the memory category of a storage; None for allocations of autograd and operators."""
    return getattr(storage, "category", None)


def empty(numel: int, like: Tensor, category: Category, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised flat tensor [numel] on the device of `like`, by default in the dtype of `like`."""
    return mark(torch.empty(numel, dtype=dtype or like.dtype, device=like.device), category)


def zeros(numel: int, like: Tensor, category: Category, dtype: torch.dtype | None = None) -> Tensor:
    """Return a zeroed flat tensor [numel] on the device of `like`, by default in the dtype of `like`."""
    return mark(torch.zeros(numel, dtype=dtype or like.dtype, device=like.device), category)


def empty_on_host(numel: int, like: Tensor, category: Category) -> Tensor:
    """Return an uninitialised flat tensor [numel] in host memory, page-locked if `like` is on a GPU.

    If `like` has no data (`meta`), the result has no data.
    """
    device = "meta" if like.is_meta else "cpu"
    return mark(torch.empty(numel, dtype=like.dtype, device=device, pin_memory=like.is_cuda), category)


def release(tensor: Tensor) -> None:
    """Free the tensor's memory. The tensor and its views retain their shapes, and `restore` reallocates the memory."""
    _resize(tensor, 0)


def restore(tensor: Tensor) -> None:
    """Reallocate the memory of a released tensor; the values are undefined."""
    _resize(tensor, tensor.numel() * tensor.element_size())


def _resize(tensor: Tensor, size: int) -> None:
    """Resize the tensor's storage to `size` bytes. Notify the simulation, which otherwise observes only operators."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != size:
        storage.resize_(size)
        if (observer := observer_of(tensor)) is not None:
            observer.resized(storage, size)


def is_released(tensor: Tensor) -> bool:
    """Return whether the memory of the tensor has been freed by `release`."""
    return tensor.untyped_storage().nbytes() == 0
