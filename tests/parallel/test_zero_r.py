"""Tests of ZeRO-R (1910.02054 sec. 6): parity with one process, less memory, and the additional traffic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Experiment, Layout
from repro.config.enums import Category
from repro.engines.native.engine import NativeEngine
from repro.engines.native.model_part import MicroBatch
from repro.measure.memory import MemoryTracker
from repro.model.gpt import BatchPosition
from repro.parallel import mesh as meshes
from repro.parallel import storage
from repro.parallel.zero.grad_reduce import GradientReducer
from repro.wrap.parallelize import parallelize
from tests.parallel.test_parity import alone, assert_same
from tests.parallel.test_pipeline import merge_stages
from tests.pool import RankPool, pool_of
from tests.training import FEW, TINY, micro_batches, tiny, train

BATCH = 8
SHALLOW = replace(TINY, name="shallow", layers=2)
DROPOUT = {"dropout": 0.1, **FEW}
TP = Layout(tp=2, micro_batch=BATCH, recompute=True)
PA = {"pa": True}
CPU = {"pa": True, "pa_cpu": True}
MD = {"md": True}
FUSED = {"cb": False}
ALL = {**CPU, **MD}


def name_of(value: Any) -> str | None:
    """Return a short name for the test's id."""
    if not isinstance(value, Layout):
        return None
    degrees = [f"{axis}{n}" for axis in ("tp", "pp", "dp") if (n := getattr(value, axis)) > 1]
    options = [key for key in ("pa", "pa_cpu", "md") if getattr(value, key)]
    return "-".join([*degrees, f"z{value.zero}", *options, *([] if value.cb else ["fused"])])


# -- parity ------------------------------------------------------------------------------


