"""Generations of software: the efficiency of their kernels, each from one published point (`calibration_points.toml`).

The model of a device says what shapes, arithmetic and bandwidth allow; what a generation's kernels take
beyond that is one factor, published seconds over modelled seconds of one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from repro.config import Experiment, Layout, Model, OperatorSet, Training
from repro.config.files import build, read_toml
from repro.config.quantity import Quantity
from repro.config.system import System
from repro.config.systems.unknowns import Unknown, unknown

ALIKE = Quantity(
    value=1,
    low=0,
    source="a published rate is of all kernels together: products are as far from the model of their device as "
    "the others (assumed); low: a product takes what it takes alone, and the others all that is left (assumed)",
)
STREAMING = Quantity(
    value=1,
    high=1.31,
    source="as kernels that scale a vector (te42kyfo/gpu-benches, docs/time.md), where this software's were not "
    "measured; high: those of Megatron-LM on an A100, if Adam's are as slow as copies",
)
FILE = Path(__file__).with_name("calibration_points.toml")


@dataclass(frozen=True)
class CalibrationPoint:
    """A generation of kernels on one kind of device, and the point that calibrates it."""

    name: str
    compute_capability: str
    model: str
    system: str
    layout: Layout
    """Of one device, or of one node."""
    flops_per_device: float
    """Published, with the FLOPs of `repro.model.flops` including recomputation."""
    claim: str
    """What it is published as; predictions of it are no evidence."""
    source: str
    low: float | None = None
    """The least that flops_per_device may be, where `source` says why."""
    high: float | None = None
    """The most."""
    dropout: float = 0.0
    """Of hidden states and of attention weights."""
    products: Quantity = ALIKE
    """What matrix products take beyond the model, over what other kernels do, each of its own seconds; 0: they take
    what they take alone."""
    passes: Quantity = STREAMING
    """Seconds of passes over parameters and gradients over what their bytes ask for; measured, not from the point."""
    operator_s: Quantity | None = None
    """Seconds of the host for an operator of a layer, its modules and their backward passes included; None: the
    `launch_s` of the device."""
    attention: Quantity | None = None
    """FLOP/s of its fused attention among endlessly many keys, of what a causal mask leaves, forward and backward;
    None: nobody measured it by itself."""
    attention_start: float = 0.0
    """Keys among which it reaches half of that."""
    card: str = ""
    """What its device's name begins with, where cards of one capability have a point each; empty: every other."""
    note: str = ""
    """What of the software no operator of the trace stands for: the factor holds it."""

    @property
    def rate(self) -> Unknown:
        """`flops_per_device`, and what else it may be."""
        number = Quantity(value=self.flops_per_device, low=self.low, high=self.high, source=self.source)
        return unknown(f"{self.name}: FLOP/s", number)

    @property
    def products_share(self) -> Unknown:
        """`products`."""
        return unknown(f"{self.name}: products", self.products)

    @property
    def passes_time(self) -> Unknown:
        """`passes`."""
        return unknown(f"{self.name}: passes", self.passes)

    @property
    def operator_time(self) -> Unknown | None:
        """`operator_s`."""
        return unknown(f"{self.name}: operator_s", self.operator_s) if self.operator_s is not None else None

    @property
    def attention_rate(self) -> Unknown | None:
        """`attention`."""
        return unknown(f"{self.name}: attention", self.attention) if self.attention is not None else None

    @property
    def unknowns(self) -> tuple[Unknown, ...]:
        """All numbers of it that may be others."""
        found = (self.rate, self.products_share, self.passes_time, self.operator_time, self.attention_rate)
        return tuple(one for one in found if one is not None and one.low < one.high)

    def experiment(self, model: Model) -> Experiment:
        """The published run, of `model` in place of the whole one."""
        training = Training(dropout=self.dropout, attention_dropout=self.dropout)
        return Experiment(
            name="calibration", model=model, layout=self.layout, training=training, system=self.system
        )


@cache
def calibration_points() -> tuple[CalibrationPoint, ...]:
    """All of them, as the file has them, those of one card last: the last that fits a device holds."""
    found = [build(CalibrationPoint, entry, file=FILE.name) for entry in read_toml(FILE)["generation"]]
    return tuple(sorted(found, key=lambda point: len(point.card)))


def calibration_point_of(kernels: OperatorSet, system: System) -> CalibrationPoint | None:
    """The generation of a layout's kernels on a system's device, by its card if one is; None where no point is known.

    Megatron-LM's two generations differ by operators, which the trace shows; where one has no point on a
    device, the other's says how well the rest ran there (`unfused` on an A100, for what fusing gains).
    """
    if system.device.operators:  # what was measured needs no correction
        return None
    device = system.device
    points = {
        known.layout.kernels: known
        for known in calibration_points()
        if known.compute_capability == device.compute_capability and device.name.startswith(known.card)
    }
    other = {OperatorSet.UNFUSED: OperatorSet.SOFTMAX, OperatorSet.SOFTMAX: OperatorSet.UNFUSED}.get(kernels)
    return points.get(kernels) or (points.get(other) if other else None)
