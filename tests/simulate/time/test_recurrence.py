"""Tests of the recurrence over actions against the event-level schedule, and of its arrays against `Boundary`."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from repro.config import Experiment, Layout, Model, systems
from repro.config.errors import ConfigError
from repro.config.systems.unknowns import drawn, quantiles_in_cases, unknowns
from repro.parallel.pipeline.boundary import Boundary
from repro.parallel.pipeline.schedule import Action, batches, dependency_of
from repro.simulate.time.device import MODELLED_KERNELS
from repro.simulate.time.schedule import schedule_traces
from repro.simulate.time.stage import StageStreams
from repro.simulate.time.step_order import FINISH, START, StepOrder, step_order
from repro.simulate.trace.roles import trace_roles

MODEL = Model(name="tiny", layers=8, hidden=64, heads=8, vocab=256, seq=32)
SELENE = systems.load_system_file("selene")


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    pp = draw(st.sampled_from([1, 2, 4]))
    tp, cp = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (1, 2)]))
    name = draw(st.sampled_from(["1f1b", "gpipe", "interleaved"])) if pp > 1 else "1f1b"
    dp = draw(st.sampled_from([1, 2, 4]))
    micro_batches = draw(st.sampled_from([1, 2, 9 if name == "interleaved" else 5]))
    degrees = {"dp": dp, "tp": tp, "cp": cp, "pp": pp}
    uneven = name != "interleaved" and pp == 4 and draw(st.booleans())
    try:
        layout = Layout(
            **degrees,
            schedule=name,
            chunks=2 if name == "interleaved" else 1,
            stage_layers=(1, 3, 2, 2) if uneven else (),
            zero=draw(st.sampled_from([0, 1, 2, 3])),
            sp=tp > 1 and draw(st.booleans()),
            scatter_gather=tp > 1 and pp > 1 and draw(st.booleans()),
            recompute=draw(st.booleans()),
            overlap=draw(st.booleans()),
            tp_overlap=draw(st.booleans()),
            micro_batch=1,
            global_batch=dp * micro_batches * pp,
        )
        return Experiment(name="random", model=MODEL, layout=layout, system="selene")
    except ConfigError:
        reject()


@settings(max_examples=40)
@given(experiments())
def test_the_recurrence_equals_the_event_level_schedule(experiment: Experiment) -> None:
    """The breakdowns are equal, and so are the step times with other values of uncertain inputs."""
    try:
        traces = trace_roles(experiment)
    except ConfigError:
        reject()
    cases = drawn(SELENE, quantiles_in_cases(unknowns(SELENE)))
    with mock.patch.object(StageStreams, "run_events", side_effect=AssertionError("events were scheduled")):
        found = schedule_traces(experiment, SELENE, traces, MODELLED_KERNELS)
        in_cases = schedule_traces(experiment, cases, traces, MODELLED_KERNELS).seconds
    expected = schedule_traces(experiment, SELENE, traces, MODELLED_KERNELS, record=True)
    assert found.step_s == pytest.approx(expected.step_s, rel=1e-9)
    assert found.unmatched == expected.unmatched
    tolerance = 1e-9 * float(expected.step_s)
    for mine, its in zip(found.stages, expected.stages, strict=True):
        assert mine.bubble == pytest.approx(its.bubble, rel=1e-9, abs=tolerance)
        for table in ("busy", "exposed", "communication", "by_phase"):
            ours, theirs = Counter(getattr(mine, table)), Counter(getattr(its, table))
            for key in ours | theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-9, abs=tolerance), key
    by_events = schedule_traces(experiment, cases, traces, MODELLED_KERNELS, record=True)
    assert in_cases == pytest.approx(by_events.seconds, rel=1e-9)


Operation = tuple[str, object]
"""`run` with an action, or `stamp` or `wait` with the sender and the action of a message."""


def operations_of(order: StepOrder, stage: int) -> list[Operation]:
    """Return the operations of a stage in the arrays."""

    def message(number: int) -> tuple[int, Action]:
        sender, position = divmod(int(number), len(order.schedule[0]))
        return sender, order.schedule[sender][position]

    found: list[Operation] = [("stamp", message(m)) for m in order.first[stage] if m >= 0]
    for position, action in enumerate(order.schedule[stage]):
        for step in range(START, FINISH + 1):
            found += [("wait", message(m)) for m in order.awaited[step][stage, position] if m >= 0]
            found += [("stamp", message(m)) for m in order.stamped[step][stage, position] if m >= 0]
            found += [("run", action)] if step == START else []
    return found + [("wait", message(m)) for m in order.last[stage] if m >= 0]


def expected_operations(order: StepOrder, stage: int, layout: Layout) -> list[Operation]:
    """Return the operations of a stage by the rules of `Boundary`."""

    def input_of(action: Action, stage: int) -> tuple[int, Action] | None:
        needed = dependency_of(action, stage, layout.pp, layout.chunks)
        return needed if needed is not None and needed[0] != stage else None

    receivers = {
        needed: (receiver, action.kind)
        for receiver, of_stage in enumerate(order.schedule)
        for action in of_stage
        if (needed := input_of(action, receiver)) is not None
    }
    found: list[Operation] = []
    actions = order.schedule[stage]
    under_way: dict[tuple[int, str], list[tuple[int, Action]]] = defaultdict(list)

    def add(kind: str, several: list[tuple[int, Action] | None]) -> None:
        found.extend((kind, one) for one in several if one is not None)

    if layout.pp > 1 and not layout.overlap:
        parts = batches(actions, layout.chunks)
        add("stamp", [input_of(action, stage) for action in parts[0]])
        add("wait", [input_of(action, stage) for action in parts[0]])
        for batch, following in pairwise([*parts, ()]):
            found += [("run", action) for action in batch]
            sent = [(stage, action) if (stage, action) in receivers else None for action in batch]
            inputs = [input_of(action, stage) for action in following]
            for kind in ("stamp", "wait"):
                add(kind, [*sent, *inputs])
        return found
    inputs = [*(input_of(action, stage) for action in actions), None]
    add("stamp", inputs[:1])
    for position, action in enumerate(actions):
        add("wait", [inputs[position]])
        add("stamp", [inputs[position + 1]])
        found.append(("run", action))
        if (stage, action) in receivers:
            queue = under_way[receivers[stage, action]]
            if len(queue) == Boundary.UNDER_WAY:
                add("wait", [queue.pop(0)])
            queue.append((stage, action))
            add("stamp", [(stage, action)])
    for queue in under_way.values():
        add("wait", list(queue))
    return found


@given(
    st.sampled_from(["1f1b", "gpipe", "interleaved"]),
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(2, 3),
    st.booleans(),
)
def test_arrays_contain_the_operations_of_each_stage_in_order(
    name: str, stages: int, micro_batches: int, chunks: int, overlap: bool
) -> None:
    interleaved = name == "interleaved"
    assume(stages > 1 or not interleaved)
    layout = Layout(
        pp=stages, schedule=name, chunks=chunks if interleaved else 1, overlap=overlap,
        global_batch=micro_batches * (stages if interleaved else 1),
    )  # fmt: skip
    order = step_order(layout)
    for stage in range(stages):
        assert operations_of(order, stage) == expected_operations(order, stage, layout)
