"""What ranks tell each other once a step: which parameters any of them used, and which buffers any has changed.

A parameter that no rank used has no gradient: torch's optimizers leave it alone, weight decay included.  Buffers
that a forward pass changes (running statistics) are rank 0's after every step, as in DistributedDataParallel.
"""

from __future__ import annotations

import torch
from torch import nn

from repro.parallel.comm import MAX, Group
from repro.parallel.zero.grad_reduce import broadcast_parameters
from repro.parallel.zero.stages import ShardedModule


class StepAgreement:
    """Notes what this rank does in a step, and what all of them did."""

    def __init__(self, module: nn.Module, sharded: ShardedModule, host: Group):
        self._sharded, self._host = sharded, host
        self._children = [child for child in module.modules() if child._buffers]
        self._seen = self._states()
        self._unused: set[int] | None = None

    def _states(self) -> list[list[tuple[int, int]]]:
        """Of every module with buffers something else once one was written to or replaced.

        Not of every buffer: torch's batch norm writes its statistics unseen, and counts batches beside them.
        """
        return [
            [(id(buffer), buffer._version) for buffer in child._buffers.values() if buffer is not None]
            for child in self._children
        ]

    def passed(self) -> None:
        """A backward pass of the step is over."""
        missing = self._sharded.reducer.missing()
        self._unused = missing if self._unused is None else self._unused & missing

    def forget(self) -> None:
        """The step begins anew."""
        self._unused = None

    def reach(self) -> set[int]:
        """Share rank 0's changed buffers; returns the indices of the parameters that no rank used."""
        unused, self._unused = self._unused or set(), None
        if self._host.size == 1:
            return unused
        parameters = len(self._sharded.parameters)
        marks = [i not in unused for i in range(parameters)]
        marks += [now != seen for now, seen in zip(self._states(), self._seen, strict=True)]
        told = torch.tensor(marks, dtype=torch.uint8)
        self._host.all_reduce(told, MAX, purpose="agreement").wait()
        changed = [
            child for child, mark in zip(self._children, told[parameters:].tolist(), strict=True) if mark
        ]
        if changed:
            buffers = [b for child in changed for b in child._buffers.values() if b is not None]
            broadcast_parameters(buffers, self._sharded.sharding.group)
            self._seen = self._states()
        return {i for i in unused if not told[i]}
