"""Tests of plans: candidate layouts, their outcomes, and the order of the rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from repro.config import ConfigError, Layout, Model, models, systems
from repro.parallel.mesh import shape_only_mesh
from repro.simulate.plan.candidates import PlanRequest, candidates, communicator_bytes
from repro.simulate.plan.plan import Plan, search_layouts, search_map
from repro.simulate.plan.rows import (
    FULL,
    OK,
    OOM,
    RETAINED,
    STATES,
    PlanRow,
    ideal_s,
    plan_entry,
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


def test_candidates_have_valid_degrees_and_batches() -> None:
    found = candidates(request(16, global_batch=32))
    assert len(set(found)) == len(found)
    assert {layout.tp for layout in found} == {1, 2, 4}  # 4 heads
    assert {layout.pp for layout in found} == {1, 2, 4}  # 4 layers
    assert {layout.zero for layout in found} == {0, 1, 2, 3}
    assert {layout.precision for layout in found} == {"fp16"}
    for layout in found:
        assert layout.world == 16
        assert layout.global_batch == 32
        assert layout.pp == 1 or layout.zero < 3
        assert layout.dp > 1 or layout.zero == 0
        assert layout.accumulation >= layout.pp
        assert not layout.pa


def test_given_keys_are_not_varied() -> None:
    found = candidates(request(16, tp=2, zero=1, micro_batch=2, recompute=True, global_batch=32))
    assert {(x.tp, x.zero, x.micro_batch, x.recompute) for x in found} == {(2, 1, 2, True)}
    assert {layout.pp for layout in found} == {1, 2, 4}
    assert all(layout.pa for layout in candidates(request(16, pa=True)))
    assert {x.tp * x.pp for x in candidates(request(16, dp=4, global_batch=32))} == {4}
    two = candidates(request(16, chunks=2, global_batch=64))
    assert {(layout.schedule, layout.pp) for layout in two} == {("interleaved", 2)}


def test_selective_recomputation_is_a_candidate_for_unfused_attention() -> None:
    """Fused attention retains no scores, so selective recomputation is no separate layout there."""
    assert {x.recompute for x in candidates(request(16, kernels="softmax"))} == {False, "selective", True}
    assert {x.recompute for x in candidates(request(16))} == {False, True}
    with pytest.raises(ConfigError, match="recompute = 'selective'"):
        candidates(request(16, recompute="selective"))


def test_long_sequences_have_candidates_with_context_parallelism() -> None:
    """A rank has 8,192 or more tokens of a sample: 131,072 tokens allow cp = 16, and 8,192 tokens only cp = 1."""
    for seq, degrees in ((8192, {1}), (32768, {1, 2, 4}), (131072, {1, 2, 4, 8, 16})):
        long = replace(TINY, seq=seq)
        found = candidates(request(16, model=long, tp=1, pp=1, global_batch=16))
        assert {layout.cp for layout in found} == degrees
        assert {layout.dp * layout.cp for layout in found} == {16}
        assert {layout.zero for layout in found if layout.dp == 1} <= {0, 1, 2, 3}
    assert {x.cp for x in candidates(request(16, model=long, kernels="softmax"))} == {1}


def test_all_candidates_have_the_given_cp() -> None:
    found = candidates(request(16, cp=4, global_batch=32))
    assert {(x.cp, x.tp * x.pp * x.dp) for x in found} == {(4, 4)}
    assert {(x.dp, x.zero) for x in found if x.dp == 1 and x.pp == 1} == {(1, z) for z in range(4)}
    given = {"tp": 2, "pp": 2, "zero": 1, "sp": False, "recompute": False, "micro_batch": 1}
    (row, *_) = search(request(8, cp=2, global_batch=8, limit=10**9, **given)).rows
    assert (row.layout.cp, row.layout.dp, row.outcome) == (2, 1, OK)
    assert row.comm["bytes_by_group"]["cp"] > 0


def test_tensor_parallelism_stays_inside_a_node() -> None:
    wide = replace(TINY, heads=32)
    assert max(layout.tp for layout in candidates(request(64, model=wide))) == 16
    assert {layout.tp for layout in candidates(request(64, model=wide, tp=32))} == {32}


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
    fits = [row for row in rows if row.outcome == OK]
    assert all(row.evidence == FULL for row in fits)
    assert all(row.memory["reserved_bytes"] <= query.allocatable for row in fits)
    for row in rows:
        assert bool(row.ruled_out_by) == (row.outcome == OOM)
        states = sum(row.memory["by_category"][key] for key in ("parameters", "gradients", "optimizer"))
        if row.evidence == STATES:
            assert states > query.allocatable
    for row in rows:
        assert bool(row.time) == (row.outcome != OOM)
    seconds = [row.time["step_s"] for row in fits]
    assert seconds == sorted(seconds)
    described = plan_entry(replace(query, tokens=1e9, price_per_gpu_hour=2.0), rows[0])
    trained, speed = described["training"], 8 * 64 / seconds[0]
    assert trained["days"] == pytest.approx(1e9 / speed / 86400)
    assert trained["cost"] == pytest.approx(2 * 2 * 24 * trained["days"])
    assert described["params"] > 0
    assert {"peak_bytes", "reserved_bytes", "by_category", "by_role"} <= set(described["memory"])
    assert {"bytes_by_group", "bytes_by_link"} <= set(described["comm"])


def test_partitioned_checkpoints_are_tried_if_full_checkpoints_fail() -> None:
    """Checkpoints of 128 samples exceed the limit in full on two ranks, and fit in halves."""
    model = replace(TINY, layers=16, vocab=128)
    query = request(
        2, 86_500_000, model, tp=2, pp=1, recompute=True, sp=False, micro_batch=128, global_batch=128
    )
    rows = search(query).rows
    none = search(replace(query, limit=query.limit - 10_000_000))
    assert [(row.layout.pa, row.outcome) for row in rows] == [(True, OK), (False, OOM)]
    assert [(row.layout.pa, row.outcome) for row in none.rows] == [(True, OOM), (False, OOM)], "no duplicates"


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


def test_model_states_rule_out_all_layouts_of_small_devices() -> None:
    found = search(request(4, 1_000_000))
    rows = found.rows
    assert found.simulated == 0
    assert {(row.outcome, row.evidence) for row in rows} == {(OOM, STATES)}
    assert {row.ruled_out_by for row in rows} <= {"parameters", "gradients", "optimizer states"}


def test_rows_are_ordered_by_step_time_or_ideal_time() -> None:
    """Fitting rows are ordered by their step time, or by the time at peak rates without step times.

    A V100 has 125 TFLOP/s. Each GPU of a DGX-2 has 6.25 GB/s between nodes.
    """
    model = models.load_model("turing-nlg-17b")
    query = request(256, 32 * 10**9, model, global_batch=512)
    plain = Layout(tp=4, dp=64, zero=1, micro_batch=8, global_batch=512, precision="fp16")
    work = ideal_s(query, plain, {})
    assert work == pytest.approx(5.616e16 / 256 / 125e12, rel=1e-3)
    assert ideal_s(query, plain, {"inter-node": 6_250_000_000, "nvlink": 0}) == pytest.approx(work + 1)
    assert ideal_s(query, plain, {"nvlink": 150_000_000_000}) == pytest.approx(work + 1)
    assert ideal_s(query, replace(plain, recompute=True), {}) == pytest.approx(work * 7.465 / 5.616, rel=1e-3)
    piped = replace(plain, pp=2, dp=32)
    assert ideal_s(query, piped, {}) == pytest.approx(work * 1.5)  # bubble: one of two micro-batches
    chunked = replace(piped, schedule="interleaved", chunks=2)
    assert ideal_s(query, chunked, {}) == pytest.approx(work * 1.25)
    fast, slow = (PlanRow(plain, OK, FULL, {"peak_bytes": 1}, {}, s) for s in (1.0, 2.0))
    too_large = PlanRow(plain, OOM, FULL, {"peak_bytes": 1}, {}, 0.1)
    assert sorted([too_large, slow, fast], key=plan_order) == [fast, slow, too_large]
    fast.time, slow.time = {"step_s": 4.0}, {"step_s": 3.0}
    assert sorted([too_large, slow, fast], key=plan_order) == [slow, fast, too_large]


def test_unknown_memory_bandwidth_orders_rows_by_peak_rates() -> None:
    query = request(2, global_batch=4, pp=1, micro_batch=1, sp=False, recompute=False)
    bandwidth = query.system.device.memory_bandwidth
    device = replace(query.system.device, memory_bandwidth=replace(bandwidth, value=None))
    found = search(replace(query, system=replace(query.system, device=device)))
    assert "memory_bandwidth" in found.no_time
    ideal = [row.ideal_s for row in found.rows if row.outcome == OK]
    assert len(ideal) > 3
    assert ideal == sorted(ideal, key=lambda seconds: seconds or 0.0)
    assert not any(row.time for row in found.rows)


def test_zero_reduces_turing_nlg_from_tp_16_to_4() -> None:
    """The report has 64 replicas of 8 samples: 1024 GPUs without ZeRO, and 256 with ZeRO."""
    model, system = models.load_model("turing-nlg-17b-h32"), systems.load_system_file("dgx2")
    limit = int(system.device.memory_bytes.value or 0)
    fixed = {"pp": 1, "micro_batch": 8, "global_batch": 512, "recompute": True, "sp": False, "pa": False}
    outcomes: dict[int, dict[int, str]] = {0: {}, 1: {}}
    for zero, found in outcomes.items():
        for tp in (1, 2, 4, 8, 16)[: 3 if zero else 5]:
            given = {**fixed, "tp": tp, "zero": zero}
            (row,) = search(PlanRequest(model, system, 64 * tp, limit, model.seq, given)).rows
            assert row.layout.dp == 64
            assert row.outcome == OK or row.evidence == STATES
            found[tp] = row.outcome
    assert outcomes == {0: {1: OOM, 2: OOM, 4: OOM, 8: OOM, 16: OK}, 1: {1: OOM, 2: OOM, 4: OK}}


def test_a_map_has_one_cell_per_tp_and_pp() -> None:
    query = request(8, 10**9, global_batch=8, micro_batch=1, zero=0, recompute=True, sp=False)
    limits = [CONTEXT + 6_000_000, CONTEXT + 10**9]
    with Workers(1) as workers:
        cells = search_map(query, (1, 2, 8), (1, 4), limits, workers)
    assert [(c.tp, c.pp) for c in cells] == [(1, 1), (1, 4), (2, 1), (2, 4), (8, 1), (8, 4)]
    by_degrees = {(c.tp, c.pp): c for c in cells}
    assert "tp = 8" in by_degrees[8, 1].reason
    assert by_degrees[8, 4].rows == {}
    assert by_degrees[1, 1].rows[limits[0]].evidence == STATES
    assert by_degrees[1, 4].rows[limits[1]].evidence == FULL
    assert all(c.rows[limits[1]].outcome == OK for c in cells if c.rows)


def test_the_bubble_of_a_row_equals_the_papers_formula() -> None:
    """(p - 1) / (v m) of 2104.04473: 3 / 8 with one chunk, 3 / 16 with two, none without a pipeline."""

    def bubble(**layout: Any) -> float:
        return PlanRow(Layout(global_batch=8, **layout), OK, FULL, {}).bubble

    assert bubble(pp=4) == 3 / 8
    assert bubble(pp=4, schedule="interleaved", chunks=2) == 3 / 16
    assert bubble() == 0


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


def test_the_price_defaults_to_that_of_the_system() -> None:
    """The system file has 55.04 dollars per hour for 8 H100."""
    query = replace(request(8), system=systems.load_system_file("dgx-h100"))
    assert query.price == pytest.approx(55.04 / 8)
    assert replace(query, price_per_gpu_hour=2.0).price == 2
    assert request(8).price is None


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


def test_communicator_bytes_count_in_the_memory_limit() -> None:
    given = {"tp": 2, "zero": 0, "sp": False, "recompute": False, "micro_batch": 1, "pp": 1}
    query = request(4, global_batch=4, limit=10**9, **given)
    with Workers(1) as workers:
        (row,) = search_layouts(query, workers).rows
        communicators = communicator_bytes(row.layout, query.system)
        enough = query.system.context() + communicators + row.memory["reserved_bytes"]
        outcomes = [
            search_layouts(replace(query, limit=limit), workers).rows[0].outcome
            for limit in (enough, enough - communicators)
        ]
    assert outcomes == [OK, OOM]
