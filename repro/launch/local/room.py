"""Whether this machine's memory can hold what an experiment keeps at the least.

What is refused here could end in nothing but out of memory: the bound is below what any engine needs.  What may or may
not fit is started, and its record says how it ended.
"""

from __future__ import annotations

from repro.config import Experiment
from repro.config.layout import ELEMENT_BYTES
from repro.model.parameters import total
from repro.simulate.plan.closed_form import state_bytes
from repro.util import units
from repro.util.resources import memory_and_swap


def too_large(experiment: Experiment) -> str:
    """What is too large of `experiment` for the memory that is available, and what would fit; empty if nothing is."""
    states, inputs = (_held(experiment, size) for size in (_states(experiment), _inputs(experiment)))
    free = memory_and_swap()
    if states > free:
        return (
            f"{units.size(states)} of memory for model states alone, and {units.size(free)} are free here; "
            f"model = {experiment.model.name!r} has {total(experiment.model):,} parameters, and at most "
            f"{int(total(experiment.model) * free / states):,} fit in this layout"
        )
    if states + inputs > free:
        fits = int(experiment.layout.micro_batch * (free - states) / inputs)
        return (
            f"{units.size(states + inputs)} of memory for model states and the blocks' inputs alone, and "
            f"{units.size(free)} are free here; layout.micro_batch = {experiment.layout.micro_batch}, "
            f"and at most {fits} fit"
        )
    return ""


def _states(experiment: Experiment) -> float:
    """Model states of all ranks in bytes, without what several of them hold of one tensor-parallel replica."""
    return experiment.layout.copies * sum(state_bytes(total(experiment.model), experiment.layout).values())


def _inputs(experiment: Experiment) -> float:
    """Inputs of all blocks of one micro-batch in bytes, on every replica: what even recomputation keeps."""
    model, layout = experiment.model, experiment.layout
    tokens = layout.micro_batch * experiment.seq
    return layout.dp * model.layers * tokens * model.hidden * ELEMENT_BYTES[layout.precision]


def _held(experiment: Experiment, size: float) -> float:
    """At most what a limit lets the ranks take."""
    limit = experiment.limits.memory_bytes * experiment.layout.world
    return min(size, limit) if limit else size
