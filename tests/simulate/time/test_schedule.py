"""Tests of the schedule of a step: properties for any numbers, pipelines calculated by hand, and parts of a stage."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.config import Experiment, Layout, Model, systems
from repro.config.system import System
from repro.config.systems.unknowns import with_values
from repro.parallel.pipeline.schedule import BACKWARD, FORWARD, Action, bubble_ratio, build_schedule
from repro.simulate.time import breakdown
from repro.simulate.time.breakdown import STAGE_SEND, StageTime
from repro.simulate.time.cross_stage import CoreWork, SharedCores
from repro.simulate.time.device import MODELLED_KERNELS
from repro.simulate.time.predict import Prediction, predict
from repro.simulate.time.program import Await, Issue, OperatorBlock, Send, StageProgram, split_into_runs
from repro.simulate.time.schedule import Timeline, schedule
from repro.simulate.trace.roles import Trace, roles, trace
from tests.simulate.time.networks import Wire

MODEL = Model(name="small", layers=4, hidden=512, heads=8, vocab=2048, seq=256)
BASE = Layout(micro_batch=2, global_batch=16, precision="fp16", recompute=True)
NO_OVERLAP = {"overlap": False, "tp_overlap": False}
LAYOUTS = {
    "one": replace(BASE, dp=1),
    "dp-z0": replace(BASE, dp=8),
    "dp-z1": replace(BASE, dp=8, zero=1),
    "dp-z2": replace(BASE, dp=8, zero=2),
    "dp-z3": replace(BASE, dp=8, zero=3),
    "tp": replace(BASE, tp=4),
    "tp-sp": replace(BASE, tp=4, sp=True),
    "pp": replace(BASE, pp=4),
    "pp-gpipe": replace(BASE, pp=2, schedule="gpipe"),
    "pp-interleaved": replace(BASE, pp=2, schedule="interleaved", chunks=2),
    "2020": replace(BASE, pp=2, tp=2, dp=2, **NO_OVERLAP, kernels="softmax", scatter_gather=True),
    "2021": replace(BASE, pp=2, tp=2, **NO_OVERLAP, schedule="interleaved", chunks=2),
    "2019": replace(BASE, tp=2, dp=4, zero=1, zero1_reduce="all-reduce", **NO_OVERLAP, kernels="unfused"),
}


def experiment(name: str) -> Experiment:
    return Experiment(name=name, model=MODEL, layout=LAYOUTS[name], system="dgx1")


@cache
def traces(name: str) -> list[Trace]:
    return [trace(experiment(name), role) for role in roles(experiment(name))]


@cache
def base_system() -> System:
    return systems.load_system_file("dgx1-v100-16gb")


def predicted(name: str, system: System, **options: Any) -> Prediction:
    return predict(experiment(name), system, traces(name), kernels=MODELLED_KERNELS, **options)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parts_of_a_step_add_up_above_the_roofline(name: str) -> None:
    """Every wait has a message, and exposed seconds are at most the seconds of communication.

    The roofline is all FLOP of products at the peak rate, and all written bytes at the memory bandwidth.
    """
    system = base_system()
    found = predicted(name, system)
    bandwidth = system.device.memory_bandwidth.known("memory_bandwidth")
    for traced in traces(name):
        flops = sum(times * op.flops for times, op in traced.operators() if op.shapes)
        moved = sum(times * op.written for times, op in traced.operators())
        assert found.step_s >= max(flops / system.peak("fp16"), moved / bandwidth) > 0
    assert found.timeline.unmatched == 0
    for stage in found.timeline.stages:
        assert sum(stage.exposed.values()) <= sum(stage.communication.values()) * (1 + 1e-9) + 1e-12
    document = found.as_dict()
    parts = sum(document[key] for key in ("compute_s", "optimizer_s", "exposed_s", "bubble_s"))
    assert parts == pytest.approx(document["step_s"], rel=1e-6)
    phases = sum(document[key] for key in ("forward_s", "backward_s", "update_s"))
    assert phases == pytest.approx(document["step_s"], rel=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_collective_waits_for_its_last_rank(name: str) -> None:
    """One rank, and ranks without jitter, do not wait."""
    system = base_system()
    systems = [with_values(system, {"device.time.jitter_s": jitter}) for jitter in (0, 1e-4, 4e-4)]
    none, little, much = (predicted(name, each).step_s for each in systems)
    assert none == predicted(name, system).step_s
    assert none == little == much if LAYOUTS[name].world == 1 else none < little < much


# -- pipelines of known seconds ------------------------------------------------------------------------


def block(seconds: float) -> OperatorBlock:
    return OperatorBlock(seconds, (("matmul", seconds),))


def pipeline(
    layout: Layout,
    wire: float | Wire = 0.0,
    pace: Sequence[float] = (),
    by_events: bool = False,
    ranks_per_core: float = 1.0,
) -> Timeline:
    """Schedule 1 s of forward and 2 s of backward per stage and micro-batch, and a barrier at the end.

    `pace`: factor of the seconds of each stage. `by_events`: schedule every event of every micro-batch.
    """
    p, v = layout.pp, layout.chunks

    def program(stage: int) -> StageProgram:
        segments: dict[Action, list[Any]] = {}
        for chunk, micro_batch in product(range(v), range(3)):
            part, layer_s = chunk * p + stage, (pace[stage] if pace else 1.0) / v
            onwards, back = [Send(1, 0, 1)] * (part < p * v - 1), [Send(-1, 1, 1)] * (part > 0)
            segments[Action(FORWARD, micro_batch, chunk)] = [block(layer_s), *onwards]
            segments[Action(BACKWARD, micro_batch, chunk)] = [block(2 * layer_s), *back]
        tail: list[Any] = [Issue(("end",), "world", "barrier", 0.0), Await(("end",))]
        return StageProgram(segments, tail, micro_batches=3)

    messages = wire if isinstance(wire, Wire) else Wire(wire)
    programs = [program(stage) for stage in range(p)]
    return schedule(layout, programs, messages, record=by_events, ranks_per_core=ranks_per_core)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 4)])
@pytest.mark.parametrize("overlap", [True, False])
def test_pipelines_without_message_time_have_the_counted_bubble(
    name: str, p: int, m: int, overlap: bool
) -> None:
    chunks = 2 if name == "interleaved" else 1
    layout = Layout(pp=p, global_batch=m, schedule=name, chunks=chunks, overlap=overlap)
    counted = float(bubble_ratio(build_schedule(name, p, m, chunks)))
    found = pipeline(layout)
    assert found.step_s == pytest.approx(3 * m * (1 + counted))
    assert found.unmatched == 0
    # The remaining time of each stage is bubble.
    assert [stage.busy["matmul"] for stage in found.stages] == pytest.approx([3 * m] * p)


def test_overlapped_messages_cost_less_than_blocking_messages() -> None:
    layout = Layout(pp=4, global_batch=16)
    # One micro-batch: four forwards of 1 s, four backwards of 2 s, three messages each way.
    assert pipeline(Layout(pp=4), 0.25).step_s == pytest.approx(4 * 1 + 4 * 2 + 6 * 0.25)
    free, slow = pipeline(layout).step_s, pipeline(layout, 0.25).step_s
    # Warm-up and cool-down expose 3 messages each; the steady state may hide its messages.
    assert slow >= free + 6 * 0.25
    blocking = pipeline(replace(layout, overlap=False), 0.25)
    assert blocking.step_s > slow
    assert sum(blocking.stages[1].exposed.values()) >= 16 * 0.25
    assert blocking.stages[0].communication[STAGE_SEND] == pytest.approx(2 * 16 * 0.25)  # sent and received


def test_blocking_messages_of_two_chunks_are_sent_together() -> None:
    """A stage alternates the forward pass of a chunk and the backward pass of a chunk, and then sends both results.

    A chunk has half of the stage's layers. The four additional micro-batches show the time of the steady state.
    """
    layout = Layout(pp=4, global_batch=16, schedule="interleaved", chunks=2, overlap=False)
    wire = 0.25
    more = pipeline(replace(layout, global_batch=20), wire).step_s - pipeline(layout, wire).step_s
    assert more == pytest.approx(4 * 2 * (3 / 2 + 2 * wire))


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([0.5, 0.99, 1.0, 1.0, 1.3]), min_size=1, max_size=5),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.integers(1, 2),
    st.sampled_from([0.0, 0.01, 0.4, 1.7, 4.0]),
    st.booleans(),
)
def test_the_steady_state_represents_all_micro_batches(
    pace: list[float], groups: int, chunks: int, wire: float, overlap: bool
) -> None:
    """The schedule of few micro-batches is equal to that of all, for uneven stages and slow messages."""
    p = len(pace)
    keys = {"schedule": "interleaved", "chunks": chunks} if chunks > 1 and p > 1 else {}
    layout = Layout(pp=p, global_batch=6 * p * groups, overlap=overlap, **keys)
    found, full = pipeline(layout, wire, pace), pipeline(layout, wire, pace, by_events=True)
    assert found.step_s == pytest.approx(full.step_s, rel=1e-11)
    for mine, its in zip(found.stages, full.stages, strict=True):
        assert mine.bubble == pytest.approx(its.bubble, rel=1e-9, abs=1e-9)
        for name in ("busy", "exposed", "communication", "by_phase"):
            assert getattr(mine, name) == pytest.approx(getattr(its, name), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("overlap", [True, False])
def test_scheduling_cost_does_not_depend_on_micro_batches(overlap: bool) -> None:
    """64 p micro-batches need as many calls of the network as 8 p micro-batches."""

    class CountingWire(Wire):
        messages = 0

        def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
            self.messages += 1
            return self.seconds

    def messages(m: int) -> int:
        layout, wire = Layout(pp=8, global_batch=m, overlap=overlap), CountingWire(0.1)
        pipeline(layout, wire)
        return wire.messages

    assert messages(64 * 8) == messages(8 * 8)


def test_a_step_starts_during_the_previous_parameter_gather() -> None:
    """The gather takes 4 s from the start of the step, which computes 2 s before it needs the parameters."""
    gather = Issue(("gather",), "dp", "all-gather of parameters (dp)", 4.0)
    forward = [block(2.0), Await(gather.key), block(3.0)]
    segments = {Action(FORWARD, 0): forward, Action(BACKWARD, 0): [block(6.0)]}
    stage = StageProgram(segments, [block(1.0), gather], micro_batches=1)
    found = schedule(Layout(), [stage], Wire())
    assert found.step_s == 4 + 3 + 6 + 1
    assert found.stages[0].exposed == {gather.label: 2.0}
    assert found.unmatched == 0


def test_a_stage_starts_a_step_after_its_own_update() -> None:
    """The last of two stages updates for 5 s. The first updates for 1 s, and then starts its forward pass."""
    norm = Issue(("norm",), "world", "all-reduce of norm (world)", 0.0)

    def stage(update: float, forward: list[Any], backward: list[Any]) -> StageProgram:
        segments = {Action(FORWARD, 0): forward, Action(BACKWARD, 0): backward}
        return StageProgram(segments, [norm, Await(norm.key), block(update)], micro_batches=1)

    first = stage(1.0, [block(1.0), Send(1, 0, 1)], [block(2.0)])
    last = stage(5.0, [block(1.0)], [block(2.0), Send(-1, 1, 1)])
    found = schedule(Layout(pp=2), [first, last], Wire())
    assert found.step_s == 1 + 2 + 2 + 5  # the first forward pass has ended when the last stage starts
    assert [found.stages[s].by_phase["update"] for s in (0, 1)] == [1.0, 5.0 + 2.0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_trace_events_contain_every_second_of_every_stream(name: str) -> None:
    """The durations of a stage's events sum to its breakdown, and events of one stream do not overlap."""
    found = predicted(name, base_system(), record=True)
    stages = range(LAYOUTS[name].pp)
    events = list(breakdown.trace_events(found.timeline.spans, stages))
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(set(tracks.items())) == len({(pid, track) for (pid, _), track in tracks.items()})
    rows: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    annotated = dict.fromkeys(stages, 0.0)
    for event in (e for e in events if e["ph"] == "X"):
        if event["cat"] == "kernel":
            rows[event["pid"], tracks[event["pid"], event["tid"]]].append(event)
        else:
            annotated[event["pid"]] += event["dur"] / 1e6
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        assert all(b["ts"] >= a["ts"] + a["dur"] - 1e-3 for a, b in pairwise(row))
    for stage, time in enumerate(found.timeline.stages):
        event_seconds: Counter[str] = Counter()
        for event in (event for (of, _), row in rows.items() for event in row if of == stage):
            label = event["args"]["label"] if event["name"].startswith("nccl:") else "compute"
            event_seconds[label] += event["dur"] / 1e6
        assert event_seconds.pop("compute") == pytest.approx(sum(time.busy.values()))
        event_seconds.pop(STAGE_SEND, None)  # an event of the receiver; a breakdown counts both stages
        counted = {k: v for k, v in time.communication.items() if v and k != STAGE_SEND}
        assert dict(event_seconds) == pytest.approx(counted)
        assert annotated[stage] <= found.step_s * (1 + 1e-9)
    if len(stages) == 1:
        (time,) = found.timeline.stages
        stage_s = sum(time.busy.values()) + sum(time.exposed.values()) + time.bubble
        assert found.step_s == pytest.approx(stage_s)
        assert min(event["ts"] for event in rows[0, "compute"]) == 0


