"""Tests of records: they have the metrics that claims read, and only values that JSON can represent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from repro.config import EmulatedNetwork, Experiment, Layout, Model, Training
from repro.config.enums import ACCOUNTED
from repro.results import tables
from repro.results.measured import comparison_record, experiment_record, step_seconds
from repro.results.metrics import (
    FP32_ROUNDING,
    LOSS_STRETCH_STEPS,
    UNDISTURBED,
    Held,
    Metrics,
    allocated,
    final_loss,
    loss_distances,
    per_layer,
    relative_loss_distance,
    work,
)
from repro.results.record_parts import NetworkReport, RankOnNetwork, RankResult, TrafficRow
from repro.results.schema import ComparisonRecord, ExperimentRecord
from tests.claims.constructed_records import conditions
from tests.launch.fake_session import _result
from tests.records import changed, made_up

MODEL = Model(name="tiny", layers=2, hidden=16, heads=4, vocab=64, seq=16)


def experiment(name: str = "a", seed: int = 0) -> Experiment:
    return Experiment(
        name=name, model=MODEL, layout=Layout(dp=2), training=Training(steps=4, untimed_steps=1, seed=seed)
    )


def build(results: list[dict[str, Any]], **more: Any) -> ExperimentRecord:
    common = {"suite": "s", "provenance": {"git": "x"}, "wall_s": 1.0}
    return experiment_record(experiment(), typed(results), **(common | more))


def typed(results: list[dict[str, Any]]) -> list[RankResult]:
    return [RankResult.read(result) for result in results]


def results(rounds: int = 1) -> list[dict[str, Any]]:
    return [_result(experiment(), rank, rounds) for rank in range(2)]


def test_metrics_have_fixed_names_and_known_values() -> None:
    """Rank 1 is slower and has more memory. Purposes are summed over ranks, and other traffic is that of rank 0."""
    ranks = results()
    ranks[0]["comm"] = ranks[0]["comm"] * 2  # two rows of one operation
    ranks[1]["memory"]["most"]["parameters"] = 4501  # of which 4001 are states
    send = {"op": "send", "group": "pp", "purpose": "tied gradients", "size": 2, "calls": 4}
    ranks[1]["comm"].append({**send, "payload_bytes": 100, "sent_bytes": 100})
    b, s, h, v = 2, MODEL.seq, MODEL.hidden, MODEL.vocab
    # 2104.04473 eq. 3 without recomputation, for l layers; the attention square is its second term.
    flops = 72 * b * s * MODEL.layers * h**2 * (1 + s / (6 * h) + v / (12 * MODEL.layers * h))
    square = 72 * b * s * MODEL.layers * h**2 * s / (6 * h)
    expected = {
        "step_seconds.median": 0.101,
        "tokens_per_s": b * s / 0.101,
        "model_flops_per_s": flops / 0.101,
        "causal_flops_per_s": (flops - square / 2) / 0.101,
        "hardware_flops_per_s.device": flops / 0.101 / 2,
        "memory.states_bytes": 16001,
        "memory.parameters_bytes": 4001,
        "memory.peak_bytes": 20000,
        "memory.gathered_bytes": 500,
        "memory.activations_bytes": 2000 + 1000,
        "memory.checkpoints_bytes": 1500,
        "memory.host_bytes": 700,
        "comm.dp.all_reduce.calls": 6,
        "comm.sent_bytes": 8000,
        "comm.per_layer.tp.all_reduce.calls": 4,
        "comm.per_layer.tp.all_reduce.sent_bytes": 512,
        "comm.purpose.dp.gradients.sent_bytes": 12000,
        "comm.purpose.pp.tied_gradients.sent_bytes": 100,
        "comm.purpose.pp.tied_gradients.calls": 4,
        "loss.first": 5.0,
        "steps": 4,
        "skipped_steps": 0,
    }
    metrics = build(ranks).metrics
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert not any(name.startswith(("pipeline", "memory.context")) for name in metrics)


def pipeline(*disturbed: int, steps: Sequence[int] = (5, 5), first_idle: float | None = None) -> Metrics:
    """Return the metrics of two stages: stage 1 computes longer and idles less; stage 0 shares its core when disturbed.

    `first_idle`: idle seconds of the first step, if they differ from the other steps.
    """
    ranks = results()
    for stage, (busy, idle) in enumerate([(2.0, 0.8), (2.2, 0.44)]):
        waits = [idle + 0.022 * step for step in range(steps[stage])]
        waits[0] = waits[0] if first_idle is None else first_idle
        shares = [0.9 if stage == 0 and step in disturbed else UNDISTURBED for step in range(steps[stage])]
        times = {"idle_s": waits, "busy_s": [busy] * len(waits), "core_s": [busy * share for share in shares]}
        ranks[stage]["pipeline"] = {"stage": stage, "in_flight": 2 - stage, **times}
    record = build(ranks)
    assert [stage["stage"] for stage in (record.series.pipeline or [])] == [0, 1]
    return record.metrics


def test_bubble_is_the_idle_share_of_the_busiest_rank() -> None:
    metrics = pipeline()
    assert metrics["pipeline.bubble"] == pytest.approx(0.2 + 2 * 0.01)
    assert metrics["pipeline.bubble.low"] <= metrics["pipeline.bubble"] <= metrics["pipeline.bubble.high"]
    assert (metrics["pipeline.in_flight"], metrics["pipeline.undisturbed_steps"]) == (2, 5)
    assert "pipeline.bubble" not in pipeline(steps=(2, 2)), "two steps give no interval"
    assert pipeline(first_idle=0.0)["pipeline.undisturbed_steps"] == 4, "a step without a wait has no ratio"
    assert pipeline(steps=(5, 4))["pipeline.undisturbed_steps"] == 4, "one stage lacks the last step"
    assert pipeline(0, 1)["pipeline.bubble"] == pytest.approx(0.2 + 3 * 0.01), "stage 0 shares its core"
    nothing = pipeline(0, 1, 2, 3, 4)
    assert "pipeline.bubble" not in nothing
    assert (nothing["pipeline.in_flight"], nothing["pipeline.undisturbed_steps"]) == (2, 0)


def test_record_has_memory_outside_torch_environment_and_steps_of_all_ranks() -> None:
    """The memory is that of the fullest rank, and a step counts if all ranks finished it."""
    ranks = results()
    assert build(ranks).provenance == {"git": "x"}
    for rank, end in zip(ranks, (7, 5), strict=True):
        rank["memory"]["beside_torch"] = {"start": 2, "dp": end - 3, "end": end}
    ranks[0]["environment"] = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    ranks[0]["rounds"], ranks[1]["rounds"] = [[1.0, 2.0, 3.0], [4.0]], [[2.0, 1.0]]
    record = build(ranks, provenance={"git": "x", "environment": {"NCCL_DEBUG": "WARN"}})
    assert record.metrics["memory.context_bytes"] == 7
    outside = [held.beside_torch for held in record.memory_by_rank]
    assert outside == [{"start": 2, "dp": 4, "end": 7}, {"start": 2, "dp": 2, "end": 5}]
    both = {"NCCL_DEBUG": "WARN", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert record.provenance == {"git": "x", "environment": both}
    assert record.series.step_seconds == step_seconds(typed(ranks)) == [[2.0, 2.0]]


def test_outcome_is_that_of_the_worst_rank() -> None:
    ranks = results()
    ranks[1].update(outcome="diverged", reason="loss is nan at step 2")
    record = build(ranks)
    assert record.outcome == "diverged"
    assert record.reason == "rank 1: loss is nan at step 2"
    known = build(ranks, outcome="hang", reason="rank 0 is stopped")
    assert (known.outcome, known.reason) == ("hang", "rank 0 is stopped"), "the launcher's outcome prevails"
    nothing = build([], outcome="hang", reason="rank 1 is stopped")
    assert (nothing.outcome, nothing.metrics, nothing.memory_by_rank) == ("hang", {}, [])
    assert tables.experiment_row(nothing)["reason"] == "rank 1 is stopped"


def test_ranks_that_diverge_at_once_give_a_record() -> None:
    ranks = results()
    for rank in ranks:
        rank |= {"outcome": "diverged", "reason": "loss is nan", "rounds": [], "phase_seconds": {}}
        rank |= {"loss": [5.0, float("nan")], "grad_norm": [1.0, float("inf")]}
        rank["memory"] = {"rss_peak_bytes": 1, "cuda": {}}
    record = build(ranks)
    json.dumps(record.as_dict(), allow_nan=False)
    row = tables.experiment_row(record)
    assert (row["dp"], row["zero"], row["reason"], row["loss.first"]) == (2, 0, "rank 0: loss is nan", 5.0)
    assert record.series.loss == [5.0, None]
    assert not {"loss.last", "step_seconds.median"} & record.metrics.keys()


def compare(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> ComparisonRecord | None:
    ranks = typed(one), typed(two)
    return comparison_record(experiment("a", 0), experiment("b", 1), ranks, suite="s", provenance={})


def test_comparison_is_the_ratio_of_paired_rounds() -> None:
    """A round without a timed step gives no ratio."""
    fast, slow = results(rounds=6), results(rounds=6)
    for rank in fast:
        rank["rounds"] = [[second / 2 for second in steps] for steps in rank["rounds"]]
    record = compare(slow, fast)
    assert record is not None
    assert record.ratio == pytest.approx(2)
    assert (record.low or 0) <= record.ratio <= (record.high or 0)
    assert (record.rounds, len(record.pairs), record.name) == (6, 6, "a vs b")
    for rank in fast:
        rank["rounds"][1] = []
    assert compare(slow, fast) is None


def test_devices_with_a_known_peak_have_a_utilisation() -> None:
    """Two devices of 125 TFLOP/s reach 50 TFLOP/s in total; a step that does not fit has no utilisation."""
    on_dgx2 = conditions(Layout(dp=2, precision="fp16"), MODEL, system="dgx2")
    metrics = {"model_flops_per_s": 50e12, "causal_flops_per_s": 45e12}
    record = made_up("a", experiment=on_dgx2, evidence="simulated", metrics=metrics)
    row = tables.experiment_row(record)
    assert (row["mfu"], row["mfu_causal"]) == (pytest.approx(0.2), pytest.approx(0.18))
    assert "mfu" not in tables.experiment_row(changed(record, outcome="oom"))
    assert "mfu" not in tables.experiment_row(changed(record, experiment={**on_dgx2, "system": "local"}))


def test_network_report_combines_the_reports_of_its_ranks() -> None:
    """The first rank of each of two nodes reports the node's bytes, and rank 0 reports the network."""
    rates = {"rank sends": [9e6, 11e6, 10e6, 10e6], "node sends": [4e6, 6e6]}
    facts: dict[str, Any] = {"mtu": 1500, "payload_share": 0.9, "rates": rates}
    facts |= {"round_trip_s": {}, "user_namespace": True}
    reports = [
        RankOnNetwork(
            compute_flops_per_s=float(rank),
            core_share=0.5,
            sent_bytes=10.0 + rank,
            received_bytes=20.0 + rank,
            node_sent_bytes=None if rank % 2 else 30.0 + rank,
            node_received_bytes=None if rank % 2 else 40.0 + rank,
            facts=None if rank else facts,
        )
        for rank in range(4)
    ]
    found = NetworkReport.from_ranks(reports)
    assert found is not None
    assert {key: getattr(found, key) for key in facts} == facts
    assert (found.compute_flops_per_s, found.core_share) == ([0, 1, 2, 3], 0.5)
    requested = EmulatedNetwork(nodes=2, ranks_per_node=2, between=8e6, within=16e6, flops_per_s=5e9)
    assert found.made(requested) == replace(requested, between=5e6, within=10e6, flops_per_s=0.0)
    assert found.made(replace(requested, within=0.0)).within == 0, "no limit"
    assert (found.sent_bytes, found.received_bytes) == ([10, 11, 12, 13], [20, 21, 22, 23])
    assert (found.node_sent_bytes, found.node_received_bytes) == ([30, 32], [40, 42])
    assert NetworkReport.from_ranks(reports[1:]) is NetworkReport.from_ranks([]) is None


