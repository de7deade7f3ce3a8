"""Tests of pipelines and 3D layouts: parity with one process, micro-batches in flight and traffic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Experiment, Layout
from repro.engines.native.engine import NativeEngine
from repro.measure.memory import MemoryTracker
from repro.parallel import mesh as meshes
from repro.parallel.pipeline.schedule import build_schedule, in_flight
from tests.parallel.test_parity import DROPOUT, alone, assert_parity, name_of
from tests.pool import RankPool
from tests.training import LEARNING, TINY, Trained, micro_batches, smallest, tiny, train

BATCH = 8
PP2 = Layout(pp=2, micro_batch=1, global_batch=BATCH)
PP4 = replace(PP2, pp=4)
FOUR = replace(PP2, micro_batch=2)
"""Four micro-batches on two stages have a warm-up, a steady state and a cool-down."""
INTERLEAVED = replace(FOUR, schedule="interleaved", chunks=2)
THREE_AXES = replace(PP2, tp=2, dp=2)
OPTIONS: dict[str, Any] = {"recompute": True, "bucket_bytes": 3000}
LAYOUTS = [
    replace(PP4, schedule="gpipe"),
    PP4,
    replace(PP4, overlap=False),
    replace(FOUR, tp=2, **OPTIONS),
    replace(INTERLEAVED, tp=2, scatter_gather=True),
    replace(INTERLEAVED, stage_layers=(0, 1, 1, 0)),
    replace(PP2, dp=2, zero=1, zero1_reduce="all-reduce", schedule="interleaved", chunks=2),
    replace(PP2, dp=2, zero=1, order="pp-tp-dp", stage_layers=(1, 3), **OPTIONS),
    replace(PP2, dp=2, zero=2, stage_layers=(2, 0)),
    replace(THREE_AXES, zero=1, sp=True, schedule="interleaved", chunks=2, **OPTIONS),
    replace(THREE_AXES, zero=2, scatter_gather=True, order="tp-pp-dp", **OPTIONS),
    replace(THREE_AXES, overlap=False, scatter_gather=True, schedule="interleaved", chunks=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_pipelines_train_like_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    """Traffic equals the formulas. Layouts with recomputation also have small buckets and dropout."""
    training = {**LEARNING, **(DROPOUT if layout.recompute else {})}
    losses = alone(model=smallest(layout), **training).loss
    assert losses[-1] < 0.95 * losses[0], "the loss must fall, or parity proves little"
    for rank, trained in enumerate(assert_parity(request, layout, **training)):
        check_traffic(tiny(layout, smallest(layout)), rank, trained)


def check_traffic(experiment: Experiment, rank: int, trained: Trained) -> None:
    """A boundary sends bsh per direction and micro-batch (2104.04473 sec. 3.2). Pipelines do not change tp and dp."""
    layout, h = experiment.layout, TINY.hidden
    mesh = meshes.shape_only_mesh(layout, rank)
    m, v, t, stage, last = layout.accumulation, layout.chunks, layout.tp, mesh.pp.rank, layout.pp - 1
    bsh = 4 * layout.micro_batch * experiment.seq * h
    rows = {(r["op"], r["group"], r["purpose"]): r for r in trained.traffic}

    def payload(*key: str) -> int:
        return int(rows[key]["payload_bytes"]) if key in rows else 0

    # Every part except the last sends activations, and every part except the first sends gradients.
    sends = {"activations": m * (v - (stage == last)), "gradients": m * (v - (stage == 0))}
    share = t if layout.sp or layout.scatter_gather else 1
    for purpose, messages in sends.items():
        row = rows.get(("send", "pp", purpose), {"calls": 0, "payload_bytes": 0, "sent_bytes": 0})
        assert row["calls"] == messages
        assert row["payload_bytes"] == row["sent_bytes"] == messages * bsh // share
    received = sum(sends.values()) * bsh
    assert payload("all_gather", "tp", "boundary") == (received if layout.scatter_gather else 0)
    if t > 1 and not layout.sp:
        layers = sum(len(part) for part in layout.parts(experiment.model.layers)[stage :: layout.pp])
        calls = (6 if layout.recompute else 4) * layers * m
        assert rows["all_reduce", "tp", "block"]["calls"] == calls
        assert payload("all_reduce", "tp", "block") == calls * bsh
    tied = 4 * TINY.vocab * h // t // (layout.dp if layout.zero else 1)
    assert payload("all_reduce", "embedding", "tied gradients") == (tied if stage in (0, last) else 0)
    if layout.dp > 1:
        # Stage 0 all-reduces Psi, stages 1 and 2 reduce and gather Psi, and stage 2 reduces each micro-batch.
        engine = NativeEngine(experiment, mesh, torch.device("meta"))
        psi = sum(value.numel() for value in engine.full_parameters().values()) + engine.padding()
        is_all_reduce = layout.zero == 0 or layout.zero1_reduce == "all-reduce"
        op = "all_reduce" if is_all_reduce else "reduce_scatter"
        assert payload(op, "dp", "gradients") == 4 * psi * (m if layout.zero == 2 else 1)
        assert payload("all_gather", "dp", "parameters") == (4 * psi if layout.zero else 0)


def test_all_stages_skip_the_same_fp16_steps(eight: RankPool) -> None:
    """Losses on the three axes tp, pp and dp are close to those of one process."""
    layout = replace(THREE_AXES, zero=1, precision="fp16")
    training = {"loss_scale": 2.0**20, "loss_scale_window": 3, "loss_scale_hysteresis": 1, "steps": 8}
    model = smallest(layout)
    found = eight.run(train, tiny(layout, model, **training))
    assert found[0].skipped
    for trained in found:
        assert (trained.skipped, trained.scale) == (found[0].skipped, found[0].scale)
    torch.testing.assert_close(found[0].loss, alone("fp16", model, **training).loss, rtol=2e-2, atol=0.0)


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
    mesh = meshes.distributed_mesh(experiment.layout, "cpu")
    live: list[int] = []
    with MemoryTracker() as tracker:
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
