"""Calibration of kernel times for each generation of training software, such as Megatron-LM with fused softmax.

`calibration_points.toml` has one published step time per generation. It gives the ratio of actual to modelled kernel
time. Some generations have kernel times from a profiler instead. This module does not import torch.
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
    """A generation of software on one kind of device, whose kernels one published step time calibrates."""

    name: str
    compute_capability: str
    model: str
    system: str
    layout: Layout
    """Layout of the published run, on one device or one node."""
    flops_per_device: float
    """Published FLOP/s per device, with the FLOP count of `repro.model.counts` including recomputation."""
    claim: str
    """Name of the published claim about this run. The claim is not tested, as the run calibrates the prediction."""
    source: str
    low: float | None = None
    """Lower bound of the published FLOP/s per device; the text in `source` explains it."""
    high: float | None = None
    """Upper bound of the published FLOP/s per device; the text in `source` explains it."""
    dropout: float = 0.0
    """Dropout probability of hidden states and of attention weights."""
    products: Quantity = EQUAL_PRODUCTS_SHARE
    """Ratio of the slowdown of matrix products to the slowdown of all other kernels. A slowdown is actual over modelled
    time, minus 1. With a ratio of 0, products take the modelled time."""
    passes: Quantity = DEFAULT_PASSES
    """Ratio of actual to modelled time of operators that read and write parameters or gradients once."""
    operator_s: Quantity | None = None
    """Host time in seconds per operator of a layer, including calls of modules and of autograd. None selects the
    `launch_s` of the device."""
    attention: Quantity | None = None
    """Rate of fused attention for infinitely many keys, forward and backward, in FLOP/s without masked scores; None if
    it was not measured separately."""
    attention_start: float = 0.0
    """Number of keys with which fused attention reaches half of the rate `attention`."""
    card: str = ""
    """Prefix of the device names to which this calibration is limited; empty if the compute capability suffices."""
    note: str = ""
    """Properties of the software that the trace does not represent; the calibration includes their effect on time."""

    @property
    def rate(self) -> Unknown:
        """Published FLOP/s per device with its lower and upper bound, as an uncertain input of predictions."""
        number = Quantity(value=self.flops_per_device, low=self.low, high=self.high, source=self.source)
        return make_unknown(f"{self.name}: FLOP/s", number)

    @property
    def unknowns(self) -> tuple[Unknown, ...]:
        """Uncertain inputs: all numbers of this calibration that have a lower and an upper bound."""
        numbers = (unknown_of(self, key) for key in ("products", "passes", "operator_s", "attention"))
        return tuple(one for one in (self.rate, *numbers) if one is not None and one.low < one.high)

    def experiment(self, model: Model) -> Experiment:
        """Return the experiment of the published run, with `model` instead of the published model."""
        training = Training(dropout=self.dropout, attention_dropout=self.dropout)
        return Experiment(
            name="calibration", model=model, layout=self.layout, training=training, system=self.system
        )


@dataclass(frozen=True)
class MeasuredKernels:
    """A generation of software on one kind of device, whose kernels are calibrated by the kernel times of a profile."""

    name: str
    compute_capability: str
    kernels: tuple[OperatorSet, ...]
    """Values of `layout.kernels` that this software runs."""
    products: Quantity
    """Ratio of measured to modelled time of matrix products."""
    others: Quantity
    """Ratio of measured to modelled time of kernels other than matrix products, attention and parameter passes."""
    passes: Quantity
    """Ratio of measured to modelled time of operators that read and write parameters or gradients once."""
    attention: Quantity
    """Rate of fused attention for infinitely many keys, forward and backward, in FLOP/s without masked scores."""
    operator_s: Quantity
    """Host time in seconds per operator of a layer, forward and backward."""
    source: str
    attention_start: float = 0.0
    """Number of keys with which fused attention reaches half of the rate `attention`."""
    only_software_of: str = ""
    """Prefix of the names of devices on which layouts with the older kernels `"fused"` also use this calibration,
    because no published run with `"fused"` exists for these devices."""
    note: str = ""
    """Conditions of the profiled step, such as eager code. A step under other conditions may take another time."""

    @property
    def unknowns(self) -> tuple[Unknown, ...]:
        """Uncertain inputs: all kernel times of this calibration that have a lower and an upper bound."""
        keys = ("products", "others", "passes", "operator_s", "attention")
        return tuple(one for key in keys if (one := unknown_of(self, key)) is not None and one.low < one.high)

    def runs(self, kernels: OperatorSet, device: str) -> bool:
        """Return whether layouts with `kernels` run this software on the device named `device`."""
        if kernels is OperatorSet.FUSED:
            return bool(self.only_software_of) and device.startswith(self.only_software_of)
        return kernels in self.kernels


Generation: TypeAlias = CalibrationPoint | MeasuredKernels
"""A generation of software with the calibration of its kernels on one kind of device."""


def unknown_of(generation: Generation, key: str) -> Unknown | None:
    """Return one number of a calibration with its lower and upper bound; `key`: its field name. None if missing."""
    number: Quantity | None = getattr(generation, key)
    return make_unknown(f"{generation.name}: {key}", number) if number is not None else None


@cache
def measured_kernels() -> tuple[MeasuredKernels, ...]:
    """Return the calibrations from profiled kernel times, in the order of `CALIBRATION_FILE`."""
    found = read_toml(CALIBRATION_FILE)["measured"]
    return tuple(build_dataclass(MeasuredKernels, entry, file=CALIBRATION_FILE.name) for entry in found)


@cache
def calibration_points() -> tuple[CalibrationPoint, ...]:
    """Return all calibration points from published steps: first those for any device, then those for one device."""
    found = [
        build_dataclass(CalibrationPoint, entry, file=CALIBRATION_FILE.name)
        for entry in read_toml(CALIBRATION_FILE)["generation"]
    ]
    return tuple(sorted(found, key=lambda point: len(point.card)))


def calibration_point_of(kernels: OperatorSet, system: System) -> Generation | None:
    """Return the calibration of a layout's kernels on a system's device; None for a device with measured operators.

    Profiled kernel times have priority over published step times; a step on the same card has priority over others. The
    Megatron-LM kernels `unfused` and `softmax` can replace each other, because the trace has the operators that differ.
    Devices without any calibration use `uncalibrated_kernels`.
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


