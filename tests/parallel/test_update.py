"""Tests of the update with values computed by hand: learning rate, loss scale, clipping, skipped steps, AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repro.config import Layout, Training
from repro.config.enums import Phase
from repro.engines.native.checkpoint import state
from repro.engines.native.engine import NativeEngine
from repro.engines.native.model_part import learning_rate
from repro.parallel import mesh as meshes
from repro.parallel.zero.optimizer import LossScaler, ShardedAdamW, divisor_for
from repro.simulate.memory.live_bytes import LiveBytes
from repro.simulate.trace.events import Operator, PhaseStart
from repro.simulate.trace.roles import roles, trace
from tests.pool import RankPool
from tests.training import TINY, micro_batches, tiny, train

APPLIED, SKIPPED = torch.tensor(0.0), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("norm", "clip", "scale", "divisor"),
    [
        (4.0, 0.5, None, 8.0),
        (0.25, 0.5, None, 1.0),  # a norm below the limit does not change the gradients
        (0.25, 0.5, 64.0, 64.0),
        (4.0, 0.5, 64.0, 512.0),
        (4.0, 0.0, 64.0, 64.0),
        (4.0, 0.0, None, None),
    ],
)
def test_clipping_never_scales_gradients_up(
    norm: float, clip: float, scale: float | None, divisor: float | None
) -> None:
    found = divisor_for(torch.tensor(norm), clip, None if scale is None else torch.tensor(scale))
    assert (None if found is None else float(found)) == pytest.approx(divisor, rel=1e-5)


COSINE = {"schedule": "cosine", "lr": 1.0, "min_lr": 0.2, "warmup_steps": 2, "steps": 20}


@pytest.mark.parametrize(
    ("training", "rates"),
    [
        ({"lr": 0.8, "warmup_steps": 4}, {0: 0.2, 1: 0.4, 3: 0.8, 4: 0.8, 99: 0.8}),
        ({"lr": 0.8}, {0: 0.8, 99: 0.8}),
        # The cosine falls from 1.0 to 0.2 in the eight steps after the second; two steps are pi/4.
        (
            COSINE | {"decay_steps": 10},
            {0: 0.5, 1: 1.0, 2: 1.0, 4: 0.6 + 0.4 * math.sqrt(0.5), 6: 0.6, 10: 0.2, 19: 0.2},
        ),
        (COSINE, {2: 1.0, 11: 0.6, 20: 0.2}),  # the default is a decay over all steps
        (COSINE | {"decay_steps": 2}, {1: 1.0, 2: 1.0, 3: 0.2}),  # no step remains for the decay
    ],
)
def test_learning_rate_follows_warm_up_and_decay(training: dict[str, Any], rates: dict[int, float]) -> None:
    found = {step: float(learning_rate(Training(**training), torch.tensor(float(step)))) for step in rates}
    assert found == pytest.approx(rates)


class ReferenceScaler:
    """Loss scaler of the software of 2019 to 2021, in plain Python numbers."""

    def __init__(self, scale: float, window: int, hysteresis: int):
        self.scale, self.window, self.hysteresis = scale, window, hysteresis
        self.good_steps, self.tolerance = 0, hysteresis

    def update(self, overflow: bool) -> None:
        self.good_steps = 0 if overflow else self.good_steps + 1
        self.tolerance -= overflow
        if overflow and self.tolerance <= 0:
            self.scale = max(self.scale / 2, 1.0)
        if self.good_steps == self.window:
            self.good_steps, self.tolerance, self.scale = 0, self.hysteresis, self.scale * 2


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 6), st.integers(1, 3))
def test_scaler_equals_the_reference(overflows: list[bool], window: int, hysteresis: int) -> None:
    scaler = LossScaler(2.0**16, window, hysteresis, torch.device("cpu"))
    reference = ReferenceScaler(2.0**16, window, hysteresis)
    for overflow in overflows:
        scaler.update(torch.tensor(float(overflow)))
        reference.update(overflow)
        assert float(scaler.scale) == reference.scale


def test_overflowing_steps_are_skipped_until_the_scale_is_small(two: RankPool) -> None:
    """Both ranks skip the same steps and then learn."""
    layout = Layout(dp=2, zero=3, micro_batch=4, precision="fp16")
    first, second = two.run(train, tiny(layout, loss_scale=2.0**24))
    assert (first.skipped, first.scale) == (second.skipped, second.scale)
    steps = next(step for step in range(21) if step not in first.skipped)
    assert 2 <= steps < 15, "2^24 must overflow"
    # With hysteresis 2, the first overflow does not change the scale, and every later overflow halves it.
    assert first.scale[: steps + 1] == [2.0**24 / 2 ** max(0, step - 1) for step in range(steps + 1)]
    assert first.loss[: steps + 1] == pytest.approx(first.loss[:1] * (steps + 1), rel=0.1), "no update"
    assert len(first.skipped) < 15
    assert first.loss[-1] < first.loss[0]


def make_engine(layout: Layout | None = None, **training: Any) -> NativeEngine:
    """Return the engine of one rank."""
    experiment = tiny(layout or Layout(), **training)
    return NativeEngine(experiment, meshes.single_rank_mesh(), torch.device("cpu"))


def test_weight_decay_applies_only_to_matrices() -> None:
    """Without gradients, a step only decays weights. The joint biases of queries, keys and values are not a matrix."""
    engine = make_engine(lr=0.1, weight_decay=0.5)
    for bucket in engine.buckets:
        bucket.master.fill_(1.0)
        bucket.gradient_shard.zero_()
    engine.optimizer.update(engine.gradients.shards, torch.tensor(0.1), None, None)
    values = engine.full_parameters()
    matrices = {"tokens", "positions", "qkv", "out", "up", "down"}
    for name, value in values.items():
        decayed = 1.0 - 0.1 * 0.5 if name.rpartition(".")[2] in matrices else 1.0
        assert torch.allclose(value, torch.tensor(decayed)), name
    assert {name.rpartition(".")[2] for name in values} >= matrices | {"qkv_bias"}


def test_one_process_has_no_pipeline_phases() -> None:
    engine = make_engine()
    phases: list[Phase] = []
    engine.step(micro_batches(tiny(Layout()), 0, 0), phases.append)
    assert phases == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert engine.pipeline_report() == {}


def test_skipped_step_changes_no_state() -> None:
    """The state is weights, moments, and the step count of bias correction and warm-up."""
    engine = make_engine(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-3, weight_decay=0.0)
    bucket = engine.buckets[0]
    before = float(bucket.master[0])
    # One step with bias correction: (0.2 / 0.1) / (sqrt(0.04 / 0.01) + eps).
    after = before - 0.1 * 2.0 / (2.0 + 1e-3)
    for skip, steps in ((SKIPPED, 0), (APPLIED, 1), (SKIPPED, 1), (SKIPPED, 1), (None, 2)):
        bucket.gradient_shard.fill_(2.0)
        engine.optimizer.update(engine.gradients.shards, torch.tensor(0.1), None, skip)
        assert float(engine.optimizer.step_count) == steps
        if steps < 2:
            moments = [float(moment[0]) for moment in engine.optimizer.moments[0]]
            assert moments == pytest.approx([0.2 * steps, 0.04 * steps])
            assert float(bucket.master[0]) == pytest.approx(after if steps else before, abs=1e-7)


def updated_states(kernels: str, precision: str, gradient: float) -> list[torch.Tensor]:
    """Return master weights and moments after one update of random weights by random gradients times `gradient`."""
    layout = Layout(precision=precision, kernels=kernels, zero=1, bucket_bytes=2_000)
    engine = make_engine(layout, lr=0.1, clip=0.5, loss_scale=2.0**12)
    assert len(engine.buckets) > 1
    generator = torch.Generator().manual_seed(7)
    scale = 1.0 if engine.scaler is None else float(engine.scaler.scale)
    for bucket in engine.buckets:
        bucket.master.normal_(generator=generator)
        values = torch.empty_like(bucket.master).normal_(generator=generator)
        bucket.gradient_shard.copy_(values * gradient * scale)
    engine._update(torch.tensor(1.0), lambda phase: None)
    assert all(s is b.gradient_shard for s, b in zip(engine.gradients.shards, engine.buckets, strict=True))
    for bucket in engine.buckets:
        assert torch.equal(bucket.shard, bucket.master.to(bucket.shard.dtype))
    states = zip(engine.buckets, engine.optimizer.moments, strict=True)
    return [tensor for bucket, moments in states for tensor in (bucket.master, *moments)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("kernels", "gradient"), [("softmax", 1.0), ("unfused", 1e-4)], ids=["clipped", "unclipped"]
)
def test_update_in_passes_equals_fused_update(kernels: str, gradient: float, precision: str) -> None:
    """The order of the divisions by loss scale and clipping differs."""
    fused = updated_states("fused", precision, gradient)
    for found, expected in zip(updated_states(kernels, precision, gradient), fused, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7)
    if precision == "fp16":
        after = updated_states(kernels, "fp16", math.inf)
        assert not any(moments.any() for moments in (*after[1::3], *after[2::3])), "the step is skipped"
        assert all(torch.isfinite(tensor).all() for tensor in after)


@pytest.mark.parametrize(
    ("kernels", "precision", "moved", "allocated"),
    [
        # Norm 2, gradient 2, read and write of master weights and moments 24, parameter 2.
        ("fused", "fp16", 30, 0),
        # Conversion to fp32 6, unscaling 8, norm 4, clipping 8, Adam 28, copy 6. Allocated: fp32 gradients.
        ("softmax", "fp16", 60, 4),
        ("unfused", "fp16", 60, 4),
        ("softmax", "bf16", 52, 4),  # no loss scale
        ("softmax", "fp32", 40, 0),  # no conversion, and one copy of the parameters
    ],
)
def test_update_moves_expected_bytes(kernels: str, precision: str, moved: int, allocated: int) -> None:
    experiment = tiny(Layout(precision=precision, kernels=kernels, bucket_bytes=1 << 20), clip=1.0)
    events = trace(experiment, roles(experiment)[0]).events
    starts = [i for i, e in enumerate(events) if isinstance(e, PhaseStart) and e.name == Phase.OPTIMIZER]
    numel = NativeEngine(experiment, meshes.single_rank_mesh(), torch.device("cpu")).local_parameters()
    update = events[starts[-1] :]
    found = sum(event.read + event.written for event in update if isinstance(event, Operator))
    assert found / numel == pytest.approx(moved, rel=0.02)
    live = LiveBytes(events)
    of_update = live.total[next(changes for changes, _, phase in live.phases if phase is update[0]) :]
    assert (of_update.max() - of_update[0]) / numel == pytest.approx(allocated, abs=0.02 * 4)


@pytest.mark.parametrize(
    ("kernels", "added", "copied"),
    [
        # Added: each later gradient is read, and the sum is read and written. Copied: the first gradient to the
        # buffer, and the buffer to and from the copy of the reduction.
        ("softmax", 6, 12),
        ("unfused", 6, 12),
        ("fused", 0, 0),  # the products accumulate
    ],
)
def test_accumulation_moves_expected_bytes(kernels: str, added: int, copied: int) -> None:
    """The counts contain operators with outputs of at least a layer's matrix, since every set has passes of vectors."""
    layout = Layout(precision="fp16", kernels=kernels, micro_batch=1, global_batch=3, bucket_bytes=1 << 20)
    experiment = tiny(layout, replace(TINY, vocab=2, seq=4))
    m = experiment.model
    matrices = 12 * m.layers * m.hidden**2
    assert m.ffn_width * m.seq < m.hidden**2, "activations and embeddings are smaller"
    traced = trace(experiment, roles(experiment)[0])
    moved = dict.fromkeys(("aten.add_", "aten.copy_"), 0)
    for event in traced.step:
        if isinstance(event, PhaseStart) and event.name == Phase.OPTIMIZER:
            break
        if isinstance(event, Operator) and event.name in moved and event.written >= 2 * m.hidden**2:
            moved[event.name] += event.read + event.written
    assert moved["aten.add_"] / matrices == pytest.approx(2 * added)
    assert moved["aten.copy_"] / matrices == pytest.approx(copied, rel=0.1)


