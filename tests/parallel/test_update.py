"""The update of one process, by numbers worked out by hand: learning rate, clipping, skipped steps, AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Layout, Training
from repro.config.enums import OperatorSet, Phase
from repro.engines.native.checkpoint import state
from repro.engines.native.engine import NativeEngine
from repro.engines.native.model_part import learning_rate
from repro.parallel import mesh as meshes
from repro.parallel.zero.optimizer import divisor_for
from repro.simulate.memory.live_bytes import LiveBytes
from repro.simulate.trace.events import Operator, PhaseStart
from repro.simulate.trace.roles import roles, trace
from tests.training import TINY, micro_batches, tiny

NOT, SKIPPED = torch.tensor(0.0), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("norm", "clip", "scale", "divisor"),
    [
        (4.0, 0.5, None, 8.0),
        (0.25, 0.5, None, 1.0),  # a norm below the limit is left as it is
        (0.25, 0.5, 64.0, 64.0),
        (4.0, 0.5, 64.0, 512.0),
        (4.0, 0.0, 64.0, 64.0),
    ],
)
def test_gradients_are_scaled_down_to_the_limit_and_never_up(
    norm: float, clip: float, scale: float | None, divisor: float
) -> None:
    found = divisor_for(torch.tensor(norm), clip, None if scale is None else torch.tensor(scale))
    assert found is not None
    assert float(found) == pytest.approx(divisor, rel=1e-5)
    assert divisor_for(torch.tensor(norm), 0.0, None) is None


COSINE = {"schedule": "cosine", "lr": 1.0, "min_lr": 0.2, "warmup_steps": 2, "steps": 20}


@pytest.mark.parametrize(
    ("training", "rates"),
    [
        ({"lr": 0.8, "warmup_steps": 4}, {0: 0.2, 1: 0.4, 3: 0.8, 4: 0.8, 99: 0.8}),
        ({"lr": 0.8}, {0: 0.8, 99: 0.8}),
        # Half a turn of the cosine from 1.0 to 0.2 in the eight steps after the second; a quarter of it after two.
        (
            COSINE | {"decay_steps": 10},
            {0: 0.5, 1: 1.0, 2: 1.0, 4: 0.6 + 0.4 * math.sqrt(0.5), 6: 0.6, 10: 0.2, 19: 0.2},
        ),
        (COSINE, {2: 1.0, 11: 0.6, 20: 0.2}),  # over all steps where nothing else is said
        (COSINE | {"decay_steps": 2}, {1: 1.0, 2: 1.0, 3: 0.2}),  # at once where no step is left
    ],
)
def test_the_learning_rate_after_so_many_steps(training: dict[str, Any], rates: dict[int, float]) -> None:
    found = {taken: float(learning_rate(Training(**training), torch.tensor(float(taken)))) for taken in rates}
    assert found == pytest.approx(rates)


def engine(layout: Layout | None = None, **training: Any) -> NativeEngine:
    """Return the engine of one rank."""
    experiment = tiny(layout or Layout(), **training)
    return NativeEngine(experiment, meshes.single_rank_mesh(), torch.device("cpu"))


def test_matrices_decay_and_vectors_do_not() -> None:
    """Without a gradient all that a step does is decay; three biases in one parameter are no matrix."""
    made = engine(lr=0.1, weight_decay=0.5)
    for bucket in made.buckets:
        bucket.master.fill_(1.0)
        bucket.gradient_shard.zero_()
    made.optimizer.update(made.gradients.shards, torch.tensor(0.1), None, None)
    values = made.full_parameters()
    matrices = {"tokens", "positions", "qkv", "out", "up", "down"}
    for name, value in values.items():
        decayed = 1.0 - 0.1 * 0.5 if name.rpartition(".")[2] in matrices else 1.0
        assert torch.allclose(value, torch.tensor(decayed)), name
    assert {name.rpartition(".")[2] for name in values} >= matrices | {"qkv_bias"}


def test_one_process_waits_for_no_other_stage() -> None:
    made = engine()
    seen: list[Phase] = []
    made.step(micro_batches(tiny(Layout()), 0, 0), seen.append)
    assert seen == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert made.pipeline_report() == {}


def test_a_skipped_step_changes_nothing_and_does_not_count() -> None:
    """Not the weights, nor the moments, nor the steps that bias correction and warm-up go by."""
    made = engine(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-3, weight_decay=0.0)
    (bucket,) = made.buckets[:1]
    before = bucket.master.clone()
    for skip, steps in ((SKIPPED, 0), (NOT, 1), (SKIPPED, 1), (SKIPPED, 1)):
        bucket.gradient_shard.fill_(2.0)
        made.optimizer.update(made.gradients.shards, torch.tensor(0.1), None, skip)
        assert float(made.optimizer.step_count) == steps
        first, second = made.optimizer.moments[0]
        assert float(first[0]) == pytest.approx(0.2 * steps)
        assert float(second[0]) == pytest.approx(0.04 * steps)
    # One step with bias correction: 0.2 / 0.1 over the root of 0.04 / 0.01, plus eps outside of the root.
    expected = before[0] - 0.1 * 2.0 / (2.0 + 1e-3)
    assert float(bucket.master[0]) == pytest.approx(float(expected), abs=1e-7)
    bucket.gradient_shard.fill_(2.0)
    made.optimizer.update(made.gradients.shards, torch.tensor(0.1), None, None)
    assert float(made.optimizer.step_count) == 2


PASSES = (OperatorSet.SOFTMAX, OperatorSet.UNFUSED)


def updated(kernels: OperatorSet, precision: str, gradient: float) -> list[torch.Tensor]:
    """Masters and moments after one update of the same weights by the same gradients."""
    layout = Layout(precision=precision, kernels=kernels, zero=1, bucket_bytes=2_000)
    made = engine(layout, lr=0.1, clip=0.5, loss_scale=2.0**12)
    assert len(made.buckets) > 1
    chance = torch.Generator().manual_seed(7)
    scale = 1.0 if made.scaler is None else float(made.scaler.scale)
    for bucket in made.buckets:
        bucket.master.normal_(generator=chance)
        given = torch.empty_like(bucket.master).normal_(generator=chance)
        bucket.gradient_shard.copy_(given * gradient * scale)
    made._update(torch.tensor(1.0), lambda phase: None)
    assert all(s is b.gradient_shard for s, b in zip(made.gradients.shards, made.buckets, strict=True))
    for bucket in made.buckets:
        assert torch.equal(bucket.shard, bucket.master.to(bucket.shard.dtype))
    states = zip(made.buckets, made.optimizer.moments, strict=True)
    return [tensor for bucket, moments in states for tensor in (bucket.master, *moments)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("gradient", [1.0, 1e-4], ids=["clipped", "as it is"])
@pytest.mark.parametrize("kernels", PASSES)
def test_an_update_in_passes_is_the_update(kernels: OperatorSet, gradient: float, precision: str) -> None:
    """But for the order in which the loss scale and the clip divide."""
    for one, other in zip(
        updated(kernels, precision, gradient), updated(OperatorSet.FUSED, precision, gradient), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kernels", PASSES)
def test_an_update_in_passes_that_overflows_changes_nothing(kernels: OperatorSet) -> None:
    before, after = updated(kernels, "fp16", 0.0), updated(kernels, "fp16", math.inf)
    assert not any(moments.any() for moments in (*after[1::3], *after[2::3]))
    assert all(torch.isfinite(each).all() for each in after)
    assert [each.shape for each in before] == [each.shape for each in after]


@pytest.mark.parametrize(
    ("kernels", "precision", "moved", "held"),
    [
        # Norm 2, gradient 2, master and moments there and back 24, parameter 2.
        ("fused", "fp16", 30, 0),
        # Widened 6, unscaled 8, norm 4, clipped 8, Adam 28, copied 6; fp32 gradients.
        ("softmax", "fp16", 60, 4),
        ("unfused", "fp16", 60, 4),
        ("softmax", "bf16", 52, 4),  # no loss scale
        ("softmax", "fp32", 40, 0),  # nothing to widen, and one copy of the parameters
    ],
)
def test_bytes_that_an_update_moves_and_holds(kernels: str, precision: str, moved: int, held: int) -> None:
    experiment = tiny(Layout(precision=precision, kernels=kernels, bucket_bytes=1 << 20), clip=1.0)
    events = trace(experiment, roles(experiment)[0]).events
    starts = [i for i, e in enumerate(events) if isinstance(e, PhaseStart) and e.name == Phase.OPTIMIZER]
    numel = NativeEngine(experiment, meshes.single_rank_mesh(), torch.device("cpu")).local_parameters()
    update = events[starts[-1] :]
    found = sum(event.read + event.written for event in update if isinstance(event, Operator))
    assert found / numel == pytest.approx(moved, rel=0.02)
    live = LiveBytes(events)
    of_update = live.total[next(changes for changes, _, phase in live.phases if phase is update[0]) :]
    assert (of_update.max() - of_update[0]) / numel == pytest.approx(held, abs=0.02 * 4)


@pytest.mark.parametrize(
    ("kernels", "added", "copied"),
    [
        # Each later micro-batch's read, what is there read and written; the first one's copied where gradients are
        # reduced, these copied to be reduced and back.
        ("softmax", 6, 12),
        ("unfused", 6, 12),
        ("fused", 0, 0),  # by the products themselves
    ],
)
def test_bytes_that_weight_gradients_move_beside_their_products(
    kernels: str, added: int, copied: int
) -> None:
    """Counted of what is as large as a matrix of a layer: vectors have passes of their own in every set."""
    layout = Layout(precision="fp16", kernels=kernels, micro_batch=1, global_batch=3, bucket_bytes=1 << 20)
    experiment = tiny(layout, replace(TINY, vocab=2, seq=4))
    m = experiment.model
    matrices = 12 * m.layers * m.hidden**2
    assert m.ffn_width * m.seq < m.hidden**2, "activations are less, and embeddings"
    traced = trace(experiment, roles(experiment)[0])
    moved = dict.fromkeys(("aten.add_", "aten.copy_"), 0)
    for event in traced.step:
        if isinstance(event, PhaseStart) and event.name == Phase.OPTIMIZER:
            break
        if isinstance(event, Operator) and event.name in moved and event.written >= 2 * m.hidden**2:
            moved[event.name] += event.read + event.written
    assert moved["aten.add_"] / matrices == pytest.approx(2 * added)
    assert moved["aten.copy_"] / matrices == pytest.approx(copied, rel=0.1)


def test_a_resumed_scaler_remembers_how_many_overflows_it_has_seen() -> None:
    layout = Layout(precision="fp16")
    wrote, reads = (engine(layout, loss_scale=2.0**10, loss_scale_hysteresis=3) for _ in range(2))
    assert wrote.scaler is not None
    assert reads.scaler is not None
    for overflow in (NOT, SKIPPED, NOT, NOT):
        wrote.scaler.update(overflow)
    wrote.optimizer.step_count.fill_(3)
    numbers = state.scalars(wrote)
    assert numbers == {"optimizer_steps": 3, "scaler": {"scale": 2.0**10, "good_steps": 2, "tolerance": 2}}
    state.restore_states(reads, numbers, lambda name, state, rectangle, into: None)
    assert state.scalars(reads) == numbers
    for expected in (2.0**10, 2.0**9):  # two more overflows, and it halves
        reads.scaler.update(SKIPPED)
        assert float(reads.scaler.scale) == expected
