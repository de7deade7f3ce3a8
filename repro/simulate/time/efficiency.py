"""How good a generation's kernels are: how much longer they take than the model of its device says, from its published
point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from repro.config import Experiment, models, systems
from repro.config.system import System
from repro.config.systems.unknowns import PACE, Case, Unknown, drawn, with_values
from repro.model import flops
from repro.simulate.time.calibration_points import CalibrationPoint
from repro.simulate.time.device import Kernels
from repro.simulate.time.lanes import Lanes
from repro.simulate.time.timed import step_seconds
from repro.simulate.trace.roles import Trace, trace_roles

FEW, MORE = 2, 4
"""Layers.  The step is a straight line in their number, so two shallow ones say what a deep one takes."""


def kernels(generation: CalibrationPoint) -> Kernels:
    """Those with which the published step takes as long as published.

    All of what is left is taken for kernels: on a node, messages have to hide behind them
    (tests/simulate/time/test_device.py).
    """
    return kernels_in(generation, (Case(),))[0]


@cache
def kernels_in(
    generation: CalibrationPoint, cases: Sequence[Case], doubted: frozenset[str] = frozenset()
) -> tuple[Kernels, ...]:
    """`kernels` in each of `cases`: on a device that is slower than it is taken for they are better, and where products
    are as fast as alone the others have all that is left.

    `doubted`: what is not known of the system that is timed.  Of the one that was measured nothing else is moved: what
    is known of a device there is known of it here.
    """
    system = systems.load(generation.system)
    whole, layout = models.load(generation.model), generation.layout
    work = flops.hardware_flops(whole, whole.seq, layout.global_batch, layout.recompute) / layout.world
    itself = [with_values(drawn(system, case, doubted), {PACE: 1.0}) for case in cases]

    def value(of: Unknown | None) -> Lanes:
        return np.array([of.at(case.of(of.key)) if of is not None else 0.0 for case in cases])

    attention, start = value(generation.attention_rate), generation.attention_start
    passes, host = value(generation.passes_time), value(generation.operator_time)
    measured = list(zip(passes.tolist(), host.tolist(), attention.tolist(), strict=True))

    def seconds(products: float, others: float) -> Lanes:
        """Of the step on the device that was measured, [cases]."""
        of_cases = [Kernels(products, others, passes, host, rate, start) for passes, host, rate in measured]
        at_few, at_more = (_timed(generation, layers, itself, of_cases) for layers in (FEW, MORE))
        return at_few + (whole.layers - FEW) * (at_more - at_few) / (MORE - FEW)

    published, modelled = work / value(generation.rate), seconds(1.0, 1.0)
    every = seconds(2.0, 2.0) - modelled
    # Kernels that take less than the model says do so alike.
    share = np.where(published > modelled, value(generation.products_share), 1.0)
    other = seconds(1.0, 2.0) - modelled if (share != 1).any() else 0 * every
    beyond = (published - modelled) / (share * (every - other) + other)
    found = zip((share * beyond).tolist(), beyond.tolist(), measured, strict=True)
    return tuple(
        Kernels(1 + products, 1 + others, passes, host, rate, start)
        for products, others, (passes, host, rate) in found
    )


def _timed(
    generation: CalibrationPoint, layers: int, itself: Sequence[System], of_cases: Sequence[Kernels]
) -> Lanes:
    """Seconds of a step so deep, [cases]."""
    experiment, traces = _traced(generation, layers)
    return step_seconds(experiment, itself, traces, of_cases)


@cache
def _traced(generation: CalibrationPoint, layers: int) -> tuple[Experiment, list[Trace]]:
    experiment = generation.experiment(replace(models.load(generation.model), layers=layers))
    return experiment, trace_roles(experiment)