def test_checkpoints_of_all_ranks_are_one_report() -> None:
    """The time of a checkpoint is that of its slowest rank, and a failure of any rank is reported."""
    for resumed, times in (([], "of all steps"), ([3, 5], "of the steps after 5, since the last start")):
        ranks = results()
        for rank, seconds in enumerate(([1.0, 4.0], [2.0, 3.0, 9.0])):
            ranks[rank]["checkpoints"] = {
                "resumed": [{"step": step, "key": "k"} for step in resumed],
                "written": [4, 8],
                "write_seconds": seconds,
                "failures": [{"step": 6, "reason": "no space"}] * rank,
            }
        record = build(ranks)
        report = record.checkpoints
        assert report is not None
        assert record.metrics.get("resumed_from") == (resumed[-1] if resumed else None)
        assert (report.written, report.write_seconds, report.times) == ([4, 8], [2.0, 4.0], times)
        assert [failure["step"] for failure in report.failures] == [6]
        assert record.metrics["comm.dp.all_reduce.calls"] == 3
        for rank in ranks:
            rank["rounds"] = [[]]
        without = build(ranks).metrics
        assert ("comm.dp.all_reduce.calls" in without) != bool(resumed), "the remaining step is not typical"


def test_block_traffic_is_averaged_over_blocks_and_micro_batches() -> None:
    """Each stage runs 6 blocks in a step: 2 layers times 3 micro-batches."""
    layout = Layout(pp=2, tp=2, micro_batch=1, global_batch=3)
    pipelined = Experiment(name="p", model=replace(MODEL, layers=4), layout=layout)
    row = TrafficRow(
        op="all_reduce", group="tp", purpose="block", size=2, calls=24, payload_bytes=600, sent_bytes=600
    )
    other = replace(row, purpose="boundary")
    (found,) = per_layer(pipelined, 0, [row, other])
    assert (found.calls, found.sent_bytes) == (4, 100)
    assert work(pipelined, 1)["pipeline.in_flight"] == 2
    assert "pipeline.in_flight" not in work(experiment(), 1)