# --- stages that share cores


def gpipe_step_s(p: int, micro_batches: int, ranks_per_core: float) -> float:
    layout = Layout(pp=p, global_batch=micro_batches, schedule="gpipe")
    return pipeline(layout, ranks_per_core=ranks_per_core).step_s


def test_computing_stages_use_the_cores_of_waiting_stages() -> None:
    """Two stages, two micro-batches, twice as many ranks as cores: F0 | F1 F0 | F1 | B0 | B1 B0 | B1. A stage
    that computes alone is twice as fast."""
    assert gpipe_step_s(2, 2, 1.0) == pytest.approx(3 * 1 + 3 * 2)
    assert gpipe_step_s(2, 2, 2.0) == pytest.approx(2 * 0.5 + 1 + 2 * 1 + 2)
    # No core is idle, so the total work runs at the rate of all cores.
    assert gpipe_step_s(4, 4, 4.0) == pytest.approx(4 * 3)
    assert gpipe_step_s(1, 2, 2.0) == pytest.approx(gpipe_step_s(1, 2, 1.0))


# --- parts of a stage

NORM_REDUCTION = Issue(("tail",), "world", "norm", 2.0)


@pytest.mark.parametrize(
    ("now", "end", "across", "exposed", "bubble"),
    [
        (1.0, 6.0, True, 2.0, 3.0),  # the other stage arrived three seconds later
        (1.0, 2.5, True, 1.5, 0.0),
        (1.0, 6.0, False, 5.0, 0.0),  # a group inside the stage: no bubble
        (6.0, 1.0, True, 0.0, 0.0),
    ],
)
def test_a_wait_longer_than_its_collective_is_bubble(
    now: float, end: float, across: bool, exposed: float, bubble: float
) -> None:
    time = StageTime()
    for times in (1, 2):
        time.waited_for(NORM_REDUCTION, now, end, across=across)
        assert (time.exposed["norm"], time.bubble) == (times * exposed, times * bubble)