@cache
def uncalibrated_efficiency() -> MeasuredKernels:
    """Return the median and range of all calibrated kernels' efficiency; `attention` as share of the peak FLOP/s."""
    entry = read_toml(CALIBRATION_FILE)["uncalibrated"]
    return build_dataclass(MeasuredKernels, entry, file=CALIBRATION_FILE.name)


def uncalibrated_kernels(system: System) -> MeasuredKernels:
    """Return the kernels of a device without calibration: the median efficiency of kernels on other devices."""
    found = uncalibrated_efficiency()
    peaks = (system.device.peak_flops.get(precision) for precision in ("bf16", "fp16"))
    peak = next((peak.value for peak in peaks if peak is not None and peak.value), 0.0)
    low, share, high = found.attention.ends
    attention = replace(found.attention, value=share * peak, low=low * peak, high=high * peak)
    return replace(found, attention=attention)


TIMING_KEY_PREFIXES = ("device.", "links.")
"""Prefixes of those keys of a system file on which the step time depends."""


def uncertain_numbers(system: System, generation: Generation | None) -> list[Unknown]:
    """Return the uncertain inputs on which the step time depends: of `system` and of the kernels' calibration."""
    found = [one for one in unknowns(system) if one.key.startswith(TIMING_KEY_PREFIXES)]
    return [*found, *(generation.unknowns if generation is not None else ())]


CALIBRATED = "calibrated"
KERNEL_TIMES = "kernel times"
PUBLISHED_POINT = "published point"
UNCALIBRATED = "uncalibrated"
BASES = {
    CALIBRATED: "`repro calibrate` measured operators and messages on a machine of this kind",
    KERNEL_TIMES: "a profile of a step on a device of this kind calibrates the kernels",
    PUBLISHED_POINT: "a published run of one GPU or one node calibrates the kernels",
    UNCALIBRATED: "no run calibrates the kernels on this device; calibrated kernels of other devices give the range",
}
"""Meaning of each basis of a predicted step time (kind of calibration), in the order of reliability."""
BASIS_LABELS = {
    CALIBRATED: "calibrated",
    KERNEL_TIMES: "kernels",
    PUBLISHED_POINT: "published",
    UNCALIBRATED: "other devices",
    "": "–",
}
"""Table label of each basis (kind of calibration) of a predicted step time; a dash if there is no prediction."""


def prediction_basis(kernels: OperatorSet, system: System) -> str:
    """Return the basis (kind of calibration, a key of `BASES`) of step times predicted with `kernels` on `system`."""
    generation = calibration_point_of(kernels, system)
    if generation is None:
        return CALIBRATED
    if isinstance(generation, CalibrationPoint):
        return PUBLISHED_POINT
    return KERNEL_TIMES if generation.kernels else UNCALIBRATED


def describe_basis(kernels: OperatorSet, system: System) -> str:
    """Return a text on the calibration of predicted step times: its kind, meaning, name, source and note."""
    basis = prediction_basis(kernels, system)
    point = calibration_point_of(kernels, system)
    if point is None:
        return f"{basis}; {BASES[basis]}"
    note = f"; {point.note}" if point.note else ""
    return f"{basis}; {BASES[basis]}: {point.name} ({point.source}){note}"


def basis_of_record(record: ExperimentRecord) -> str:
    """Return the basis (kind of calibration) of a record's step time; empty without a prediction or a system file."""
    if record.evidence != SIMULATED or record.outcome != "ok" or STEP_SECONDS not in record.metrics:
        return ""
    try:
        return prediction_basis(record.experiment.layout.kernels, load_system(record.experiment.system))
    except ConfigError:
        return ""


def weakest_basis(bases: Iterable[str]) -> str:
    """Return the least reliable basis (kind of calibration) of the predictions behind a result; empty for none."""
    return max(filter(None, bases), key=list(BASES).index, default="")


def count_bases(bases: Iterable[str]) -> str:
    """Return a sentence with the number of predictions per basis, or an empty text for no predictions.

    Example: `Times rest on: published point (7), uncalibrated (1).`
    """
    found = Counter(filter(None, bases))
    parts = ", ".join(f"{basis} ({found[basis]})" for basis in BASES if found[basis])
    return f"Times rest on: {parts}." if parts else ""
