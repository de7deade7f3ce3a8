"""Calibration points of software generations, their unknowns, and the basis of a predicted time.

The device model gives the time that shapes, arithmetic and bandwidth allow. A calibration point gives one factor for a
generation's kernels: published seconds over modelled seconds of one step (`calibration_points.toml`). Kernel times of a
profile give one factor for each kind of kernel. This module does not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

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
    source="as kernels that scale a vector (te42kyfo/gpu-benches, docs/accuracy.md), where this software's were not "
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
    """Layout of the published run, on one device or one node."""
    flops_per_device: float
    """Published rate, with the FLOPs of `repro.model.counts` including recomputation."""
    claim: str
    """Claim that publishes the point. Predictions of this claim are no evidence."""
    source: str
    low: float | None = None
    """Lower bound of `flops_per_device`, explained in `source`."""
    high: float | None = None
    """Upper bound of `flops_per_device`."""
    dropout: float = 0.0
    """Dropout of hidden states and of attention weights."""
    products: Quantity = EQUAL_PRODUCTS_SHARE
    """Excess time of matrix products over the model, relative to that of other kernels; both are shares of modelled
    time. With 0, products take the modelled time."""
    passes: Quantity = DEFAULT_PASSES
    """Ratio of the time of passes over parameters and gradients to the time of their bytes; measured separately."""
    operator_s: Quantity | None = None
    """Host time of an operator of a layer in seconds, including its modules and their backward passes. None selects the
    `launch_s` of the device."""
    attention: Quantity | None = None
    """Rate of fused attention in FLOP/s in the limit of many keys, forward and backward, without masked scores. None:
    not measured separately."""
    attention_start: float = 0.0
    """Number of keys at which fused attention reaches half of `attention`."""
    card: str = ""
    """Prefix of the device's name, if cards of one capability have a point each; empty: all other cards."""
    note: str = ""
    """Properties of the software that no operator of the trace represents, so the factor includes them."""

    @property
    def rate(self) -> Unknown:
        """The unknown of `flops_per_device`."""
        number = Quantity(value=self.flops_per_device, low=self.low, high=self.high, source=self.source)
        return make_unknown(f"{self.name}: FLOP/s", number)

    @property
    def unknowns(self) -> tuple[Unknown, ...]:
        """Uncertain numbers of the point."""
        numbers = (unknown_of(self, key) for key in ("products", "passes", "operator_s", "attention"))
        return tuple(one for one in (self.rate, *numbers) if one is not None and one.low < one.high)

    def experiment(self, model: Model) -> Experiment:
        """Return the published run with `model` in place of the full model."""
        training = Training(dropout=self.dropout, attention_dropout=self.dropout)
        return Experiment(
            name="calibration", model=model, layout=self.layout, training=training, system=self.system
        )


@dataclass(frozen=True)
class MeasuredKernels:
    """Kernels of a generation of software on one kind of device, calibrated by the kernel times of a profile.

    The factors are measured seconds over modelled seconds, by kind of kernel. They need no published step.
    """

    name: str
    compute_capability: str
    kernels: tuple[OperatorSet, ...]
    """Sets of operators that this software runs."""
    products: Quantity
    """Ratio of the time of matrix products to the modelled time."""
    others: Quantity
    """Ratio of the time of all other kernels except passes and attention to the modelled time."""
    passes: Quantity
    """Ratio of the time of passes over parameters and gradients to the time of their bytes."""
    attention: Quantity
    """Rate of fused attention in FLOP/s in the limit of many keys, forward and backward, without masked scores."""
    operator_s: Quantity
    """Host time of an operator of a layer in seconds, forward and backward."""
    source: str
    attention_start: float = 0.0
    """Number of keys at which fused attention reaches half of `attention`."""
    only_software_of: str = ""
    """Prefix of the name of devices on which no published run calibrates an older generation. There, `fused` is this
    software."""
    note: str = ""
    """Conditions of the measurement that predicted steps may not share."""

    @property
    def unknowns(self) -> tuple[Unknown, ...]:
        """Uncertain numbers of the kernels."""
        keys = ("products", "others", "passes", "operator_s", "attention")
        return tuple(one for key in keys if (one := unknown_of(self, key)) is not None and one.low < one.high)

    def runs(self, kernels: OperatorSet, device: str) -> bool:
        """Return whether layouts with these kernels run this software on the device of that name."""
        if kernels is OperatorSet.FUSED:
            return bool(self.only_software_of) and device.startswith(self.only_software_of)
        return kernels in self.kernels


Generation: TypeAlias = CalibrationPoint | MeasuredKernels
"""Software whose kernels are calibrated on a device."""


def unknown_of(generation: Generation, key: str) -> Unknown | None:
    """Return the unknown of a generation's number, such as `products`; None if the number has no value."""
    number: Quantity | None = getattr(generation, key)
    return make_unknown(f"{generation.name}: {key}", number) if number is not None else None


@cache
def measured_kernels() -> tuple[MeasuredKernels, ...]:
    """Return all generations that a profile calibrates, in the order of the file."""
    found = read_toml(CALIBRATION_FILE)["measured"]
    return tuple(build_dataclass(MeasuredKernels, entry, file=CALIBRATION_FILE.name) for entry in found)


