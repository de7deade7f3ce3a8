"""Runs the tests of the bindings on a GPU: their tensors are copied there and back, each at its own alignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from repro.kernels.cuda.program import KernelLauncher, Loaded, Program


class Elsewhere:
    """Calls bindings on copies of their tensors on another device, and copies back what was written."""

    def __init__(self, launcher: KernelLauncher, device: str):
        self.launcher, self.device = launcher, device
        self.processors = launcher.processors
        self.reversed = False
        self.launched: list[str] = []

    def load(self, program: Program) -> Loaded:
        return _Noted(self.launcher.load(program), self.launched)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Whole storages travel, so that what lies around a tensor is checked too."""
        there: dict[int, tuple[Tensor, Tensor]] = {}

        def move(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                return torch.empty_like(tensor, device=self.device)
            if storage.data_ptr() not in there:
                here = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
                copy = torch.empty(here.numel(), dtype=torch.uint8, device=self.device).copy_(here)
                there[storage.data_ptr()] = here, copy
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            untouched = there[storage.data_ptr()][1].untyped_storage()
            moved = torch.empty(0, dtype=tensor.dtype, device=self.device)
            return moved.set_(untouched, *place)  # type: ignore[call-overload]

        result = function(self, *tree_map_only(Tensor, move, arguments))
        for here, copy in there.values():
            here.copy_(copy)
        return tree_map_only(Tensor, lambda tensor: tensor.cpu(), result)


class _Noted:
    """A loaded program whose launches are written down."""

    def __init__(self, loaded: Loaded, launched: list[str]):
        self._loaded, self._launched = loaded, launched

    def launch(self, kernel: str, blocks: int, arguments: bytes) -> None:
        self._loaded.launch(kernel, blocks, arguments)
        self._launched.append(kernel)