def test_a_wait_before_a_message_starts_is_bubble() -> None:
    time = StageTime()
    time.waited_for_message(1.0, 4.0, 4.5)
    time.waited_for_message(1.0, 0.5, 2.0)
    assert (time.bubble, time.exposed[STAGE_SEND]) == (3.0, 0.5 + 1.0)


BLOCK, SEND = OperatorBlock(1.0, (("matmul", 1.0),)), Send(1, 0, 8)
TP_ISSUE, TP_AWAIT = Issue(("x",), "tp", "block", 1.0), Await(("x",))
DP_ISSUE, DP_AWAIT = Issue(("y",), "dp", "gradients", 1.0), Await(("y",))
WORLD_ISSUE = Issue(("y",), "world", "norm", 1.0)


@pytest.mark.parametrize(
    ("items", "runs"),
    [
        # A completed collective of tensor or data parallelism is inside a run.
        ([BLOCK, TP_ISSUE, BLOCK, TP_AWAIT, BLOCK], [(0, 5)]),
        ([BLOCK, DP_ISSUE, BLOCK, DP_AWAIT], [(0, 4)]),
        ([BLOCK, TP_ISSUE, BLOCK, TP_AWAIT, BLOCK, SEND, BLOCK], [(0, 5), (6, 7)]),
        # A collective of the world, or one without an await, ends a run.
        ([BLOCK, WORLD_ISSUE, BLOCK, DP_AWAIT], [(0, 1), (2, 3), (4, 4)]),
        ([BLOCK, TP_ISSUE, BLOCK], [(0, 1), (2, 3)]),
        # A run ends before a collective in flight.
        ([BLOCK, TP_ISSUE, SEND, TP_AWAIT], [(0, 1), (3, 3)]),
    ],
)
def test_a_run_contains_only_items_whose_seconds_are_known(
    items: list[Any], runs: list[tuple[int, int]]
) -> None:
    """`runs`: first and last position of each run. Runs alternate with the items between them."""
    expected = []
    for (first, last), (following, _) in zip(runs, [*runs[1:], (len(items), 0)], strict=True):
        expected += [(True, items[first:last]), (False, items[last:following])]
    assert list(split_into_runs(items)) == expected


