"""Learning rate by steps taken: linear warm-up, then constant or cosine."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from repro.config import Training


def learning_rate(training: Training, taken: Tensor) -> Tensor:
    """Learning rate (0-dim fp32) of the step after `taken` steps (0-dim fp32, on the device).

    Skipped steps do not count as taken, so nothing here may wait for the host.
    """
    lr = torch.full_like(taken, training.lr)
    if training.schedule == "cosine":
        span = max(1, (training.decay_steps or training.steps) - training.warmup_steps)
        progress = ((taken - training.warmup_steps) / span).clamp(0.0, 1.0)
        cosine = 0.5 * (1.0 + torch.cos(progress * math.pi))
        lr = training.min_lr + (training.lr - training.min_lr) * cosine
    if training.warmup_steps:
        lr = torch.minimum(lr, training.lr * (taken + 1) / training.warmup_steps)
    return lr
