"""Number formats of a step, and dynamic loss scaling.

The scaler follows the rules of the 2019-2021 codes: the scale starts at 2^16, an overflow anywhere makes
all ranks skip the step, the scale halves when `hysteresis` overflows have come and doubles after
`window` steps without one.  All of its state is on the device: no decision waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LossScaler:
    """Dynamic loss scale as 0-dim fp32 tensors."""

    def __init__(
        self, initial: float, window: int, hysteresis: int, device: torch.device, floor: float = 1.0
    ):
        def scalar(value: float) -> Tensor:
            return torch.tensor(value, dtype=torch.float32, device=device)

        self.scale, self.floor = scalar(initial), floor
        self.window, self.hysteresis = window, hysteresis
        self.good_steps, self.tolerance = scalar(0.0), scalar(float(hysteresis))

    def update(self, overflow: Tensor) -> None:
        """Take one step's outcome into account; `overflow` is 1 or 0 (0-dim fp32), equal on all ranks."""
        self.tolerance.sub_(overflow)
        self.good_steps.add_(1).mul_(1 - overflow)
        halve = (overflow > 0) & (self.tolerance <= 0)
        double = self.good_steps >= self.window
        self.scale.mul_(torch.where(halve, 0.5, 1.0) * torch.where(double, 2.0, 1.0)).clamp_(min=self.floor)
        self.good_steps.mul_(torch.where(double, 0.0, 1.0))
        self.tolerance.copy_(torch.where(double, float(self.hysteresis), self.tolerance))