def test_simulated_memory_has_limit_reserved_and_used_bytes() -> None:
    """A step that does not fit has no reserved bytes, and a device without a limit has no limit metric."""
    found = dict.fromkeys(ACCOUNTED, 0)
    held = Held(found, found, {**found, "communication": 7}, init_peak_bytes=0)
    numbers = {"context": 100, "fragmentation": 1 / 3, "retries": 2}
    fits = allocated([held], limit=4000, reserved=900, **numbers)
    assert fits == {
        "memory.context_bytes": 100,
        "memory.communication_bytes": 7,
        "memory.limit_bytes": 4000,
        "memory.reserved_bytes": 900,
        "memory.used_bytes": 1000,
        "memory.fragmentation": 0.333333,
        "memory.retries": 2,
    }
    assert set(fits) - set(allocated([held], limit=None, reserved=900, **numbers)) == {"memory.limit_bytes"}
    assert set(allocated([held], limit=4000, reserved=None, **numbers)) == {
        *("memory.context_bytes", "memory.communication_bytes", "memory.limit_bytes")
    }


def test_missing_counts_are_zero() -> None:
    ranks = results()
    for rank in ranks:
        rank["memory"].pop("init_peak_bytes", None)
        rank["memory"].pop("rss_peak_bytes", None)
    (first, _) = typed(ranks)
    assert (first.padding, first.memory.rss_peak_bytes) == (0, 0)
    metrics = build(ranks).metrics
    assert (metrics["padding"], metrics["memory.init_peak_bytes"]) == (0, 0)
    assert made_up("a").wall_s == 0


