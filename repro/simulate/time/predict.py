"""Predicted step time: calibrated kernels, the schedule of the traces, and the interval from uncertain inputs.

One schedule times the step in many sampled cases. A case varies one uncertain input in and around its range, or draws
all at random. The kernels are calibrated in the same cases. No number is fitted to a predicted value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np

from repro.config import Experiment, Model, models, systems
from repro.config.system import System
from repro.config.systems.unknowns import (
    BEST,
    HIGH,
    LOW,
    MAX_CASES,
    PACE,
    Lanes,
    Unknown,
    drawn,
    quantiles_in_cases,
    with_values,
)
from repro.model import counts
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD
from repro.results.interval import Sensitivity, StepInterval
from repro.simulate.time.breakdown import StageTime
from repro.simulate.time.calibration import (
    CalibrationPoint,
    Generation,
    MeasuredKernels,
    calibration_point_of,
    prediction_basis,
    uncertain_numbers,
    unknown_of,
)
from repro.simulate.time.device import MODELLED_KERNELS, Kernels, first_lane
from repro.simulate.time.program import OPTIMIZER
from repro.simulate.time.schedule import Timeline, schedule_traces
from repro.simulate.time.stage import UPDATE
from repro.simulate.trace.roles import Trace, trace_roles

SHALLOW_LAYERS, DEEP_LAYERS = 2, 4
"""Layers of two small traces, from which a published model's step time is extrapolated linearly for calibration."""
MAX_GENERATIONS = 32
"""Maximum number of software generations whose kernels and traces a process caches."""


@lru_cache(maxsize=MAX_GENERATIONS)
def calibrated_kernels(generation: Generation | None) -> Kernels:
    """Return the kernel efficiencies of a software generation with which its published step takes the published time.

    `generation` is None for a device with measured operators. All time beyond the model is attributed to kernels, so a
    published step on one node must hide its communication (tests/simulate/time/test_device.py).
    """
    if generation is None:
        return MODELLED_KERNELS
    return Kernels(*map(first_lane, calibrated_kernels_at(generation, {})))


def calibrated_kernels_at(generation: Generation, quantiles: Mapping[str, Lanes]) -> Kernels:
    """Return a software generation's kernel efficiencies in sampled cases of the uncertain inputs, as arrays [cases].

    `quantiles`: position of each uncertain input in its range, per case, by the input's key. Other inputs have best
    values. An input of the device is equal in the calibrating and the predicted step, which run on the same device.
    """

    def value(key: str, cases: Mapping[str, Lanes] = quantiles) -> Any:
        of = unknown_of(generation, key)
        return of.values_at(cases.get(of.key, BEST)) if of is not None else 0.0

    def kernels(products: Any, others: Any, cases: Mapping[str, Lanes] = quantiles) -> Kernels:
        passes, operator_s, attention = (value(key, cases) for key in ("passes", "operator_s", "attention"))
        return Kernels(products, others, passes, operator_s, attention, generation.attention_start)

    if isinstance(generation, MeasuredKernels):
        return kernels(value("products"), value("others"))
    model, layout = models.load_model(generation.model), generation.layout
    work = counts.hardware_flops(model, model.seq, layout.global_batch, layout.recompute) / layout.world

    # Each case is timed with modelled kernels, with all kernels slower, and with all but matrix products slower.
    cases = {key: np.tile(each, 3) for key, each in quantiles.items()}
    count = max(map(len, quantiles.values()), default=1)
    of_cases = kernels(np.repeat((1.0, 2.0, 1.0), count), np.repeat((1.0, 2.0, 2.0), count), cases)
    system = with_values(drawn(systems.load_system_file(generation.system), cases), {PACE: 1.0})
    few, more = (
        schedule_traces(experiment, system, traces, of_cases).seconds
        for experiment, traces in (
            _traces_of_layers(generation, layers) for layers in (SHALLOW_LAYERS, DEEP_LAYERS)
        )
    )
    seconds = few + (model.layers - SHALLOW_LAYERS) * (more - few) / (DEEP_LAYERS - SHALLOW_LAYERS)
    modelled, slower, slower_others = cast(Lanes, seconds).reshape(3, count)

    rate = generation.rate
    beyond = work / rate.values_at(quantiles.get(rate.key, BEST)) - modelled
    # If `beyond` < 0, the published step is faster than modelled. Then one common factor speeds up all kernels.
    share = np.where(beyond > 0, value("products"), 1.0)
    beyond /= share * (slower - slower_others) + slower_others - modelled
    return kernels(1 + share * beyond, 1 + beyond)


@lru_cache(maxsize=MAX_CASES)
def kernels_in_cases(generation: Generation, found: tuple[Unknown, ...]) -> Kernels:
    """Return a software generation's kernel efficiencies in all sampled cases of the uncertain inputs `found`."""
    return calibrated_kernels_at(generation, quantiles_in_cases(found))