def replicas(dp: int, **settings: Any) -> Layout:
    """Return `TP` with `dp` replicas and two micro-batches per replica."""
    return replace(TP, dp=dp, micro_batch=BATCH // dp // 2, global_batch=BATCH, **settings)


PARITY = [
    replace(TP, **PA),
    replace(TP, tp=4, **ALL),
    replace(TP, sp=True, pa_cpu=True, **MD),
    replicas(2, zero=0, **ALL, **FUSED),
    replicas(2, zero=3, **ALL),
    replicas(2, zero=2, **PA, **FUSED),
    replicas(2, tp=1, zero=0, gradient_as_bucket_view=False, **FUSED),
    replicas(2, tp=1, zero=1, zero1_reduce="all-reduce", **FUSED),
    replicas(2, tp=1, zero=2, pa_cpu=True, **MD),
    replace(TP, pp=2, micro_batch=2, schedule="interleaved", chunks=2, **ALL),
    replace(TP, tp=1, pp=2, dp=2, micro_batch=2, zero=2, schedule="gpipe", pa_cpu=True, **MD),
    replace(TP, tp=1, pp=2, dp=2, micro_batch=2, zero=1, **MD, **FUSED),
]


@pytest.mark.parametrize("layout", PARITY, ids=name_of)
def test_fp32_equals_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    model = TINY if layout.chunks > 1 else SHALLOW
    found = pool_of(request, layout).run(train, tiny(layout, model, **DROPOUT))
    assert_same(merge_stages(found), alone(model=model, **DROPOUT), 1e-5, 1e-5)


def test_bf16_equals_one_process_within_rounding(four: RankPool) -> None:
    expected = alone("bf16", SHALLOW, steps=8)
    layout = replicas(2, precision="bf16", zero=2, **ALL, **FUSED)
    for trained in four.run(train, tiny(layout, SHALLOW, steps=8)):
        torch.testing.assert_close(
            torch.tensor(trained.loss), torch.tensor(expected.loss), rtol=4 * 2.0**-8, atol=0.0
        )


# -- memory and traffic ----------------------------------------------------------------


def measure(experiment: Experiment, device: str = "cpu", steps: int = 2) -> dict[str, Any]:
    """Run steps of this rank, and return live bytes at several moments and the traffic of the last step."""
    layout = experiment.layout
    mesh = meshes.distributed_mesh(layout, "cpu") if device == "cpu" else meshes.shape_only_mesh(layout)
    fused = 0
    forward: dict[str, int] = {}
    with MemoryTracker() as tracker:
        engine = NativeEngine(experiment, mesh, torch.device(device))
        initial = tracker.live()

        def observe_buffers(*_: object) -> None:
            nonlocal fused
            for record in tracker._live.values():
                live = record.reference()
                if live is not None and storage.category_of(live) == Category.COMMUNICATION:
                    fused = max(fused, live.nbytes())

        def observe_phase(phase: str) -> None:
            nonlocal forward
            tracker.phase = phase
            if phase == "backward":
                forward = tracker.live()

        mesh.ledger.observers.append(observe_buffers)
        for step in range(steps):
            mesh.ledger.reset()
            batches = micro_batches(experiment, mesh.dp.rank, step)
            if device == "meta":
                tokens = torch.zeros(layout.micro_batch, experiment.seq, dtype=torch.int64, device=device)
                batches = [MicroBatch(tokens, tokens, BatchPosition(step, 0)) for _ in batches]
            engine.step(batches, observe_phase)
            engine.synchronize()
        del batches
        final = tracker.live()
    arenas = [engine.checkpoints.arena if engine.checkpoints else None]
    arenas += [bucket.pool for bucket in engine.buckets]
    return {
        "initial": initial,
        "most": tracker.most,
        "forward": forward,
        "final": final,
        "rows": {(r["op"], r["group"], r["purpose"]): r for r in mesh.ledger.rows()},
        "fused": fused,
        "padded": [bucket.plan.padded for bucket in engine.buckets],
        "free": all(arena is None or arena.used == 0 for arena in arenas),
    }


def checkpoint_bytes(layout: Layout) -> int:
    """Return the bytes of all checkpoints of one micro-batch, not divided by tp."""
    return TINY.layers * layout.micro_batch * TINY.seq * TINY.hidden * 4


@pytest.mark.parametrize("tp", [2, 4])
def test_pa_divides_checkpoints_by_tp(request: pytest.FixtureRequest, tp: int) -> None:
    """P_a leaves 1/tp of the memory (sec. 6.1). It adds one all-gather of b s h per block (sec. 8), 1/12 of the traffic
    of the block's 2 + 2 + 2 all-reduces."""
    plain = replace(TP, tp=tp)
    pool, size = pool_of(request, plain), checkpoint_bytes(plain)
    before, after = (pool.run(measure, tiny(layout)) for layout in (plain, replace(plain, **PA)))
    for without, with_it in zip(before, after, strict=True):
        assert without["most"][Category.CHECKPOINTS] == size
        assert with_it["most"][Category.CHECKPOINTS] == size // tp
        # Between forward and backward, P_a changes only the checkpoints: the graph does not retain the inputs.
        assert with_it["forward"][Category.CHECKPOINTS] == size // tp
        assert with_it["forward"]["total"] == without["forward"]["total"] - size + size // tp
        rows = dict(with_it["rows"])
        gathered = rows.pop(("all_gather", "tp", "checkpoints"))
        assert rows == without["rows"], "other traffic is unchanged"
        assert gathered["calls"] == TINY.layers * plain.accumulation
        assert gathered["payload_bytes"] == size * plain.accumulation
        assert 12 * gathered["sent_bytes"] == rows["all_reduce", "tp", "block"]["sent_bytes"]


@pytest.mark.parametrize("md", [False, True], ids=["", "md"])
def test_offload_leaves_at_most_two_checkpoints_on_the_device(two: RankPool, md: bool) -> None:
    """Host memory has all checkpoints after forward. The device has the checkpoint in use and the prefetched one."""
    layout = replace(TP, **CPU, md=md)
    part = checkpoint_bytes(layout) // TINY.layers // 2
    for seen in two.run(measure, tiny(layout)):
        assert seen["most"][Category.HOST] == TINY.layers * part
        assert seen["forward"][Category.CHECKPOINTS] == 0
        assert seen["most"][Category.CHECKPOINTS] == 2 * part
        assert seen["final"][Category.CHECKPOINTS] == 0
        assert seen["final"][Category.HOST] == (TINY.layers * part if md else 0)
        assert seen["free"]


def test_arena_fits_the_micro_batches_in_flight(four: RankPool) -> None:
    """1F1B has two micro-batches in flight on the first of two stages and one on the last. P_a halves their bytes."""
    layout = replace(TP, pp=2, micro_batch=2, **PA, **MD)
    size = checkpoint_bytes(layout) // 2 // 2
    found = four.run(measure, tiny(layout))
    final = [seen["final"][Category.CHECKPOINTS] for seen in found]
    assert final == [2 * size] * 2 + [size] * 2
    assert final == [seen["most"][Category.CHECKPOINTS] for seen in found]
    assert all(seen["free"] for seen in found)


@pytest.mark.parametrize("zero", range(3))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fused_buffer_takes_4_psi_without_constant_buffers(two: RankPool, precision: str, zero: int) -> None:
    """Without C_B, the fp32 buffer has 4 Psi bytes. With C_B, no buffer grows with the model (sec. 3.2, 6.2)."""
    limit = 40_000
    size = 4 if precision == "fp32" else 2
    layout = Layout(dp=2, zero=zero, precision=precision, bucket_bytes=limit)
    for layers in (2, 6):
        model = replace(TINY, layers=layers)
        for seen in two.run(measure, tiny(replace(layout, **FUSED), model)):
            (padded,) = seen["padded"]
            assert seen["fused"] == 4 * padded
            sent = seen["rows"]["all_reduce" if zero == 0 else "reduce_scatter", "dp", "gradients"]
            assert (sent["calls"], sent["payload_bytes"]) == (1, 4 * padded)
            assert seen["final"][Category.COMMUNICATION] == 0
        for seen in two.run(measure, tiny(layout, model)):
            assert max(seen["padded"]) * size <= limit
            assert seen["fused"] <= limit
            # gloo receives half of each bucket in reduction, and of the bucket that is launched.
            assert seen["most"][Category.COMMUNICATION] <= (GradientReducer.IN_FLIGHT + 1) * limit // 2


@pytest.mark.parametrize("zero", [2, 3])
def test_md_allocates_gradients_once(two: RankPool, zero: int) -> None:
    """In addition to the shards, stages 2 and 3 have a pool of constant size."""
    layout = Layout(dp=2, zero=zero, bucket_bytes=40_000, global_batch=4)
    plain = two.run(measure, tiny(layout))
    for seen, without in zip(two.run(measure, tiny(replace(layout, **MD))), plain, strict=True):
        padded = seen["padded"]
        pool = sum(sorted(padded)[-GradientReducer.IN_FLIGHT - 2 :]) * 4
        assert without["final"][Category.GRADIENTS] == sum(padded) // 2 * 4
        for moment in ("initial", "final", "most"):
            assert seen[moment][Category.GRADIENTS] == sum(padded) // 2 * 4 + pool
        assert seen["free"]


def test_gradient_pool_that_is_too_small_grows_once() -> None:
    """Parameters that are used in the reverse order of their declaration open all buckets before the first is complete.

    The pool grows in the first step only.
    """
    found = []
    for md in (False, True):
        torch.manual_seed(0)
        module = ReverseOrder()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        module, optimizer = parallelize(module, optimizer, Layout(zero=2, bucket_bytes=64, md=md))
        pools = []
        for step in range(3):
            module(torch.full((2, 4), 1.0 + step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            pools.append(module.repro.buckets[0].pool)
            found.append((md, step, [p.detach().clone() for p in module.parameters()]))
            if md:
                assert (pools[-1].capacity, pools[-1].used) == (8, 0)
    for (_, _, plain), (_, _, pooled) in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(pooled, plain, rtol=0, atol=0)


class ReverseOrder(torch.nn.Module):
    """Model of eight matrices in separate buckets; forward uses the last matrix first."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(4, 4) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in list(self.weights)[::-1]:
            x = (x @ weight).sin()
        return x


@pytest.mark.parametrize(
    "layout",
    [
        replace(TP, **CPU, precision="bf16"),
        replace(TP, **ALL),
        replace(TP, tp=1, dp=2, micro_batch=1, zero=3, **MD, pa_cpu=True),
        replace(TP, tp=1, dp=2, micro_batch=2, zero=1, **MD, **FUSED),
    ],
    ids=name_of,
)
def test_meta_tensors_have_the_same_traffic_and_memory(two: RankPool, layout: Layout) -> None:
    """The compared memory is that of checkpoints on device and host, parameters and gradients."""
    experiment = tiny(layout)
    on_meta, on_cpu = measure(experiment, "meta"), two.run(measure, experiment)[0]
    assert on_meta["rows"] == on_cpu["rows"]
    for category in (Category.CHECKPOINTS, Category.HOST, Category.PARAMETERS, Category.GRADIENTS):
        assert on_meta["most"][category] == on_cpu["most"][category], category
