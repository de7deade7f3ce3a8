"""Predicted step time: the kernels of a calibration point, the schedule of the traces, and the prediction interval.

The interval comes from one trace that is timed in every case: each unknown at both ends of its range with all others at
their best values, and joint draws of all unknowns. The factor of a generation's kernels follows from its published
point in the same case, so no uncertainty counts twice. No number is fitted to a value that is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any

import numpy as np

from repro.config import Experiment, models, systems
from repro.config.system import System
from repro.config.systems.unknowns import HIGH, JOINT, LOW, PACE, QuantileCase, Unknown, drawn, with_values
from repro.model import counts
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD
from repro.results.interval import Sensitivity, StepInterval
from repro.simulate.time.breakdown import StageTime
from repro.simulate.time.calibration import (
    UNCALIBRATED_KERNELS,
    CalibrationPoint,
    Generation,
    MeasuredKernels,
    calibration_point_of,
    prediction_basis,
    uncertain_numbers,
)
from repro.simulate.time.device import MODELLED_KERNELS, Kernels, Lanes
from repro.simulate.time.program import OPTIMIZER
from repro.simulate.time.schedule import Timeline, schedule_traces, scheduled_step_seconds
from repro.simulate.time.stage import UPDATE
from repro.simulate.trace.roles import Trace, trace_roles

SHALLOW_LAYERS, DEEP_LAYERS = 2, 4
"""Numbers of layers of the two calibration traces. Step time is linear in the number of layers."""


def calibrated_kernels(generation: Generation) -> Kernels:
    """Return the kernels with which the published step takes its published time, or the measured kernels.

    Kernels of a published step get all remaining time. On a node, messages therefore have to overlap with the kernels
    (tests/simulate/time/test_device.py).
    """
    return calibrated_kernels_in(generation, (QuantileCase(),))[0]


@cache
def calibrated_kernels_in(
    generation: Generation, cases: Sequence[QuantileCase], doubted: frozenset[str] = frozenset()
) -> tuple[Kernels, ...]:
    """Return `calibrated_kernels` in each of `cases`, [cases].

    On a slower device than assumed, the kernels are more efficient. If products take the modelled time, the other
    kernels get all remaining time.

    `doubted`: keys of the unknowns of the timed system. All other numbers of the measured system have their best
    values, because known properties of a device hold for both systems.
    """
    if isinstance(generation, MeasuredKernels):
        return tuple(_measured_kernels_in(generation, case) for case in cases)
    system = systems.load_system_file(generation.system)
    whole, layout = models.load_model(generation.model), generation.layout
    work = counts.hardware_flops(whole, whole.seq, layout.global_batch, layout.recompute) / layout.world
    itself = [with_values(drawn(system, case, doubted), {PACE: 1.0}) for case in cases]

    def value(of: Unknown | None) -> Lanes:
        return np.array([of.value_at(case.quantile_of(of.key)) if of is not None else 0.0 for case in cases])

    attention, start = value(generation.attention_rate), generation.attention_start
    passes, host = value(generation.passes_time), value(generation.operator_time)
    measured = list(zip(passes.tolist(), host.tolist(), attention.tolist(), strict=True))

    def seconds(products: float, others: float) -> Lanes:
        """Return the step time on the measured device in seconds, [cases]."""
        of_cases = [Kernels(products, others, passes, host, rate, start) for passes, host, rate in measured]
        at_few, at_more = (
            _seconds_of_layers(generation, layers, itself, of_cases)
            for layers in (SHALLOW_LAYERS, DEEP_LAYERS)
        )
        return at_few + (whole.layers - SHALLOW_LAYERS) * (at_more - at_few) / (DEEP_LAYERS - SHALLOW_LAYERS)

    published, modelled = work / value(generation.rate), seconds(1.0, 1.0)
    every = seconds(2.0, 2.0) - modelled
    # If kernels are faster than the model, all have the same factor.
    share = np.where(published > modelled, value(generation.products_share), 1.0)
    other = seconds(1.0, 2.0) - modelled if (share != 1).any() else 0 * every
    beyond = (published - modelled) / (share * (every - other) + other)
    found = zip((share * beyond).tolist(), beyond.tolist(), measured, strict=True)
    return tuple(
        Kernels(1 + products, 1 + others, passes, host, rate, start)
        for products, others, (passes, host, rate) in found
    )


def _measured_kernels_in(generation: MeasuredKernels, case: QuantileCase) -> Kernels:
    def value(key: str) -> float:
        one = generation.unknown(key)
        return one.value_at(case.quantile_of(one.key))

    return Kernels(
        products=value("products"),
        others=value("others"),
        passes=value("passes"),
        operator_s=value("operator_s"),
        attention=value("attention"),
        attention_start=generation.attention_start,
    )


def _seconds_of_layers(
    generation: CalibrationPoint, layers: int, itself: Sequence[System], of_cases: Sequence[Kernels]
) -> Lanes:
    """Return the seconds of a step with `layers` layers, [cases]."""
    experiment, traces = _traces_of_layers(generation, layers)
    return scheduled_step_seconds(experiment, itself, traces, of_cases)


@cache
def _traces_of_layers(generation: CalibrationPoint, layers: int) -> tuple[Experiment, list[Trace]]:
    experiment = generation.experiment(replace(models.load_model(generation.model), layers=layers))
    return experiment, trace_roles(experiment)


SIGNIFICANT_DIGITS = 7
"""Significant digits of rounded seconds."""


def prediction_interval(experiment: Experiment, system: System, traces: list[Trace]) -> StepInterval | None:
    """Return the interval of the step time; None without unknowns. `traces` contain all roles."""
    found = uncertain_numbers(system, calibration_point_of(experiment.layout.kernels, system))
    if not found:
        return None
    return interval_of_seconds(found, seconds_in_cases(experiment, system, traces, all_cases(found)))


def seconds_in_cases(
    experiment: Experiment, system: System, traces: list[Trace], cases: Sequence[QuantileCase]
) -> Sequence[float]:
    """Return the step time in seconds in each of `cases`, all in one pass."""
    systems, kernels = systems_and_kernels(
        system, calibration_point_of(experiment.layout.kernels, system), cases
    )
    return scheduled_step_seconds(experiment, systems, traces, kernels).tolist()


def round_seconds(seconds: float) -> float:
    """Return the seconds, rounded as in a record."""
    return float(f"{seconds:.{SIGNIFICANT_DIGITS}g}")


def all_cases(found: Sequence[Unknown]) -> tuple[QuantileCase, ...]:
    """Return both ends of each unknown, then the joint draws."""
    return (*(QuantileCase(one.key, end) for one in found for end in (LOW, HIGH)), *JOINT)


def systems_and_kernels(
    system: System, generation: Generation | None, cases: Sequence[QuantileCase]
) -> tuple[list[System], Sequence[Kernels]]:
    """Return the system and its kernels in each of `cases`."""
    systems = [drawn(system, case) for case in cases]
    if generation is not None:
        doubted = frozenset(one.key for one in uncertain_numbers(system, generation))
        return systems, calibrated_kernels_in(generation, tuple(cases), doubted)
    return systems, [
        Kernels.alike(UNCALIBRATED_KERNELS.value_at(case.quantile_of(UNCALIBRATED_KERNELS.key)))
        for case in cases
    ]


def interval_of_seconds(found: Sequence[Unknown], seconds: Sequence[float]) -> StepInterval:
    """Return the interval from the seconds in `all_cases(found)`."""
    rounded = iter(map(round_seconds, seconds))
    moves = [
        Sensitivity(
            key=one.key, low=one.low, best=one.best, high=one.high, low_s=next(rounded), high_s=next(rounded)
        )
        for one in found
    ]
    moving = [move for move in moves if move.span > 0]
    moving.sort(key=lambda move: -move.span)
    return StepInterval(draws=list(islice(rounded, len(JOINT))), moves=moving)


@dataclass
class Prediction:
    """Predicted step: times in seconds, rates in FLOP/s."""

    experiment: Experiment
    system: System
    timeline: Timeline
    roles: list[Trace]
    generation: Generation | None
    """Calibration of the kernels; None if they have none."""
    kernels: Kernels
    interval: StepInterval | None = None
    """Interval of the step time, if it was requested and a number is uncertain."""

    @property
    def step_s(self) -> float:
        """Step time in seconds."""
        return self.timeline.step_s

    @property
    def samples_per_s(self) -> float:
        """Samples of all replicas per second."""
        return self.experiment.layout.global_batch / self.step_s

    @property
    def flops_per_device(self) -> float:
        """FLOP/s of one device under `repro.model.counts.flops_formula`, including recomputation."""
        e, layout = self.experiment, self.experiment.layout
        work = counts.hardware_flops(e.model, e.seq, layout.global_batch, layout.recompute)
        return work / self.step_s / layout.world

    @property
    def utilisation(self) -> float | None:
        """MFU, which excludes recomputation; None if the device's peak is unknown."""
        e, layout = self.experiment, self.experiment.layout
        work = counts.model_flops(e.model, e.seq, layout.global_batch)
        return counts.utilisation(work / self.step_s, layout.world, self.system, layout.precision)

    @property
    def rests_on(self) -> str:
        """Basis of the prediction, one of `repro.simulate.time.calibration.BASES`."""
        return prediction_basis(self.experiment.layout.kernels, self.system)

    @property
    def slowest(self) -> StageTime:
        """The stage with the largest sum of compute and exposed communication, which the other stages wait for."""
        return max(
            self.timeline.stages, key=lambda stage: sum(stage.busy.values()) + sum(stage.exposed.values())
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, the key `time` of `repro simulate --json`."""
        stage = self.slowest
        exposed, total = sum(stage.exposed.values()), sum(stage.communication.values())
        busy = dict(stage.busy)
        optimizer = busy[OPTIMIZER]
        compute = sum(busy.values()) - optimizer
        return {
            "step_s": self.step_s,
            "interval": None if self.interval is None else self.interval.summary(self.step_s),
            "samples_per_s": self.samples_per_s,
            "flops_per_device": self.flops_per_device,
            "mfu": self.utilisation,
            "formula": counts.flops_formula(self.experiment.model),
            "rests_on": self.rests_on,
            "generation": self.generation.name if self.generation is not None else "",
            "factor": self.kernels.others,
            "product_factor": self.kernels.products,
            "compute_s": compute,
            "optimizer_s": optimizer,
            "exposed_s": exposed,
            "hidden_s": max(0.0, total - exposed),
            "forward_s": stage.by_phase[FORWARD],
            "backward_s": stage.by_phase[BACKWARD],
            "update_s": stage.by_phase[UPDATE],
            "bubble_s": max(0.0, self.step_s - compute - optimizer - exposed),
            "compute_by_kind": busy,
            "exposed_by_kind": dict(stage.exposed),
            "communication_by_kind": dict(stage.communication),
        }


def predict(
    experiment: Experiment,
    system: System,
    traces: list[Trace] | None = None,
    *,
    kernels: Kernels | None = None,
    record: bool = False,
    interval: bool = False,
) -> Prediction:
    """Predict a step of `experiment` on `system`.

    `traces` of all its roles; None traces them. `kernels`: by default those of the layout's generation. `record`: store
    every span, for a drawing. `interval`: compute the interval of the step time.
    """
    generation = calibration_point_of(experiment.layout.kernels, system) if kernels is None else None
    if kernels is None:
        kernels = calibrated_kernels(generation) if generation is not None else MODELLED_KERNELS
    if traces is None:
        traces = trace_roles(experiment)
    timeline = schedule_traces(experiment, system, traces, kernels, record=record)
    found = prediction_interval(experiment, system, traces) if interval else None
    return Prediction(experiment, system, timeline, traces, generation, kernels, found)


MIN_CURVE_SPAN = 0.01
"""Minimum effect of an unknown on the step time for which its curve is computed, as a share of the step time."""


def with_curves(prediction: Prediction) -> Prediction:
    """Return the prediction with curves of the unknowns that move the step by more than `MIN_CURVE_SPAN`."""
    interval = prediction.interval
    if interval is None:
        return prediction
    moving = {
        move.key for move in interval.moves if move.span > MIN_CURVE_SPAN * min(move.low_s, move.high_s)
    }
    around = [
        (one.key, value, quantile)
        for one in uncertain_numbers(prediction.system, prediction.generation)
        if one.key in moving
        for value, quantile in one.around.items()
    ]
    if not around:
        return prediction
    cases = [QuantileCase(key, quantile) for key, _, quantile in around]
    taken = seconds_in_cases(prediction.experiment, prediction.system, prediction.roles, cases)
    curves: dict[str, list[list[float]]] = {key: [] for key in moving}
    for (key, value, _), seconds in zip(around, taken, strict=True):
        curves[key].append([round_seconds(value), round_seconds(seconds)])
    moves = [replace(move, curve=curves.get(move.key, move.curve)) for move in interval.moves]
    return replace(prediction, interval=replace(interval, moves=moves))
