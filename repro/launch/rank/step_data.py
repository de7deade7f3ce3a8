"""Data of a rank's training steps: the input batches, and the series of losses, gradient norms and loss scales.

On CUDA, a separate stream copies the next batch from pinned host memory to one of two buffers on the device. The
current step reads the other buffer at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from repro.config import Layout
from repro.engines.native.model_part import MicroBatch
from repro.model.data import TokenStream
from repro.model.gpt import BatchPosition
from repro.parallel.zero.optimizer import Norms

MAX_CONSECUTIVE_SKIPPED_STEPS = 50
"""Number of consecutive skipped steps after which fp16 training counts as diverged."""


class _Prefetched(NamedTuple):
    """Batch of tokens and targets whose copy to the device has begun."""

    step: int
    batch: Tensor
    copied: torch.cuda.Event
    """CUDA event at the end of the copy to the device."""


class BatchLoader:
    """Loader of the samples that one data-parallel replica processes in each step."""

    def __init__(self, stream: TokenStream, layout: Layout, rank: int, device: torch.device):
        self._stream, self._layout, self._device = stream, layout, device
        self._first = layout.index_of("dp", rank) * layout.replica_batch
        """Index of the replica's first sample in the global batch."""
        self._copies = self._copy_stream()
        self._buffers: tuple[Tensor, ...] = ()
        """Two device buffers, for even and odd steps, of shape [2 (tokens, targets), replica_batch, seq]."""
        self._step_began: torch.cuda.Event | None = None
        """CUDA event at the start of the newest step. After this event, the buffer of the previous step is free."""
        self._prefetched: _Prefetched | None = None

    @property
    def can_prefetch(self) -> bool:
        """Return whether a batch can be copied to the device during the preceding step, which needs CUDA."""
        return self._copies is not None

    def prefetch(self, step: int) -> None:
        """Begin to copy the batch of a step to the device. Call `micro_batches` of the previous step first."""
        if self._copies is None or (self._prefetched is not None and self._prefetched.step == step):
            return
        samples = self._host_batch(step).pin_memory()
        if not self._buffers:
            self._buffers = tuple(torch.empty_like(samples, device=self._device) for _ in range(2))
            # Copies wait for this event, because kernels of the current stream may still read the buffers' memory.
            self._step_began = torch.cuda.current_stream(self._device).record_event()
        assert self._step_began is not None
        self._copies.wait_event(self._step_began)
        batch = self._buffers[step % 2]
        with torch.cuda.stream(self._copies):
            batch.copy_(samples, non_blocking=True)
        self._prefetched = _Prefetched(step, batch, self._copies.record_event())

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a training step, whose memory `prefetch(step + 2)` overwrites."""
        self.prefetch(step)
        if self._prefetched is None:
            batch = self._host_batch(step).to(self._device)
        else:
            now = torch.cuda.current_stream(self._device)
            self._step_began = now.record_event()
            now.wait_event(self._prefetched.copied)
            batch = self._prefetched.batch
        (tokens, targets), size = batch, self._layout.micro_batch
        return [
            MicroBatch(tokens[k : k + size], targets[k : k + size], BatchPosition(step, self._first + k))
            for k in range(0, self._layout.replica_batch, size)
        ]

    def _host_batch(self, step: int) -> Tensor:
        """Return the batch of a step in host memory, of shape [2 (tokens, targets), replica_batch, seq]."""
        first = step * self._layout.global_batch + self._first
        samples = self._stream.samples(first, self._layout.replica_batch)
        return torch.stack((samples[:, :-1], samples[:, 1:]))

    def _copy_stream(self) -> torch.cuda.Stream | None:
        """Return a CUDA stream for copies of batches to the device; None on the CPU."""
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None


class Diverged(FloatingPointError):
    """Exception of a training that diverges: a loss or gradient norm is not finite, or too many steps are skipped."""


@dataclass
class StepHistory:
    """Losses, gradient norms and loss scales of all steps, which `read` copies from the device to the host."""

    norms: list[Norms] = field(default_factory=list)
    """Loss, gradient norm and overflow flag of each step since the last `read`, as device tensors."""
    scales: list[Tensor] = field(default_factory=list)
    """Loss scale of each step since the last `read`, as device tensors that `read` copies to the host."""
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float | None] = field(default_factory=list)
    loss_scale: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def read(self, fp16: bool) -> None:
        """Copy new steps' losses and norms to the host.  Raises `Diverged`. `fp16`: overflowing steps are skipped."""
        if self.norms:
            shape = [torch.stack((n.loss, n.gradient, n.overflow)) for n in self.norms]
            for loss, gradient, overflow in torch.stack(shape).tolist():
                step = len(self.loss)
                if fp16 and overflow:
                    self.skipped.append(step)
                    most = MAX_CONSECUTIVE_SKIPPED_STEPS
                    if self.skipped[-most:] == list(range(step - most + 1, step + 1)):
                        raise Diverged(f"{most} steps in a row overflowed, up to step {step}")
                elif not math.isfinite(loss):
                    raise Diverged(f"loss is {loss} at step {step}")
                elif not math.isfinite(gradient):
                    raise Diverged(f"gradient norm is {gradient} at step {step}")
                self.loss.append(loss)
                self.grad_norm.append(gradient if math.isfinite(gradient) else None)
        self.loss_scale += [float(scale) for scale in self.scales]
        self.norms.clear()
        self.scales.clear()
