"""A replica's tokens and targets, step by step, on the device: on CUDA copied while the step before computes.

They go from page-locked memory to one of two places, on a stream of their own: the copy runs beside the step that reads
the other place, and the host waits for nothing.  Every engine gets them so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from repro.config import Layout
from repro.engines.native.part import MicroBatch
from repro.model.data import TokenStream
from repro.model.gpt import BatchPosition


class _Ahead(NamedTuple):
    """A step's tokens and targets that are on their way to the device."""

    step: int
    both: Tensor
    there: torch.cuda.Event


class Inputs:
    """Of the samples of every step's global batch those of one rank's replica."""

    def __init__(self, stream: TokenStream, layout: Layout, rank: int, device: torch.device):
        self._stream, self._layout, self._device = stream, layout, device
        self._first = layout.index_of("dp", rank) * layout.replica_batch
        """Number, within the global batch, of the replica's first sample."""
        self._copies = self._side()
        self._places: tuple[Tensor, ...] = ()
        """On the device [2, replica_batch, seq] each: even steps read the first, odd ones the second."""
        self._begun: torch.cuda.Event | None = None
        """When the newest step began, and the one before it had been read."""
        self._ahead: _Ahead | None = None

    @property
    def early(self) -> bool:
        """Whether there is anything to gain by `fetch`."""
        return self._copies is not None

    def fetch(self, step: int) -> None:
        """Make a step's samples and begin to copy them: once `of` has handed out the step before."""
        if self._copies is None or (self._ahead is not None and self._ahead.step == step):
            return
        made = self._made(step).pin_memory()
        if not self._places:
            self._places = tuple(torch.empty_like(made, device=self._device) for _ in range(2))
            now = torch.cuda.current_stream(self._device)
            self._begun = now.record_event()  # whatever had this memory is over by then
        assert self._begun is not None
        self._copies.wait_event(self._begun)
        both = self._places[step % 2]
        with torch.cuda.stream(self._copies):
            both.copy_(made, non_blocking=True)
        self._ahead = _Ahead(step, both, self._copies.record_event())

    def of(self, step: int) -> list[MicroBatch]:
        """The step's micro-batches, valid until `fetch` of the step after the next."""
        self.fetch(step)
        if self._ahead is None:
            both = self._made(step).to(self._device)
        else:
            now = torch.cuda.current_stream(self._device)
            self._begun = now.record_event()
            now.wait_event(self._ahead.there)
            both = self._ahead.both
        (tokens, targets), size = both, self._layout.micro_batch
        return [
            MicroBatch(tokens[k : k + size], targets[k : k + size], BatchPosition(step, self._first + k))
            for k in range(0, self._layout.replica_batch, size)
        ]

    def _made(self, step: int) -> Tensor:
        """Tokens and targets on the host, [2, replica_batch, seq]."""
        first = step * self._layout.global_batch + self._first
        samples = self._stream.samples(first, self._layout.replica_batch)
        return torch.stack((samples[:, :-1], samples[:, 1:]))

    def _side(self) -> torch.cuda.Stream | None:
        """The stream of the copies; None where there are no streams."""
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
