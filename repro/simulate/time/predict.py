"""Predict the seconds of a step: its traces, scheduled on a system.

What a number needs that nobody knows is assumed, and said (`assumed`); nothing is fitted to what is
predicted.  `software` names a generation of kernels, whose efficiency comes from one published point.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from repro.config import Experiment
from repro.config.system import System
from repro.model import flops
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD
from repro.results.interval import StepInterval
from repro.simulate.time import efficiency
from repro.simulate.time.account import StageTime
from repro.simulate.time.basis import rests_on
from repro.simulate.time.calibration_points import CalibrationPoint, calibration_point_of
from repro.simulate.time.device import MODELLED, Kernels
from repro.simulate.time.interval import interval as interval_of
from repro.simulate.time.program import OPTIMIZER
from repro.simulate.time.schedule import Timeline
from repro.simulate.time.stage import UPDATE
from repro.simulate.time.timed import timed
from repro.simulate.trace.roles import Trace, trace_roles


@dataclass
class Prediction:
    """A step in time.  Seconds; FLOP/s."""

    experiment: Experiment
    system: System
    timeline: Timeline
    roles: list[Trace]
    generation: CalibrationPoint | None
    """Whose published point the kernels' efficiency comes from."""
    kernels: Kernels
    interval: StepInterval | None = None
    """What the step may take instead, if it was asked for and something is not known for certain."""

    @property
    def step_s(self) -> float:
        """Of one step."""
        return self.timeline.step_s

    @property
    def samples_per_s(self) -> float:
        """Samples of all replicas."""
        return self.experiment.layout.global_batch / self.step_s

    @property
    def flops_per_device(self) -> float:
        """FLOP/s of one device under `repro.model.flops.formula`, recomputation counted."""
        e, layout = self.experiment, self.experiment.layout
        work = flops.hardware_flops(e.model, e.seq, layout.global_batch, layout.recompute)
        return work / self.step_s / layout.world

    @property
    def utilisation(self) -> float | None:
        """MFU, which counts no recomputation; None where the device's peak is not known."""
        e, layout = self.experiment, self.experiment.layout
        work = flops.model_flops(e.model, e.seq, layout.global_batch)
        return flops.utilisation(work / self.step_s, layout.world, self.system, layout.precision)

    @property
    def rests_on(self) -> str:
        """One of `repro.simulate.time.basis.BASES`."""
        return rests_on(self.experiment.layout.kernels, self.system)

    @property
    def slowest(self) -> StageTime:
        """The stage that computes for longest, which the others wait for."""
        return max(
            self.timeline.stages, key=lambda stage: sum(stage.busy.values()) + sum(stage.exposed.values())
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data: the key `time` of `repro simulate --json`."""
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
            "formula": flops.formula(self.experiment.model),
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

    `traces` of all its roles, if they are there.  `kernels`: by default those of the layout's generation.
    `record`: keep every span, for a drawing.  `interval`: say what the step may take instead.
    """
    generation = calibration_point_of(experiment.layout.kernels, system) if kernels is None else None
    if kernels is None:
        kernels = efficiency.kernels(generation) if generation is not None else MODELLED
    if traces is None:
        traces = trace_roles(experiment)
    timeline = timed(experiment, system, traces, kernels, record=record)
    found = interval_of(experiment, system, traces) if interval else None
    return Prediction(experiment, system, timeline, traces, generation, kernels, found)
