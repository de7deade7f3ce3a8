"""Tests of pipelines and 3D layouts: parity with one process, micro-batches in flight, traffic and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from repro.config import ConfigError, Experiment, Layout
from repro.engines.native.engine import NativeEngine
from repro.parallel import mesh as meshes
from repro.parallel.pipeline.schedule import build_schedule, in_flight
from tests.parallel.test_parity import ALL_OPTIONS, alone, assert_same
from tests.pool import RankPool, pool_of
from tests.training import LEARNING, TINY, Trained, micro_batches, smallest, tiny, train

BATCH = 8
PP2 = Layout(pp=2, micro_batch=1, global_batch=BATCH)
PP4 = replace(PP2, pp=4)
FOUR = replace(PP2, micro_batch=2)
"""Four micro-batches on two stages have a warm-up, a steady state and a cool-down."""
PP2_TP2 = replace(FOUR, tp=2)
INTERLEAVED = replace(FOUR, schedule="interleaved", chunks=2)
SCATTERED = replace(INTERLEAVED, tp=2, scatter_gather=True)
THREE_AXES = replace(PP2, tp=2, dp=2)
SP_EIGHT = replace(THREE_AXES, zero=1, sp=True, schedule="interleaved", chunks=2)
SCATTERED_EIGHT = replace(THREE_AXES, zero=2, scatter_gather=True, order="tp-pp-dp")
LAYOUTS = [
    replace(PP4, schedule="gpipe", overlap=False),
    PP4,
    PP2_TP2,
    replace(PP2_TP2, sp=True),
    SCATTERED,
    replace(PP2, dp=2),
    replace(PP2, dp=2, zero=1, zero1_reduce="all-reduce", schedule="interleaved", chunks=2),
    replace(PP2, dp=2, zero=1, order="pp-tp-dp", stage_layers=(1, 3)),
    replace(INTERLEAVED, stage_layers=(0, 1, 1, 0)),
    replace(PP2, dp=2, zero=2, stage_layers=(2, 0)),
    replace(PP4, overlap=False),
    SP_EIGHT,
    SCATTERED_EIGHT,
    replace(THREE_AXES, overlap=False, scatter_gather=True, schedule="interleaved", chunks=2),
]


def name_of(layout: Layout | bool) -> str:
    """Return a short name for the test's id."""
    if isinstance(layout, bool):
        return "recompute" if layout else "plain"
    parts = [f"pp{layout.pp}-tp{layout.tp}-dp{layout.dp}", layout.schedule, f"z{layout.zero}"]
    parts += [key for key in ("sp", "scatter_gather") if getattr(layout, key)]
    parts += [] if layout.overlap else ["exchanges"]
    parts += ["feb2020"] if layout.zero1_reduce == "all-reduce" else []
    return "-".join(parts)


def merge_stages(found: list[Trained]) -> list[Trained]:
    """Return each rank's results with the parameters of all stages, and check that shared parameters are equal."""
    merged: dict[str, Tensor] = {}
    for trained in found:
        for name, value in trained.parameters.items():
            torch.testing.assert_close(value, merged.setdefault(name, value), rtol=1e-6, atol=1e-7)
    return [replace(trained, parameters=merged) for trained in found]


RAN: dict[Experiment, list[Trained]] = {}


def ranks_of(request: pytest.FixtureRequest, experiment: Experiment) -> list[Trained]:
    """Return each rank's results; an experiment of several tests runs once."""
    if experiment not in RAN:
        RAN[experiment] = pool_of(request, experiment.layout).run(train, experiment)
    return RAN[experiment]


def parity_experiment(layout: Layout) -> Experiment:
    """Return the experiment of the parity tests; its last step shows the traffic without recomputation."""
    return tiny(layout, smallest(layout), **LEARNING)


