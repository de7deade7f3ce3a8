"""Tests of plans: candidate layouts, their outcomes, and the order of the rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from repro.config import ConfigError, Layout, Model, models, systems
from repro.parallel.mesh import shape_only_mesh
from repro.simulate.plan.candidates import PlanRequest, candidates, communicator_bytes
from repro.simulate.plan.plan import Plan, search_layouts
from repro.simulate.plan.rows import (
    FULL,
    OK,
    OOM,
    RETAINED,
    STATES,
    PlanRow,
    ideal_s,
    plan_order,
    training_cost,
)
from repro.util.processes import Workers

CONTEXT = systems.load_system_file("dgx2").context()
TINY = Model(name="tiny", layers=4, hidden=128, heads=4, vocab=512, seq=64)
SMALL = replace(TINY, hidden=512, vocab=1024)


def request(gpus: int, limit: int = 10**9, model: Model = TINY, **given: Any) -> PlanRequest:
    return PlanRequest(model, systems.load_system_file("dgx2"), gpus, CONTEXT + limit, model.seq, given)


def search(query: PlanRequest) -> Plan:
    """Search the layouts of a request with one worker."""
    with Workers(1) as workers:
        return search_layouts(query, workers)


LONG, WIDE = replace(TINY, seq=131072), replace(TINY, heads=32)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # The model has 4 heads and 4 layers.
        (
            {"global_batch": 32},
            {"tp": {1, 2, 4}, "pp": {1, 2, 4}, "zero": {0, 1, 2, 3}, "precision": {"fp16"}},
        ),
        ({"tp": 2, "zero": 1, "global_batch": 32}, {"tp": {2}, "zero": {1}, "pp": {1, 2, 4}}),
        ({"micro_batch": 2, "recompute": True}, {"micro_batch": {2}, "recompute": {True}}),
        ({"pa": True}, {"pa": {True}}),
        ({"dp": 4, "global_batch": 32}, {"dp": {4}, "tp": {1, 2, 4}}),
        ({"chunks": 2, "global_batch": 64}, {"schedule": {"interleaved"}, "pp": {2}}),
        # Fused attention retains no scores, so selective recomputation is no separate layout there.
        ({"kernels": "softmax"}, {"recompute": {False, "selective", True}}),
        ({}, {"recompute": {False, True}}),
        ({"cp": 4, "global_batch": 32}, {"cp": {4}, "dp": {1, 2, 4}, "world": {16}}),
        ({"cp": 4, "tp": 4, "pp": 1}, {"dp": {1}, "zero": {0, 1, 2, 3}}),
        # A rank has 8,192 or more tokens of a sample.
        ({"model": replace(TINY, seq=8192)}, {"cp": {1}}),
        ({"model": replace(TINY, seq=32768), "tp": 1, "pp": 1}, {"cp": {1, 2, 4}, "dp": {16, 8, 4}}),
        ({"model": LONG, "tp": 1, "pp": 1, "global_batch": 16}, {"cp": {1, 2, 4, 8, 16}, "world": {16}}),
        ({"model": LONG, "kernels": "softmax"}, {"cp": {1}}),
        # A node has 16 devices.
        ({"model": WIDE, "gpus": 64}, {"tp": {1, 2, 4, 8, 16}}),
        ({"model": WIDE, "gpus": 64, "tp": 32}, {"tp": {32}}),
    ],
)
def test_candidates_vary_only_keys_that_are_not_given(
    given: dict[str, Any], expected: dict[str, set[Any]]
) -> None:
    found = candidates(request(**{"gpus": 16, **given}))
    assert len(set(found)) == len(found)
    for layout in found:
        assert (layout.world, layout.pa) == (given.get("gpus", 16), given.get("pa", False))
        assert layout.pp == 1 or layout.zero < 3
        assert layout.copies > 1 or layout.zero == 0
        assert layout.accumulation >= layout.pp
    assert {key: {getattr(layout, key) for layout in found} for key in expected} == expected


@pytest.mark.parametrize(
    ("given", "gpus", "message"),
    [
        ({"tp": 3}, 6, "tp = 3: must be a divisor of heads = 4"),
        ({"tp": 3}, 8, "gpus = 8: must be a multiple of tp x pp = 3"),
        ({"cp": 3}, 6, "cp = 3: needs 2 cp = 6 to divide seq = 64"),
        ({"cp": 4}, 6, "gpus = 6: must be a multiple of tp x cp x pp = 1 x 4 x 1 = 4"),
        ({"pp": 3}, 6, "pp = 3: must be a divisor of layers = 4"),
        (
            {"global_batch": 5},
            64,
            "global_batch = 5: must be a multiple of dp (one of 4, 8, 16, 32, 64) with at least pp micro-batches",
        ),
        ({"zero": 5}, 8, "zero = 5: must be a ZeRO stage"),
        ({"precision": "fp8"}, 8, "precision = 'fp8'"),
        ({"zero": 3, "pp": 2}, 8, "zero = 3: must be 0, 1 or 2 with pp = 2"),
        ({"recompute": "selective"}, 16, "layout.recompute = 'selective': must be none or block"),
    ],
)
def test_a_request_without_candidates_is_an_error(given: dict[str, Any], gpus: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        candidates(request(gpus, **given))
    assert str(error.value).startswith(message)


def test_plan_rows_have_consistent_outcomes_and_order() -> None:
    shallow = replace(SMALL, layers=2)
    query = request(2, 80_000_000, shallow, global_batch=8, sp=False, recompute=False)
    found = search(query)
    rows = found.rows
    assert {row.evidence for row in rows} == {STATES, RETAINED, FULL}
    assert found.simulated == sum(row.evidence == FULL for row in rows)
    assert not found.no_time
    assert [plan_order(row) for row in rows] == sorted(plan_order(row) for row in rows)
    outcomes = [row.outcome for row in rows]
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {OK, OOM}
    for row in rows:
        assert bool(row.ruled_out_by) == (not row.time) == (row.outcome == OOM)
        states = sum(row.memory["by_category"][key] for key in ("parameters", "gradients", "optimizer"))
        assert row.evidence != STATES or states > query.allocatable
        assert row.outcome == OOM or (row.evidence, row.memory["reserved_bytes"] <= query.allocatable) == (
            FULL,
            True,
        )
    seconds = [row.time["step_s"] for row in rows if row.outcome == OK]
    assert seconds == sorted(seconds)


def test_partitioned_checkpoints_are_tried_if_full_checkpoints_fail() -> None:
    """Checkpoints of 128 samples exceed the limit in full on two ranks, and fit in halves."""
    model = replace(TINY, layers=16, vocab=128)
    keys = {"tp": 2, "pp": 1, "recompute": True, "sp": False, "micro_batch": 128, "global_batch": 128}
    for limit, outcome in ((86_500_000, OK), (76_500_000, OOM)):
        rows = search(request(2, limit, model, **keys)).rows
        assert [(row.layout.pa, row.outcome) for row in rows] == [(True, outcome), (False, OOM)]


def test_retained_activations_rule_out_layouts_before_the_simulation() -> None:
    """A layer retains 32 bytes for each token and hidden element, and the loss 2 bytes for each logit."""
    tokens, states = 64 * 64, 16 * 14e6
    retained = tokens * (4 * 32 * 512 + 2 * 1024)
    given = {"tp": 1, "pp": 1, "zero": 0, "micro_batch": 64, "global_batch": 128, "recompute": False}
    (row,) = search(request(2, retained, SMALL, **given)).rows
    (full,) = search(request(2, round(1.3 * (retained + states)), SMALL, **given)).rows
    assert (row.outcome, row.evidence, row.ruled_out_by) == (OOM, RETAINED, "activations")
    assert row.memory["by_category"]["activations"] == retained
    assert row.reason.startswith("model states and retained activations are at least")
    assert (full.outcome, full.evidence) == (OK, FULL)
    assert full.memory["by_category"]["activations"] == pytest.approx(retained, rel=0.05)


def test_rows_are_ordered_by_step_time_or_ideal_time() -> None:
    """Fitting rows are ordered by their step time, or by the time at peak rates without step times.

    A V100 has 125 TFLOP/s. Each GPU of a DGX-2 has 6.25 GB/s between nodes.
    """
    model = models.load_model("turing-nlg-17b")
    query = request(256, 32 * 10**9, model, global_batch=512)
    plain = Layout(tp=4, dp=64, zero=1, micro_batch=8, global_batch=512, precision="fp16")
    piped = replace(plain, pp=2, dp=32)
    work = ideal_s(query, plain, {})
    assert work == pytest.approx(5.616e16 / 256 / 125e12, rel=1e-3)
    assert ideal_s(query, replace(plain, recompute=True), {}) == pytest.approx(work * 7.465 / 5.616, rel=1e-3)
    for layout, sent, seconds in (
        (plain, {"inter-node": 6_250_000_000, "nvlink": 0}, work + 1),
        (plain, {"nvlink": 150_000_000_000}, work + 1),
        (piped, {}, work * 1.5),  # bubble: one of two micro-batches
        (replace(piped, schedule="interleaved", chunks=2), {}, work * 1.25),
    ):
        assert ideal_s(query, layout, sent) == pytest.approx(seconds)
    fast, slow = (PlanRow(plain, OK, FULL, {"peak_bytes": 1}, {}, s) for s in (1.0, 2.0))
    too_large = PlanRow(plain, OOM, FULL, {"peak_bytes": 1}, {}, 0.1)
    assert sorted([too_large, slow, fast], key=plan_order) == [fast, slow, too_large]
    fast.time, slow.time = {"step_s": 4.0}, {"step_s": 3.0}
    assert sorted([too_large, slow, fast], key=plan_order) == [slow, fast, too_large]


def test_zero_reduces_turing_nlg_from_tp_16_to_4() -> None:
    """The report has 64 replicas of 8 samples: 1024 GPUs without ZeRO, and 256 with ZeRO."""
    model, system = models.load_model("turing-nlg-17b-h32"), systems.load_system_file("dgx2")
    limit = int(system.device.memory_bytes.value or 0)
    fixed = {"pp": 1, "micro_batch": 8, "global_batch": 512, "recompute": True, "sp": False, "pa": False}
    for zero, fitting, degrees in ((0, 16, (1, 2, 4, 8, 16)), (1, 4, (1, 2, 4))):
        for tp in degrees:
            given = {**fixed, "tp": tp, "zero": zero}
            (row,) = search(PlanRequest(model, system, 64 * tp, limit, model.seq, given)).rows
            assert row.layout.dp == 64
            assert (row.outcome, row.evidence) == ((OK, FULL) if tp == fitting else (OOM, STATES))


def test_the_bubble_of_a_row_equals_the_papers_formula() -> None:
    """(p - 1) / (v m) of 2104.04473: 3 / 8 with one chunk, 3 / 16 with two, none without a pipeline."""
    interleaved = {"pp": 4, "schedule": "interleaved", "chunks": 2}
    for keys, bubble in (({"pp": 4}, 3 / 8), (interleaved, 3 / 16), ({}, 0)):
        assert PlanRow(Layout(global_batch=8, **keys), OK, FULL, {}).bubble == bubble


def test_training_cost_and_energy_follow_from_step_time() -> None:
    """2^30 tokens in batches of 32 x 64 are 524,288 steps of 1.8 s: 262.144 hours on 16 GPUs at 2 dollars an hour.

    A DGX-2 of 16 GPUs needs 10 kW. At the interval's ends, 0.9 and 3.6 s, all amounts are half and twice as large.
    """
    query = replace(request(16, global_batch=32), tokens=2**30, price_per_gpu_hour=2.0)
    time = {"step_s": 1.8, "interval": {"low_s": 0.9, "high_s": 3.6}}
    row = PlanRow(Layout(dp=16, global_batch=32), OK, FULL, {}, time=time)
    amounts = {"days": 262.144 / 24, "gpu_hours": 262.144 * 16, "energy_mwh": 2.62144, "cost": 262.144 * 32}
    found = training_cost(query, row) or {}
    interval = found.pop("interval")
    assert found == pytest.approx({"tokens": 2**30, "steps": 524_288, **amounts})
    assert interval["low"] == pytest.approx({key: value / 2 for key, value in amounts.items()})
    assert interval["high"] == pytest.approx({key: value * 2 for key, value in amounts.items()})
    known = training_cost(query, replace(row, time={"step_s": 1.8, "interval": None})) or {}
    assert known == {**found, "interval": None}
    assert training_cost(query, replace(row, time={})) is None
    assert training_cost(replace(query, tokens=0.0), row) is None
    assert "cost" not in (training_cost(replace(query, price_per_gpu_hour=0.0), row) or {})
    other = replace(query, system=systems.load_system_file("lowbw-v100"))
    assert "energy_mwh" not in (training_cost(other, row) or {})
    # Without a given price, that of the system file applies: 55.04 dollars per hour for 8 H100.
    h100 = replace(request(8), system=systems.load_system_file("dgx-h100"))
    assert (query.price, h100.price, request(8).price) == (2, pytest.approx(55.04 / 8), None)


@pytest.mark.parametrize(
    ("degrees", "extra"),
    [
        ({}, 0),
        ({"dp": 8}, 0),  # the context contains the one communicator
        ({"tp": 2, "dp": 4}, 2),  # world, tp, dp
        ({"tp": 2, "pp": 2}, 2),  # world, tp, pp; with two stages the embedding group equals pp
        ({"tp": 2, "pp": 4, "dp": 2}, 4),
        ({"cp": 2, "dp": 2}, 1),  # dp averages over dp x cp
        ({"cp": 2}, 0),
    ],
)
def test_communicator_bytes_follow_the_groups_of_the_mesh(degrees: dict[str, int], extra: int) -> None:
    """Expected bytes: 16 channels x 2 connections x NCCL_BUFFSIZE of 4 MiB; groups: repro/parallel/mesh.py."""
    layout = Layout(**degrees)
    assert communicator_bytes(layout, systems.load_system_file("dgx2")) == extra * 16 * 2 * 4 * 2**20
    mesh = shape_only_mesh(layout)
    groups = {group.ranks for group in mesh.every_group() if len(group.ranks) > 1}
    assert max(len(groups) - 1, 0) == extra
