"""Generations of software: the efficiency of their kernels, each from one published point (`calibration_points.toml`).

The model of a device says what shapes, arithmetic and bandwidth allow; what a generation's kernels take
beyond that is one factor, published seconds over modelled seconds of one step on one device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from repro.config import Layout, OperatorSet
from repro.config.files import build, read_toml
from repro.config.system import System

FILE = Path(__file__).with_name("calibration_points.toml")


@dataclass(frozen=True)
class CalibrationPoint:
    """A generation of kernels on one kind of device, and the point that calibrates it."""

    name: str
    kernels: OperatorSet
    compute_capability: str
    model: str
    system: str
    micro_batch: int
    flops_per_device: float
    """Published, with the FLOPs of `repro.models.flops` including recomputation."""
    claim: str
    """What it is published as; predictions of it are no evidence."""
    source: str

    def layout(self) -> Layout:
        """One device, recomputing every layer."""
        size = self.micro_batch
        return Layout(
            micro_batch=size, global_batch=size, precision="fp16", recompute=True, kernels=self.kernels
        )


@cache
def calibration_points() -> tuple[CalibrationPoint, ...]:
    """All of them, as the file has them."""
    return tuple(build(CalibrationPoint, entry, file=FILE.name) for entry in read_toml(FILE)["generation"])


def calibration_point_of(kernels: OperatorSet, system: System) -> CalibrationPoint | None:
    """The generation of a layout's kernels on a system's device; None where no point is known.

    Megatron-LM's two generations differ by operators, which the trace shows; where one has no point on a
    device, the other's says how well the rest ran there (`unfused` on an A100, for what fusing gains).
    """
    if system.device.operators:  # what was measured needs no correction
        return None
    capability = system.device.compute_capability
    points = {
        known.kernels: known for known in calibration_points() if known.compute_capability == capability
    }
    other = {OperatorSet.UNFUSED: OperatorSet.SOFTMAX, OperatorSet.SOFTMAX: OperatorSet.UNFUSED}.get(kernels)
    return points.get(kernels) or (points.get(other) if other else None)
