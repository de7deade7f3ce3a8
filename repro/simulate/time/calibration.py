"""Calibration points of software generations, their unknowns, and the basis of a predicted time.

The device model gives the time that shapes, arithmetic and bandwidth allow. A calibration point gives one factor for a
generation's kernels: published seconds over modelled seconds of one step (`calibration_points.toml`). This module does
not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from repro.config import Experiment, Layout, Model, OperatorSet, Training
from repro.config.errors import ConfigError
from repro.config.files import build_dataclass, read_toml
from repro.config.quantity import Quantity
from repro.config.system import System
from repro.config.systems.unknowns import Unknown, make_unknown, unknowns
from repro.measure.local_system import load_system
from repro.results.metrics import STEP_SECONDS
from repro.results.schema import SIMULATED, ExperimentRecord

EQUAL_PRODUCTS_SHARE = Quantity(
    value=1,
    low=0,
    source="a published rate is of all kernels together: products are as far from the model of their device as "
    "the others (assumed); low: a product takes what it takes alone, and the others all that is left (assumed)",
)
DEFAULT_PASSES = Quantity(
    value=1,
    high=1.31,
    source="as kernels that scale a vector (te42kyfo/gpu-benches, docs/time.md), where this software's were not "
    "measured; high: those of Megatron-LM on an A100, if Adam's are as slow as copies",
)
CALIBRATION_FILE = Path(__file__).with_name("calibration_points.toml")


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
    """Published, with the FLOPs of `repro.model.counts` including recomputation."""
    claim: str
    """What it is published as; predictions of it are no evidence."""
    source: str
    low: float | None = None
    """The least that flops_per_device may be, where `source` says why."""
    high: float | None = None
    """The most."""
    dropout: float = 0.0
    """Of hidden states and of attention weights."""
    products: Quantity = EQUAL_PRODUCTS_SHARE
    """What matrix products take beyond the model, over what other kernels do, each of its own seconds; 0: they take
    what they take alone."""
    passes: Quantity = DEFAULT_PASSES
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
        return make_unknown(f"{self.name}: FLOP/s", number)

    @property
    def products_share(self) -> Unknown:
        """`products`."""
        return make_unknown(f"{self.name}: products", self.products)

    @property
    def passes_time(self) -> Unknown:
        """`passes`."""
        return make_unknown(f"{self.name}: passes", self.passes)

    @property
    def operator_time(self) -> Unknown | None:
        """`operator_s`."""
        return (
            make_unknown(f"{self.name}: operator_s", self.operator_s) if self.operator_s is not None else None
        )

    @property
    def attention_rate(self) -> Unknown | None:
        """`attention`."""
        return make_unknown(f"{self.name}: attention", self.attention) if self.attention is not None else None

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
    found = [
        build_dataclass(CalibrationPoint, entry, file=CALIBRATION_FILE.name)
        for entry in read_toml(CALIBRATION_FILE)["generation"]
    ]
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


TIMING_KEY_PREFIXES = ("device.", "links.")
"""Beginnings of the keys that time depends on."""
UNCALIBRATED_KERNELS = make_unknown(
    "kernels",
    Quantity(
        value=1,
        low=0.99,
        high=1.6,
        source="no run calibrates these kernels on this device, and they take what shapes and bandwidth allow; low: "
        "the least that one of the generations takes which a published point calibrates; high: the most",
    ),
)
"""Seconds of kernels without a published point over the modelled ones."""


def uncertain_numbers(system: System, generation: CalibrationPoint | None) -> list[Unknown]:
    """What the time of a step on `system` depends on and nobody knows for certain."""
    found = [one for one in unknowns(system) if one.key.startswith(TIMING_KEY_PREFIXES)]
    if system.device.operators:
        return found
    return [*found, *((UNCALIBRATED_KERNELS,) if generation is None else generation.unknowns)]


CALIBRATED = "calibrated"
PUBLISHED_POINT = "published point"
UPPER_BOUND = "upper bound"
BASES = {
    CALIBRATED: "operators and messages as `repro calibrate` measured them on such a machine",
    PUBLISHED_POINT: "kernels as much slower than shapes and bandwidth allow as in one published run of one GPU "
    "or node",
    UPPER_BOUND: "no run calibrates these kernels on this device; they take what shapes and bandwidth allow, and real "
    "ones take longer: a rate at most, a time and a cost at least",
}
"""What each of them means, the firmest first."""
BASIS_LABELS = {CALIBRATED: "calibrated", PUBLISHED_POINT: "published", UPPER_BOUND: "bound", "": "–"}
"""One word each, for a column; of what is not predicted, nothing."""


def prediction_basis(kernels: OperatorSet, system: System) -> str:
    """Which of `BASES` a prediction with these kernels on `system` has."""
    if system.device.operators:
        return CALIBRATED
    return UPPER_BOUND if calibration_point_of(kernels, system) is None else PUBLISHED_POINT


def describe_basis(kernels: OperatorSet, system: System) -> str:
    """`rests_on` for people: what it means, and the published point with its source and what the trace lacks of it."""
    basis = prediction_basis(kernels, system)
    point = calibration_point_of(kernels, system)
    if point is None:
        return f"{basis}; {BASES[basis]}"
    note = f"; {point.note}" if point.note else ""
    return f"{basis}; {BASES[basis]}: {point.name} ({point.source}){note}"


def basis_of_record(record: ExperimentRecord) -> str:
    """`rests_on` of a record's predicted speed; empty where it has none, or where the system's file has gone."""
    if record.evidence != SIMULATED or record.outcome != "ok" or STEP_SECONDS not in record.metrics:
        return ""
    try:
        return prediction_basis(record.experiment.layout.kernels, load_system(record.experiment.system))
    except ConfigError:
        return ""


def weakest_basis(bases: Iterable[str]) -> str:
    """The one of `BASES` on which all of what is made of several predictions can rest; empty for none."""
    return max(filter(None, bases), key=list(BASES).index, default="")


def count_bases(bases: Iterable[str]) -> str:
    """How many predictions rest on what: `Times rest on: published point (7), upper bound (1).`; empty for none."""
    found = Counter(filter(None, bases))
    parts = ", ".join(f"{basis} ({found[basis]})" for basis in BASES if found[basis])
    return f"Times rest on: {parts}." if parts else ""