@lru_cache(maxsize=MAX_GENERATIONS)
def _traces_of_layers(generation: CalibrationPoint, layers: int) -> tuple[Experiment, list[Trace]]:
    experiment = generation.experiment(replace(models.load_model(generation.model), layers=layers))
    return experiment, trace_roles(experiment)


SIGNIFICANT_DIGITS = 7
"""Number of significant digits to which seconds are rounded in a record."""
MIN_CURVE_SPAN = 0.01
"""Minimum relative effect of an uncertain input for which a record stores step times at several of its values."""


def round_seconds(seconds: float) -> float:
    """Return the seconds, rounded to `SIGNIFICANT_DIGITS` as in a record."""
    return float(f"{seconds:.{SIGNIFICANT_DIGITS}g}")


def interval_of_seconds(found: tuple[Unknown, ...], seconds: float) -> StepInterval:
    """Return the step time's uncertainty interval, from its `seconds` in all cases of the uncertain inputs `found`."""
    cases = quantiles_in_cases(found)[found[0].key]
    rounded = iter([round_seconds(one) for one in np.broadcast_to(seconds, cases.shape).tolist()[1:]])
    moves = []
    for one in found:
        at = dict(zip(one.moves, rounded, strict=False))
        move = Sensitivity(
            key=one.key, low=one.low, best=one.best, high=one.high, low_s=at[LOW], high_s=at[HIGH]
        )
        if move.span > MIN_CURVE_SPAN * min(move.low_s, move.high_s):
            curve = [[round_seconds(value), at[quantile]] for value, quantile in one.around.items()]
            move = replace(move, curve=curve)
        if move.span > 0:
            moves.append(move)
    moves.sort(key=lambda move: -move.span)
    return StepInterval(draws=list(rounded), moves=moves)


@dataclass
class Prediction:
    """Predicted time of one training step. Times are in seconds and rates in FLOP/s."""

    experiment: Experiment
    system: System
    timeline: Timeline
    roles: list[Trace]
    generation: Generation | None
    """Calibration of the kernels; None if the device has measured operators or the caller chose the kernels."""
    kernels: Kernels
    interval: StepInterval | None = None
    """Uncertainty interval of the step time; None unless it was requested and a number is uncertain."""

    @property
    def step_s(self) -> float:
        """Predicted step time in seconds at the best values of all uncertain inputs."""
        return self.timeline.step_s

    @property
    def samples_per_s(self) -> float:
        """Predicted samples per second of all data-parallel replicas together."""
        return self.experiment.layout.global_batch / self.step_s

    @property
    def flops_per_device(self) -> float:
        """FLOP/s of one device, including recomputation, by the FLOP formula `repro.model.counts.flops_formula`."""
        e, layout = self.experiment, self.experiment.layout
        work = counts.hardware_flops(e.model, e.seq, layout.global_batch, layout.recompute)
        return work / self.step_s / layout.world

    def _utilisation(self, model_flops: Callable[[Model, int, int], float]) -> float | None:
        """Return the model FLOP/s utilisation, without recomputation; None if the device's peak is unknown."""
        e, layout = self.experiment, self.experiment.layout
        work = model_flops(e.model, e.seq, layout.global_batch)
        return counts.utilisation(work / self.step_s, layout.world, self.system, layout.precision)

    @property
    def rests_on(self) -> str:
        """Basis of the predicted step time (kind of calibration), one of `repro.simulate.time.calibration.BASES`."""
        return prediction_basis(self.experiment.layout.kernels, self.system)

    @property
    def slowest(self) -> StageTime:
        """Time breakdown of the pipeline stage with the largest sum of compute and exposed communication."""
        return max(
            self.timeline.stages, key=lambda stage: sum(stage.busy.values()) + sum(stage.exposed.values())
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the step's predicted times and rates, which `repro simulate --json` prints under the key `time`."""
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
            "mfu": self._utilisation(counts.model_flops),
            "mfu_causal": self._utilisation(counts.causal_flops),
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
    """Predict the step time of `experiment` on `system`.

    `traces`: one per pipeline role; None traces them. `kernels`: None selects the calibration of the layout's kernels.
    `record`: store busy intervals of all streams, for a drawing. `interval`: also compute the uncertainty interval of
    the step time.
    """
    generation = calibration_point_of(experiment.layout.kernels, system) if kernels is None else None
    found = tuple(uncertain_numbers(system, generation)) if interval else ()
    in_cases = drawn(system, quantiles_in_cases(found)) if found else system
    if kernels is None:
        kernels = (
            kernels_in_cases(generation, found) if generation and found else calibrated_kernels(generation)
        )
    if traces is None:
        traces = trace_roles(experiment)
    timeline = schedule_traces(experiment, in_cases, traces, kernels, record=record)
    in_first = Kernels(*map(first_lane, kernels))
    known = interval_of_seconds(found, timeline.seconds) if found else None
    return Prediction(experiment, system, timeline, traces, generation, in_first, known)