def recompute_experiment(layout: Layout) -> Experiment:
    """Return an experiment of two steps with recomputation, which changes the traffic."""
    return tiny(replace(layout, recompute=True), smallest(layout), steps=2, untimed_steps=1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_fp32_equals_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    found = ranks_of(request, parity_experiment(layout))
    expected = alone(model=smallest(layout), **LEARNING)
    assert expected.loss[-1] < 0.9 * expected.loss[0], "the loss must fall, or parity proves little"
    assert_same(merge_stages(found), expected, 1e-5, 1e-5)


@pytest.mark.parametrize("layout", [FOUR, INTERLEAVED, PP2_TP2, replace(PP2, dp=2, zero=1)], ids=name_of)
def test_all_options_together_equal_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    """The options are recomputation, small buckets and dropout."""
    settings, training = ALL_OPTIONS
    model = smallest(layout)
    found = pool_of(request, layout).run(train, tiny(replace(layout, **settings), model, **training))
    assert_same(merge_stages(found), alone(model=model, **training), 1e-5, 1e-5)


def test_all_stages_skip_the_same_fp16_steps(eight: RankPool) -> None:
    """Losses on the three axes tp, pp and dp are close to those of one process."""
    layout = replace(THREE_AXES, zero=1, precision="fp16")
    training = {"loss_scale": 2.0**20, "loss_scale_window": 3, "loss_scale_hysteresis": 1, "steps": 8}
    model = smallest(layout)
    found = eight.run(train, tiny(layout, model, **training))
    expected = alone("fp16", model, **training)
    for trained in found:
        assert trained.skipped == found[0].skipped
        assert trained.scale == found[0].scale
    assert found[0].skipped
    torch.testing.assert_close(torch.tensor(found[0].loss), torch.tensor(expected.loss), rtol=2e-2, atol=0.0)


# -- memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_live_activations_equal_the_micro_batches_in_flight(two: RankPool, schedule: str) -> None:
    """The schedules have p - rank micro-batches in flight with 1F1B, and m with GPipe."""
    layout = replace(PP2, schedule=schedule, chunks=2 if schedule == "interleaved" else 1)
    plan = build_schedule(schedule, 2, BATCH, layout.chunks)
    for rank, seen in enumerate(two.run(_live_activations, tiny(layout))):
        expected = {"gpipe": BATCH, "1f1b": 2 - rank, "interleaved": in_flight(plan[rank])}[schedule]
        assert seen["in_flight"] == expected
        assert len(seen["live"]) == expected
        if schedule == "interleaved":
            continue  # its chunks have different sizes
        # Each micro-batch retains equal bytes. In addition, up to two outputs may not be sent yet.
        output = 4 * TINY.seq * TINY.hidden if rank == 0 else 0
        retained = [bytes_ - min(k, 2) * output for k, bytes_ in enumerate(seen["live"], 1)]
        scalars = 8  # additional bytes of the first micro-batch's loss
        assert all(abs(n - k * retained[0]) <= k * scalars for k, n in enumerate(retained, 1)), retained


def _live_activations(experiment: Experiment) -> dict[str, Any]:
    """Return the live bytes of activations after each forward that increases the micro-batches in flight."""
    from repro.measure.memory import MemoryTracker

    mesh = meshes.distributed_mesh(experiment.layout, "cpu")
    live: list[int] = []
    tracker = MemoryTracker()
    with tracker:
        engine = NativeEngine(experiment, mesh, torch.device("cpu"))
        run_forward = engine.pipeline._forward

        def counted(*arguments: Any) -> Any:
            before = engine.pipeline.in_flight
            result = run_forward(*arguments)
            if engine.pipeline.in_flight > before:
                live.append(tracker.live()["activations"])
            return result

        engine.pipeline._forward = counted  # type: ignore[method-assign]
        engine.step(
            micro_batches(experiment, mesh.dp.rank, 0), lambda phase: setattr(tracker, "phase", phase)
        )
        engine.synchronize()
    assert in_flight(engine.pipeline.actions) == engine.pipeline.in_flight
    return {"in_flight": engine.pipeline.in_flight, "live": live}


# -- communication -----------------------------------------------------------------------------------


TRAFFIC = [
    *((layout, False) for layout in LAYOUTS),
    *((layout, True) for layout in (SCATTERED, SP_EIGHT, SCATTERED_EIGHT, PP2_TP2)),
]


@pytest.mark.parametrize(("layout", "recompute"), TRAFFIC, ids=name_of)
def test_traffic_equals_the_formula(request: pytest.FixtureRequest, layout: Layout, recompute: bool) -> None:
    """A boundary sends bsh per direction and micro-batch (2104.04473 sec. 3.2). Pipelines do not change tp and dp."""
    experiment = recompute_experiment(layout) if recompute else parity_experiment(layout)
    found, layout = ranks_of(request, experiment), experiment.layout
    m, v, t = layout.accumulation, layout.chunks, layout.tp
    b, s, h = layout.micro_batch, experiment.seq, TINY.hidden
    bsh = 4 * b * s * h
    for rank, trained in enumerate(found):
        mesh = meshes.shape_only_mesh(layout, rank)
        stage, last = mesh.pp.rank, layout.pp - 1
        rows = {(r["op"], r["group"], r["purpose"]): r for r in trained.traffic}
        # Every part except the last sends activations, and every part except the first sends gradients.
        forward = m * (v - (stage == last))
        backward = m * (v - (stage == 0))
        share = t if layout.sp or layout.scatter_gather else 1
        for purpose, messages in (("activations", forward), ("gradients", backward)):
            row = rows.get(("send", "pp", purpose), {"calls": 0, "payload_bytes": 0, "sent_bytes": 0})
            assert row["calls"] == messages
            assert row["payload_bytes"] == row["sent_bytes"] == messages * bsh // share
        gathered = rows.get(("all_gather", "tp", "boundary"), {"payload_bytes": 0})["payload_bytes"]
        received = m * (v - (stage == 0)) + m * (v - (stage == last))
        assert gathered == (received * bsh if layout.scatter_gather else 0)
        layers = sum(len(part) for part in layout.parts(experiment.model.layers)[stage :: layout.pp])
        if t > 1 and not layout.sp:
            row = rows["all_reduce", "tp", "block"]
            assert row["calls"] == (6 if recompute else 4) * layers * m
            assert row["payload_bytes"] == row["calls"] * bsh
        tied = rows.get(("all_reduce", "embedding", "tied gradients"), {"payload_bytes": 0})["payload_bytes"]
        shard = layout.dp if layout.zero else 1
        ends = stage in (0, last)
        assert tied == (4 * TINY.vocab * h // t // shard if ends else 0)
        if layout.dp > 1:
            _check_data_parallel(layout, rows, _padded_parameters(experiment, rank))


def _padded_parameters(experiment: Experiment, rank: int) -> int:
    """Return the number of the rank's parameters, with padding."""
    mesh = meshes.shape_only_mesh(experiment.layout, rank)
    engine = NativeEngine(experiment, mesh, torch.device("meta"))
    return sum(value.numel() for value in engine.full_parameters().values()) + engine.padding()


def _check_data_parallel(layout: Layout, rows: dict[Any, Any], psi: int) -> None:
    """Check that stage 0 all-reduces Psi; stages 1 and 2 reduce and gather Psi; stage 2 reduces each micro-batch."""
    times = layout.accumulation if layout.zero == 2 else 1
    is_all_reduce = layout.zero == 0 or layout.zero1_reduce == "all-reduce"
    op = "all_reduce" if is_all_reduce else "reduce_scatter"
    assert rows[op, "dp", "gradients"]["payload_bytes"] == 4 * psi * times
    if layout.zero:
        assert rows["all_gather", "dp", "parameters"]["payload_bytes"] == 4 * psi


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pp": 3}, "pp = 3: must be a divisor of layers = 4"),
        ({"pp": 8}, "at most layers = 4"),
        ({"pp": 2, "stage_layers": (1, 2)}, "add up to layers = 4"),
        ({"pp": 2, "stage_layers": (4,)}, "one number of layers for each of pp * chunks = 2 parts"),
        (
            {"pp": 4, "stage_layers": (2, 0, 1, 1)},
            "1 or more layers in each part; only the first",
        ),
        ({"pp": 2, "stage_layers": (5, -1)}, "1 or more layers in each part; only the first"),
        ({"pp": 2, "schedule": "interleaved", "chunks": 2, "global_batch": 3}, "multiples of pp = 2"),
        ({"pp": 2, "schedule": "interleaved"}, "at least 2 with schedule = interleaved"),
        ({"pp": 2, "chunks": 2}, "1 unless schedule = interleaved"),
        ({"schedule": "interleaved", "chunks": 2}, "pp > 1"),
        ({"pp": 2, "zero": 3}, "stage 3 would gather all parameters twice per micro-batch"),
        (
            {"zero": 3, "schedule": "gpipe", "global_batch": 2},
            "schedule = 'gpipe': must be 1f1b with zero = 3",
        ),
        ({"pp": 2, "scatter_gather": True}, "tp > 1, pp > 1 and sp = false"),
        ({"sp": True}, "tp > 1"),
        ({"order": "pp-pp-tp"}, "one of tp-dp-pp"),
        ({"schedule": "zb-h1"}, "one of gpipe, 1f1b, interleaved"),
    ],
)
def test_invalid_pipeline_layouts_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny(Layout(**settings))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