@cache
def calibration_points() -> tuple[CalibrationPoint, ...]:
    """Return all points in the order of the file, except that points of one card are last and have priority."""
    found = [
        build_dataclass(CalibrationPoint, entry, file=CALIBRATION_FILE.name)
        for entry in read_toml(CALIBRATION_FILE)["generation"]
    ]
    return tuple(sorted(found, key=lambda point: len(point.card)))


def calibration_point_of(kernels: OperatorSet, system: System) -> Generation | None:
    """Return the calibration of a layout's kernels on a system's device; None for a device with measured operators.

    Measured kernels have priority over published points, and a point of the device's card over other points.
    Megatron-LM's two generations differ by operators, which the trace shows. If one has no point on a device, the point
    of the other generation is used, for example `unfused` on an A100 to predict the gain of fusing.
    A device without any calibration has `uncalibrated_kernels`.
    """
    if system.device.operators:
        return None
    device, kernels = system.device, OperatorSet(kernels)
    for measured in measured_kernels():
        if measured.compute_capability == device.compute_capability and measured.runs(kernels, device.name):
            return measured
    points = {
        known.layout.kernels: known
        for known in calibration_points()
        if known.compute_capability == device.compute_capability and device.name.startswith(known.card)
    }
    other = {OperatorSet.UNFUSED: OperatorSet.SOFTMAX, OperatorSet.SOFTMAX: OperatorSet.UNFUSED}.get(kernels)
    return points.get(kernels) or (points.get(other) if other else None) or uncalibrated_kernels(system)


def uncalibrated_kernels(system: System) -> MeasuredKernels:
    """Return kernels that are as efficient on the system's device as calibrated kernels are on theirs.

    The entry `uncalibrated` of the file has the median, the least and the most of all generations. Its `attention` is a
    share of the device's peak.
    """
    found = build_dataclass(
        MeasuredKernels, read_toml(CALIBRATION_FILE)["uncalibrated"], file=CALIBRATION_FILE.name
    )
    peaks = (system.device.peak_flops.get(precision) for precision in ("bf16", "fp16"))
    peak = next((peak.value for peak in peaks if peak is not None and peak.value), 0.0)
    low, share, high = found.attention.ends
    attention = replace(found.attention, value=share * peak, low=low * peak, high=high * peak)
    return replace(found, attention=attention)


TIMING_KEY_PREFIXES = ("device.", "links.")
"""Prefixes of the keys on which time depends."""


def uncertain_numbers(system: System, generation: Generation | None) -> list[Unknown]:
    """Return the uncertain numbers on which the time of a step on `system` depends."""
    found = [one for one in unknowns(system) if one.key.startswith(TIMING_KEY_PREFIXES)]
    return [*found, *(generation.unknowns if generation is not None else ())]


CALIBRATED = "calibrated"
KERNEL_TIMES = "kernel times"
PUBLISHED_POINT = "published point"
UNCALIBRATED = "uncalibrated"
BASES = {
    CALIBRATED: "`repro calibrate` measured operators and messages on such a machine",
    KERNEL_TIMES: "a profile of a step on such a device calibrates the kernels",
    PUBLISHED_POINT: "one published run of one GPU or node calibrates the kernels",
    UNCALIBRATED: "no run calibrates the kernels on this device; calibrated kernels of other devices give the range",
}
"""Meaning of each basis, the firmest first."""
BASIS_LABELS = {
    CALIBRATED: "calibrated",
    KERNEL_TIMES: "kernels",
    PUBLISHED_POINT: "published",
    UNCALIBRATED: "other devices",
    "": "–",
}
"""One word for each basis, as a table column; a dash without a prediction."""


def prediction_basis(kernels: OperatorSet, system: System) -> str:
    """Return the basis (of `BASES`) of a prediction with these kernels on `system`."""
    generation = calibration_point_of(kernels, system)
    if generation is None:
        return CALIBRATED
    if isinstance(generation, CalibrationPoint):
        return PUBLISHED_POINT
    return KERNEL_TIMES if generation.kernels else UNCALIBRATED


def describe_basis(kernels: OperatorSet, system: System) -> str:
    """Return the basis as text: its meaning, the published point, its source, and its effects outside the trace."""
    basis = prediction_basis(kernels, system)
    point = calibration_point_of(kernels, system)
    if point is None:
        return f"{basis}; {BASES[basis]}"
    note = f"; {point.note}" if point.note else ""
    return f"{basis}; {BASES[basis]}: {point.name} ({point.source}){note}"


def basis_of_record(record: ExperimentRecord) -> str:
    """Return the basis of a record's predicted speed; empty without a prediction or without the system's file."""
    if record.evidence != SIMULATED or record.outcome != "ok" or STEP_SECONDS not in record.metrics:
        return ""
    try:
        return prediction_basis(record.experiment.layout.kernels, load_system(record.experiment.system))
    except ConfigError:
        return ""


def weakest_basis(bases: Iterable[str]) -> str:
    """Return the weakest of `bases`, which is the basis of a result of several predictions; empty for none."""
    return max(filter(None, bases), key=list(BASES).index, default="")


def count_bases(bases: Iterable[str]) -> str:
    """Return the predictions by basis: `Times rest on: published point (7), bound (1).`; empty for none."""
    found = Counter(filter(None, bases))
    parts = ", ".join(f"{basis} ({found[basis]})" for basis in BASES if found[basis])
    return f"Times rest on: {parts}." if parts else ""
