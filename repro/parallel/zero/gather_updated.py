"""ZeRO stages 1 and 2, P_os and P_os+g: updated parameters reach all ranks beside the next forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from repro.parallel.comm import Work
from repro.parallel.zero.flat_buffer import Bucket
from repro.parallel.zero.partition import GatherUnit, parameters_by_unit


class UpdatedParameterGather:
    """Every rank gets the updated parameters while the next forward pass already runs.

    After the optimizer step all buckets are gathered, first layers first; a use of a unit waits for the buckets
    of its own parameters only.  (A use, not each module: some modules read a child's parameters without
    calling the child.)  Who reads parameters outside the units' uses calls `wait` first.
    """

    def __init__(self, module: nn.Module, units: Sequence[GatherUnit], buckets: Sequence[Bucket]):
        self.buckets = list(buckets)[::-1]
        self._works: dict[int, Work] = {}
        bucket_of = {id(p): b for b, bucket in enumerate(self.buckets) for p in bucket.parameters}
        modules = dict(module.named_modules())
        self._handles = []
        for unit, parameters in zip(units, parameters_by_unit(module, units), strict=True):
            of_unit = {id(p) for p in parameters if id(p) in bucket_of}
            for use in unit.uses:
                used = of_unit.intersection(map(id, modules[use.module].parameters()))
                needed = sorted({bucket_of[key] for key in used})
                self._handles.append(modules[use.module].register_forward_pre_hook(self._before(needed)))

    def start(self) -> None:
        """Begin to gather the shards of every bucket [P/n] into its parameters [P], first layers first."""
        with torch.no_grad():
            self._works = {b: bucket.gather() for b, bucket in enumerate(self.buckets)}

    def wait(self) -> None:
        """Wait for all buckets, as whoever reads parameters outside a forward pass must."""
        self._await(list(self._works))

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def _before(self, needed: list[int]) -> Callable[..., None]:
        def await_parameters(module: nn.Module, inputs: Any) -> None:
            self._await(needed)

        return await_parameters

    def _await(self, buckets: Sequence[int]) -> None:
        for b in buckets:
            work = self._works.pop(b, None)
            if work is not None:
                work.wait()
