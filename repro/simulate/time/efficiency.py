"""How much longer a generation's kernels take than the model of its device says, from its published point."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from repro import models, systems
from repro.models import flops
from repro.simulate.time.calibration_points import CalibrationPoint
from repro.simulate.time.timed import timed
from repro.simulate.trace.roles import trace_roles


@cache
def factor(generation: CalibrationPoint) -> float:
    """Seconds of its kernels over seconds of the modelled ones.

    The step is a straight line in the number of layers, so two shallow ones say what a deep one takes.  All of it is
    taken for kernels: on a node, messages have to hide behind them (tests/simulate/time/test_device.py).
    """
    whole, system = models.load(generation.model), systems.load(generation.system)
    few, more = 2, 4

    def modelled(layers: int) -> float:
        experiment = generation.experiment(replace(whole, layers=layers))
        return timed(experiment, system, trace_roles(experiment), factor=1.0).step_s

    at_few = modelled(few)
    per_layer = (modelled(more) - at_few) / (more - few)
    seconds = at_few + (whole.layers - few) * per_layer
    layout = generation.layout
    work = flops.hardware_flops(whole, whole.seq, layout.global_batch, layout.recompute) / layout.world
    return work / generation.flops_per_device / seconds