FLAT = [2.0] * (3 * LOSS_STRETCH_STEPS)


def shifted(*relative: float) -> list[float]:
    """Return `FLAT` with a relative change of each stretch of steps."""
    return [2.0 * (1 + by) for by in relative for _ in range(LOSS_STRETCH_STEPS)]


def test_distances_are_relative_and_ignore_missing_losses() -> None:
    assert loss_distances([2.0, 2.2], [2.0, 2.0]) == pytest.approx([0, 0.1])
    assert loss_distances([None, 2.0], [2.0, 2.0]) == [0]


CONTROLS = [shifted(1e-6, 7e-6, 1e-5), shifted(-7e-6, 1e-6, 7e-5)]
"""Controls whose root mean square distances are 5e-6, 5e-6 and 5e-5."""


def test_loss_distance_is_relative_to_the_controls() -> None:
    for curve, controls, distance in (
        (shifted(5e-6, -2e-5, 5e-5), CONTROLS, 4),  # 1, 4 and 1 times the controls: the worst stretch counts
        (shifted(5e-6, -2e-5, 5e-5), CONTROLS[:1], 5),  # 5e-6 / 1e-6 in the first stretch
        (shifted(2e-7, 2e-5, 2e-3), [shifted(1e-7, 1e-5, 1e-3)], 2),
        (shifted(1e-4, 1e-5, 1e-3), [shifted(1e-7, 1e-5, 1e-3)], 1000),
        (shifted(0, 0, 4 * FP32_ROUNDING), [FLAT], 4),  # controls differ by the fp32 rounding or more
        (FLAT, [FLAT], 0),
    ):
        assert relative_loss_distance(curve, FLAT, controls) == pytest.approx(distance, rel=1e-6)


def test_loss_distance_needs_controls_and_complete_losses() -> None:
    for curve, controls in ((FLAT, []), (FLAT[1:], [FLAT]), (FLAT, [FLAT[1:]]), ([None, *FLAT[1:]], [FLAT])):
        with pytest.raises(ValueError, match="needs control runs, and the losses of all steps"):
            relative_loss_distance(curve, FLAT, controls)


def test_final_loss_is_the_mean_of_the_last_stretch() -> None:
    assert final_loss(shifted(0, 0.5, 0.25)) == pytest.approx(2.5)
    assert final_loss([None, *FLAT]) == 2.0
    for losses in (FLAT[: LOSS_STRETCH_STEPS - 1], [*FLAT, None]):
        with pytest.raises(ValueError, match="the losses of the last 50"):
            final_loss(losses)
