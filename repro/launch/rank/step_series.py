"""What every step leaves behind: losses, norms and loss scales, and the end of a run that diverges."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from repro.parallel.zero.optimizer import Norms

MAX_CONSECUTIVE_SKIPPED_STEPS = 50
"""Consecutive skipped steps after which fp16 training counts as diverged."""


class Diverged(FloatingPointError):
    """The loss is no longer a number."""


@dataclass
class StepSeries:
    """What every step leaves behind: device tensors until they are read."""

    norms: list[Norms] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float | None] = field(default_factory=list)
    loss_scale: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)

    def read(self, fp16: bool) -> None:
        """Bring what has accumulated to the host; raises `Diverged`."""
        if self.norms:
            shape = [torch.stack((n.loss, n.gradient, n.overflow)) for n in self.norms]
            for loss, gradient, overflow in torch.stack(shape).tolist():
                step = len(self.loss)
                if fp16 and overflow:
                    self.skipped.append(step)
                    if self.skipped[-MAX_CONSECUTIVE_SKIPPED_STEPS:] == list(
                        range(step - MAX_CONSECUTIVE_SKIPPED_STEPS + 1, step + 1)
                    ):
                        raise Diverged(
                            f"{MAX_CONSECUTIVE_SKIPPED_STEPS} steps in a row overflowed, up to step {step}"
                        )
                elif not math.isfinite(loss) or not math.isfinite(gradient):
                    what = "loss" if not math.isfinite(loss) else "gradient norm"
                    value = loss if what == "loss" else gradient
                    raise Diverged(f"{what} is {value} at step {step}")
                self.loss.append(loss)
                self.grad_norm.append(gradient if math.isfinite(gradient) else None)
        self.loss_scale += [float(scale) for scale in self.scales]
        self.norms.clear()
        self.scales.clear()
