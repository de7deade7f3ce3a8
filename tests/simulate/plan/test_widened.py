"""A shallow trace with another micro-batch, by hand: what lies between one sample and three."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from repro.config import Layout
from repro.simulate.plan.extrapolation.linear import MAX_INSERTED_OPERATORS, _aligned, widen_traces
from repro.simulate.trace.events import Event, Message, Operator, PhaseStart, Wait
from repro.simulate.trace.roles import PipelineRole, Trace


def product(samples: int) -> Operator:
    return Operator("mm", 10 * samples, 100 * samples + 1, 50 * samples, ((samples, 4), (4, 5)), 2)


def copy(samples: int) -> Operator:
    """Which one sample does not need."""
    return Operator("copy", 0, 6 * samples, 6 * samples, (), 2)


def reduced(samples: int, work: int) -> Message:
    return Message("all_reduce", "tp", 2, 8 * samples, 8 * samples, "x", work)


def add(samples: int) -> Operator:
    return Operator("add", samples, 3 * samples, 2 * samples, (), 2)


def update(layers: int) -> Operator:
    return Operator("adamw", 7 * layers, 9 * layers, 9 * layers, (), 4)


GATHER = Message("all_gather", "dp", 4, 64, 48, "parameters", 0)
FORWARD, OPTIMIZER = PhaseStart("forward", 0), PhaseStart("optimizer", -1)


def block(samples: int, work: int) -> list[Event]:
    copied: list[Event] = [copy(samples)] * (samples > 1)
    return [product(samples), *copied, reduced(samples, work), Wait(work), add(samples)]


def traced(samples: int, layers: int) -> Trace:
    blocks = [event for i in range(layers) for event in block(samples, 5 + i)]
    events = [GATHER, FORWARD, *blocks, OPTIMIZER, update(layers)]
    return Trace(PipelineRole("all", 0, 1), Layout(), events, 1, len(events), 0, 0, 0, 0.0)


def family(base: Trace, wider: Trace, deeper: Trace) -> Any:
    """Of traces with one sample, three, and one."""
    profiles = [SimpleNamespace(layout=Layout(micro_batch=n), timed=of) for n, of in ((1, base), (3, wider))]
    return SimpleNamespace(base=profiles[0], wider=profiles[1], deeper=SimpleNamespace(timed=deeper))


LAYERS = 1, 3
"""Of the family's traces."""
FAMILY = family(traced(1, 1), traced(3, 1), traced(1, 3))


@pytest.mark.parametrize("samples", [2, 3, 5])
def test_every_block_of_both_traces_grows_and_the_update_does_not(samples: int) -> None:
    for found, layers in zip(widen_traces(FAMILY, samples), LAYERS, strict=True):
        assert found.events == traced(samples, layers).events
        assert (found.step_start, found.step_stop) == (1, len(found.events))


def test_the_narrowest_is_as_it_was() -> None:
    assert widen_traces(FAMILY, 1) == (FAMILY.base.timed, FAMILY.deeper.timed)


def test_of_two_sizes_that_share_a_neighbour_the_one_seen_more_often_is_taken() -> None:
    """Where a place is new, an operator alone says how it grows."""

    def of(*growth: int) -> Trace:
        events: list[Event] = [FORWARD]
        for grown in growth:
            events += [add(1), Operator("mm", grown, 0, 0, (), 2)]
        return Trace(PipelineRole("all", 0, 1), Layout(), events, 0, len(events), 0, 0, 0, 0.0)

    odd = Operator("other", 0, 0, 0, (), 2)
    events: list[Event] = [FORWARD, odd, Operator("mm", 1, 0, 0, (), 2), odd]
    alone = Trace(PipelineRole("all", 0, 1), Layout(), events, 0, 4, 0, 0, 0, 0.0)
    _, found = widen_traces(family(of(1, 1, 1), of(30, 20, 20), alone), 3)
    assert found.events == [FORWARD, odd, Operator("mm", 20, 0, 0, (), 2), odd]


@pytest.mark.parametrize(
    ("more", "found"), [(MAX_INSERTED_OPERATORS - 1, True), (MAX_INSERTED_OPERATORS, False)]
)
def test_so_many_operators_may_be_in_the_wide_trace_only(more: int, found: bool) -> None:
    narrow = [product(1), add(1)]
    wide = [product(3), *[copy(3)] * more, add(3)]
    first, second = _aligned(narrow, wide)
    assert len(first) == (1 + more if found else 1)
    assert second == ((add(3),) if found else ())