@pytest.mark.parametrize(
    ("oversubscription", "stages", "works", "ends"),
    [
        # The first work runs alone for 1 s at twice the rate, then 2 s with the second, which then has 2 s left.
        (2.0, 2, [(0.0, 4.0), (1.0, 4.0)], [3.0, 4.0]),
        # The first work does 1.5 of 4 s alone and ends at 3.5 s, when the second work has done 2.5 s.
        (1.5, 2, [(0.0, 4.0), (1.0, 4.0)], [3.5, 4.5]),
        (1.0, 2, [(0.0, 4.0), (1.0, 4.0)], [4.0, 5.0]),
        # Four stages share two cores: two that compute have a core each, three have two thirds of a core each.
        (2.0, 4, [(0.0, 2.0), (0.0, 2.0)], [1.0, 1.0]),
        (2.0, 4, [(0.0, 2.0), (0.0, 2.0), (0.0, 4.0)], [1.5, 1.5, 2.5]),
        # Time advances while no stage computes.
        (1.0, 2, [(5.0, 1.0), (7.0, 1.0)], [6.0, 8.0]),
    ],
)
def test_computing_stages_share_the_free_cores(
    oversubscription: float, stages: int, works: list[tuple[float, float]], ends: list[float]
) -> None:
    """Each stage has one work with a start and a length, and uses at most one core."""
    cores, added = SharedCores(oversubscription, stages), [CoreWork(*work) for work in works]
    for work in added:
        cores.add(work)
    while cores.works:
        ended = cores.advance()
        assert ended == [work for work in added if work.end == cores.now], "equal ends are returned together"
    assert [work.end for work in added] == pytest.approx(ends)
    assert cores.now == pytest.approx(max(ends))
