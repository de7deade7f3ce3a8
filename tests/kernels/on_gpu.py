"""A launcher that tests bindings on a GPU: tensors are copied to the GPU and back, with their alignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from repro.kernels.cuda.program import KernelLauncher, Loaded, Program


class GpuHost:
    """Launcher that calls bindings on copies of their tensors on another device, and copies the results back."""

    def __init__(self, launcher: KernelLauncher, device: str):
        self.launcher, self.device = launcher, device
        self.processors = launcher.processors
        self.reversed = False
        self.launched: list[str] = []

    def load(self, program: Program) -> Loaded:
        return _LoggedProgram(self.launcher.load(program), self.launched)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a binding on copies of complete storages, so that tests can check the memory around a tensor."""
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def move(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                return torch.empty_like(tensor, device=self.device)
            if storage.data_ptr() not in copies:
                original = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
                copy = torch.empty(original.numel(), dtype=torch.uint8, device=self.device).copy_(original)
                copies[storage.data_ptr()] = original, copy
            geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
            target = copies[storage.data_ptr()][1].untyped_storage()
            moved = torch.empty(0, dtype=tensor.dtype, device=self.device)
            return moved.set_(target, *geometry)  # type: ignore[call-overload]

        result = function(self, *tree_map_only(Tensor, move, arguments))
        for original, copy in copies.values():
            original.copy_(copy)
        return tree_map_only(Tensor, lambda tensor: tensor.cpu(), result)


class _LoggedProgram:
    """A loaded program that logs its launches."""

    def __init__(self, loaded: Loaded, launched: list[str]):
        self._loaded, self._launched = loaded, launched

    def launch(self, kernel: str, blocks: int, arguments: bytes) -> None:
        self._loaded.launch(kernel, blocks, arguments)
        self._launched.append(kernel)