def test_restored_loss_scaler_has_the_remaining_hysteresis() -> None:
    layout = Layout(precision="fp16")
    saved, restored = (make_engine(layout, loss_scale=2.0**10, loss_scale_hysteresis=3) for _ in range(2))
    assert saved.scaler is not None
    assert restored.scaler is not None
    for overflow in (APPLIED, SKIPPED, APPLIED, APPLIED):
        saved.scaler.update(overflow)
    saved.optimizer.step_count.fill_(3)
    numbers = state.scalars(saved)
    assert numbers == {"optimizer_steps": 3, "scaler": {"scale": 2.0**10, "good_steps": 2, "tolerance": 2}}
    state.restore_states(restored, numbers, lambda name, state, rectangle, into: None)
    assert state.scalars(restored) == numbers
    for expected in (2.0**10, 2.0**9):  # the second further overflow halves the scale
        restored.scaler.update(SKIPPED)
        assert float(restored.scaler.scale) == expected


def test_adjacent_parameters_of_a_group_are_one_part_of_a_shard() -> None:
    """One part is one operator of the update. Gaps and the end of the shard are padding, of group None."""
    groups = [(0, 0, 4), (0, 4, 6), (1, 6, 7), (1, 9, 12)]
    ranges = [(SimpleNamespace(group=group), start, stop) for group, start, stop in groups]
    bucket: Any = SimpleNamespace(ranges=ranges, master=torch.zeros(16))
    assert ShardedAdamW._parts_of(bucket) == [(0, 6), (1, 1), (None, 2), (1, 3), (None, 4)]
