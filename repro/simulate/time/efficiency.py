"""How much longer a generation's kernels take than the model of its device says, from its published point."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from repro import models, systems
from repro.config import Experiment, Training
from repro.models import flops
from repro.simulate.time.calibration_points import CalibrationPoint
from repro.simulate.time.timed import timed
from repro.simulate.trace.roles import trace_roles

DROPOUT = Training(dropout=0.1, attention_dropout=0.1)
"""As all of these models were trained (1909.08053 sec. 4.2)."""


@cache
def factor(generation: CalibrationPoint) -> float:
    """Seconds of its kernels over seconds of the modelled ones.

    A step on one device is a straight line in the number of layers, so two shallow ones say what a deep one
    takes.
    """
    whole, system = models.load(generation.model), systems.load(generation.system)
    few, more = 2, 4

    def modelled(layers: int) -> float:
        model = replace(whole, layers=layers)
        experiment = Experiment(
            name="calibration",
            model=model,
            layout=generation.layout(),
            training=DROPOUT,
            system=system.name,
        )
        return timed(experiment, system, trace_roles(experiment), factor=1.0).step_s

    at_few = modelled(few)
    per_layer = (modelled(more) - at_few) / (more - few)
    seconds = at_few + (whole.layers - few) * per_layer
    work = flops.hardware_flops(whole, whole.seq, generation.micro_batch, recompute=True)
    return work / generation.flops_per_device / seconds
