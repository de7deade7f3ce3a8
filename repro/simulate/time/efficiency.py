"""How much longer a generation's kernels take than the model of its device says, from its published point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from repro import models, systems
from repro.config import Experiment
from repro.config.system import System
from repro.models import flops
from repro.simulate.time.calibration_points import CalibrationPoint
from repro.simulate.time.lanes import Lanes
from repro.simulate.time.timed import step_seconds
from repro.simulate.trace.roles import Trace, trace_roles
from repro.systems.unknowns import Case, drawn, with_values

PACE = "device.time.pace"
FEW, MORE = 2, 4
"""Layers.  The step is a straight line in their number, so two shallow ones say what a deep one takes."""


def factor(generation: CalibrationPoint) -> float:
    """Seconds of its kernels over seconds of the modelled ones.

    All of what is left is taken for kernels: on a node, messages have to hide behind them
    (tests/simulate/time/test_device.py).
    """
    return factors(generation, (Case(),))[0]


@cache
def factors(
    generation: CalibrationPoint, cases: Sequence[Case], doubted: frozenset[str] = frozenset()
) -> tuple[float, ...]:
    """`factor` in each of `cases`: a device that is slower than it is taken for has kernels that are better.

    `doubted`: what is not known of the system that is timed.  Of the one that was measured nothing else is moved: what
    is known of a device there is known of it here.
    """
    system = systems.load(generation.system)
    whole, layout = models.load(generation.model), generation.layout
    work = flops.hardware_flops(whole, whole.seq, layout.global_batch, layout.recompute) / layout.world
    at_few, at_more = (_modelled(generation, layers, system, cases, doubted) for layers in (FEW, MORE))
    seconds = at_few + (whole.layers - FEW) * (at_more - at_few) / (MORE - FEW)
    rates = (generation.rate.at(case.of(generation.rate.key)) for case in cases)
    return tuple(work / rate / float(took) for rate, took in zip(rates, seconds, strict=True))


def _modelled(
    generation: CalibrationPoint, layers: int, system: System, cases: Sequence[Case], doubted: frozenset[str]
) -> Lanes:
    """Seconds of a step so deep on the device that was measured, with kernels as the model has them, [cases]."""
    experiment, traces = _traced(generation, layers)
    itself = [with_values(drawn(system, case, doubted), {PACE: 1.0}) for case in cases]
    return step_seconds(experiment, itself, traces, [1.0] * len(cases))


@cache
def _traced(generation: CalibrationPoint, layers: int) -> tuple[Experiment, list[Trace]]:
    experiment = generation.experiment(replace(models.load(generation.model), layers=layers))
    return experiment, trace_roles(experiment)
