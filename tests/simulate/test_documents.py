"""What is said of a simulated step: in its document, its record, and of all trials of a fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, Model, systems
from repro.results.record_parts import TrafficRow
from repro.simulate import step
from repro.simulate.plan import fit
from repro.simulate.plan.fit import FitAnswer, FitTrial
from repro.simulate.record import simulated_record
from repro.simulate.step import NO_STEP_TIME, Simulation, simulate

EXPERIMENT = Experiment(
    name="two-stages",
    model=Model(name="m", layers=4, hidden=64, heads=4, vocab=512, seq=32),
    layout=Layout(dp=3, tp=2, pp=2, precision="fp16", micro_batch=2, global_batch=24),
    system="dgx2",
)
DGX2 = systems.load_system_file("dgx2")


@pytest.fixture(scope="module")
def found() -> Simulation:
    return replace(simulate(EXPERIMENT, DGX2), trace_seconds=1.23456)


def sent(group: str, link: str, count: int) -> TrafficRow:
    words = {"op": "all_reduce", "purpose": "x", "size": 2, "calls": 1, "payload_bytes": 7}
    return TrafficRow(**words, group=group, link=link, sent_bytes=count)  # type: ignore[arg-type]


def test_the_document_is_of_the_fullest_and_the_busiest_role(found: Simulation) -> None:
    first, last = found.roles
    rows = [sent("dp", "far", 10), sent("tp", "near", 30), sent("dp", "near", 2)]
    first, last = replace(first, traffic=[sent("dp", "far", 41)]), replace(last, traffic=rows)
    fullest = max((first, last), key=lambda role: role.replay.peak_reserved)
    message = replace(found, roles=[first, last]).as_dict()
    assert (message["gpus"], message["outcome"], message["reason"]) == (12, "ok", "")
    assert message["trace_seconds"] == 1.235
    assert message["comm"] == {
        "role": "last",
        "sent_bytes": 42,
        "bytes_by_group": {"dp": 12, "tp": 30},
        "bytes_by_link": {"far": 10, "near": 32},
        "rows": [row.as_dict() for row in rows],
    }
    memory = message["memory"]
    assert memory["peak_bytes"] == fullest.memory.peak_bytes
    assert memory["reserved_bytes"] == fullest.replay.peak_reserved
    assert memory["limit_bytes"] + memory["context_bytes"] == DGX2.device.memory_bytes.value
    by_role = {
        name: (role["stage"], role["stages"], role["sent_bytes"]) for name, role in memory["by_role"].items()
    }
    assert by_role == {"first": (0, 1, 41), "last": (1, 1, 42)}
    assert message["flops"]["operators_of_busiest_rank"] == max(first.operator_flops, last.operator_flops)
    assert (message["time"], message["no_time"]) == (None, ""), "nobody asked"


def test_of_what_does_not_fit_no_time_is_reported() -> None:
    timed = simulate(EXPERIMENT, DGX2, time=True)
    assert timed.as_dict()["time"]["step_s"] > 0
    small = simulate(EXPERIMENT, DGX2, time=True, memory_limit=DGX2.context() + 1_000_000)
    assert small.limit_bytes == 1_000_000
    message = small.as_dict()
    assert (message["outcome"], message["time"], message["no_time"]) == ("oom", None, NO_STEP_TIME)
    assert simulate(EXPERIMENT, DGX2, memory_limit=1).limit_bytes == 0, "the context alone is more"


def test_a_trace_is_timed_from_beginning_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((5.0, 7.5))
    monkeypatch.setattr(step, "perf_counter", lambda: next(times))
    assert simulate(EXPERIMENT, DGX2).trace_seconds == 2.5


def test_a_record_says_of_each_role_how_many_ranks_it_stands_for(found: Simulation) -> None:
    first, last = found.roles
    roles = [replace(role, replay=replace(role.replay, retries=n)) for role, n in ((first, 3), (last, 1))]
    record = simulated_record(EXPERIMENT, replace(found, roles=roles), DGX2, suite="s", wall_s=9.87654)
    metrics = record.metrics
    assert (record.wall_s, metrics["trace_seconds"]) == (9.877, 1.235)
    assert [(role.name, role.ranks) for role in record.roles] == [("first", 6), ("last", 6)]
    assert metrics["parameters"] == first.parameters
    assert metrics["memory.retries"] == 3
    assert record.comm == first.traffic


def test_a_fit_counts_what_its_trials_took() -> None:
    """One that was not traced took none of it."""
    model = Model(name="m", layers=1, hidden=64, heads=4, vocab=512, seq=32)
    question = fit.FitQuestion(
        model, Layout(), DGX2, 10**10, fit.LAYERS, 0, free_batch=True, expandable=False
    )
    traced = {"traces": 2, "trace_seconds": 0.50049, "reserved_bytes": 70, "largest_term": "activations"}
    fits = FitTrial(3, "ok", 90, detail=traced)
    fails = FitTrial(
        4, "oom", 110, "activations", "too much", {"traces": 1, "trace_seconds": 1.0, "largest_term": "x"}
    )
    message = fit.fit_document(question, FitAnswer(fits, fails, [fits, fails, FitTrial(9, "hang", None)]))
    assert (message["traces"], message["trace_seconds"]) == (3, 1.5)
    assert message["trials"] == [
        {"value": 3, "outcome": "ok", "needed_bytes": 90},
        {"value": 4, "outcome": "oom", "needed_bytes": 110},
        {"value": 9, "outcome": "hang", "needed_bytes": None},
    ]
    assert (message["binding"], message["limit_bytes"]) == ("activations", 10**10 - DGX2.context())
    assert message["largest"]["needed_bytes"] == 70, "what it held"
    assert message["first_failing"]["needed_bytes"] == 110
    assert (message["largest"]["layers"], message["first_failing"]["largest_term"]) == (3, "x")
