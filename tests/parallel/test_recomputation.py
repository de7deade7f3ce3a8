"""Tests of activation checkpoints without an engine, and of selective recomputation (2205.05198 sec. 5)."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import permutations
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor

from repro.config import ConfigError, Layout, Model
from repro.config.enums import Category
from repro.config.files import build_dataclass
from repro.config.words import describe_layout, layout_options
from repro.measure.memory import MemoryTracker
from repro.model.counts import hardware_flops, model_flops
from repro.parallel import mesh as meshes
from repro.parallel import storage
from repro.parallel.zero_r.activation_checkpointing import (
    ActivationCheckpoint,
    ActivationCheckpoints,
    recompute,
)
from repro.parallel.zero_r.defragmentation import Arena
from repro.simulate.trace.roles import roles, trace
from tests.parallel.test_operator_sets import LONG
from tests.parallel.test_parity import DROPOUT, name_of
from tests.pool import RankPool, pool_of
from tests.training import FEW, TINY, tiny, train

SHAPE = (2, 3, 5)
ONE_RANK = meshes.single_rank_mesh().tp


def inputs(count: int, device: str = "cpu") -> list[Tensor]:
    """Return distinct inputs of blocks."""
    return [torch.arange(30.0, device=device).view(SHAPE) + 100 * i for i in range(count)]


def layout(pa_cpu: bool = False, md: bool = False, tp: int = 1) -> Layout:
    return Layout(recompute=True, tp=tp, pa=tp > 1, pa_cpu=pa_cpu, md=md)


def options(test: Any) -> Any:
    """Run a test with all four combinations of the options."""
    for option in ("pa_cpu", "md"):
        test = pytest.mark.parametrize(option, [False, True])(test)
    return test


def save_and_load(settings: Layout, chain: bool, orders: Iterable[Sequence[int]]) -> None:
    """Save two micro-batches of two blocks and load them in each of `orders`, on one rank or a tp group."""
    mesh = meshes.distributed_mesh(settings, "cpu") if settings.tp > 1 else meshes.single_rank_mesh()
    checkpoints = ActivationCheckpoints(settings, mesh.tp, capacity=4)
    for order in orders:
        expected = inputs(4)
        saved: list[ActivationCheckpoint] = []
        for i, x in enumerate(expected):
            saved.append(checkpoints.save(x.clone(), saved[-1] if chain and i % 2 else None))
        for i in order:
            torch.testing.assert_close(checkpoints.load(saved[i]), expected[i], rtol=0, atol=0)
            checkpoints.free(saved[i])
        assert checkpoints.arena is None or checkpoints.arena.used == 0


@options
def test_checkpoints_load_in_any_order(four: RankPool, pa_cpu: bool, md: bool) -> None:
    """On four ranks, shards of 8 elements hold 30 elements and 2 elements of padding."""
    for chain in (False, True):
        save_and_load(layout(pa_cpu, md), chain, permutations(range(4)))
    four.run(save_and_load, layout(pa_cpu, md, tp=4), True, [(3, 2, 1, 0), (1, 0, 3, 2)])


def test_arena_is_one_allocation_for_the_planned_checkpoints() -> None:
    with MemoryTracker() as tracker:
        checkpoints = ActivationCheckpoints(layout(md=True), ONE_RANK, capacity=3)
        for _ in range(2):
            saved = [checkpoints.save(x) for x in inputs(3)]
            assert tracker.live()[Category.CHECKPOINTS] == 3 * 32 * 4, "30 elements in pieces of 32"
            assert checkpoints.arena is not None
            assert len({checkpoints.load(s).data_ptr() for s in saved}) == 3
            with pytest.raises(RuntimeError, match="no free piece of 30 elements: 3 of 3 pieces are in use"):
                checkpoints.save(inputs(1)[0])
            for s in saved * 2:
                checkpoints.free(s)
            assert checkpoints.arena.used == 0
    assert tracker.most[Category.CHECKPOINTS] == 3 * 32 * 4
    with pytest.raises(RuntimeError, match="no free piece of 60 elements"):
        checkpoints.save(torch.zeros(4, 3, 5))


def test_arena_takes_the_smallest_piece_that_fits() -> None:
    arena = Arena(storage.mark(torch.zeros(12), Category.GRADIENTS), [6, 2, 4])
    small, middle, large = arena.take(1), arena.take(3), arena.take(1)
    assert [p.tensor.storage_offset() for p in (small, middle, large)] == [6, 8, 0], "the smallest that fit"
    assert (arena.used, arena.fits(1)) == (3, False)
    arena.give(middle)
    assert arena.fits(4)
    assert not arena.fits(5)
    with pytest.raises(AssertionError, match="twice"):
        arena.give(middle)
    arena.grow(20)
    other = arena.take(20).tensor
    assert storage.category_of(other.untyped_storage()) == Category.GRADIENTS
    assert (arena.capacity, arena.memory.numel()) == (4, 12)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_offloaded_checkpoints_count_as_host_memory(device: str) -> None:
    """At most two checkpoints are on the device: one in use and one prefetched."""
    size = 30 * 4
    with MemoryTracker() as tracker:
        checkpoints = ActivationCheckpoints(layout(pa_cpu=True), ONE_RANK, capacity=4)
        before, saved = None, []
        for x in inputs(4, device):
            before = checkpoints.save(x, before)
            saved.append(before)
        del x
        assert tracker.live()[Category.HOST] == 4 * size
        assert tracker.live()["total"] == 0
        for i in (3, 2, 1, 0):
            loaded = checkpoints.load(saved[i])
            assert loaded.device.type == device
            assert tracker.live()[Category.HOST] == max(0, i - 1) * size, "the next checkpoint is prefetched"
            assert tracker.live()[Category.CHECKPOINTS] == min(2, i + 1) * size
            del loaded
        assert tracker.live()["total"] == 0
    assert tracker.most[Category.HOST] == 4 * size


def test_recomputed_block_refuses_a_second_backward_pass() -> None:
    x = torch.ones(SHAPE, requires_grad=True)
    y = recompute(lambda x: x * x, x, ActivationCheckpoints(layout(), ONE_RANK, 1)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran twice"):
        y.backward()


@options
def test_recomputed_blocks_retain_only_their_checkpoints(pa_cpu: bool, md: bool) -> None:
    """Covers two micro-batches in flight, a graph without a backward pass, and a forward pass without gradients."""
    checkpoints = ActivationCheckpoints(layout(pa_cpu, md), ONE_RANK, capacity=6)
    blocks = [lambda x, factor=factor: (x * factor).sin() for factor in (2.0, 3.0, 5.0)]

    def forward(x: Tensor, recomputes: bool = True) -> Tensor:
        for block in blocks:
            x = recompute(block, x, checkpoints) if recomputes else block(x)
        return x.sum()

    xs = [torch.randn(SHAPE, requires_grad=True) for _ in range(2)]
    with MemoryTracker() as tracker:
        losses = [forward(x * 1) for x in xs]
        live = tracker.live()
        for loss in losses:
            loss.backward()
        losses.clear()
        del loss
        after = tracker.live()
    size = 32 * 4 if md else 30 * 4
    assert live[Category.HOST if pa_cpu else Category.CHECKPOINTS] == 6 * size
    assert live["total"] <= (0 if pa_cpu else 6 * size) + 32, "losses and the anchors of autograd"
    gradients = 2 * 30 * 4
    assert after["total"] == gradients + (6 * size if md and not pa_cpu else 0)
    for x in xs:
        expected = torch.autograd.grad(forward(x, recomputes=False), x)[0]
        torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)

    forward(xs[0])  # its backward never runs
    gc.collect()
    with torch.no_grad():
        forward(xs[0])
    assert checkpoints.arena is None or checkpoints.arena.used == 0


def test_copies_are_ordered_between_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host never waits, and the next checkpoint is prefetched before the block runs again."""
    calls = Mock()
    side, main = calls.side, calls.main
    side.record_event.side_effect = ["end of copy 0", "end of copy 1"]
    monkeypatch.setattr(ActivationCheckpoints, "_copy_stream", lambda self, x: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: calls.record_stream(stream))
    checkpoints = ActivationCheckpoints(layout(pa_cpu=True, md=True), ONE_RANK, capacity=2)
    xs = inputs(2)
    first = checkpoints.save(xs[0])
    second = checkpoints.save(xs[1], first)
    assert calls.mock_calls == [call.side.wait_stream(main), call.record_stream(side)] * 2
    calls.reset_mock()
    torch.testing.assert_close(checkpoints.load(second), xs[1])
    copy = [call.side.wait_stream(main), call.side.record_event(), call.record_stream(side)]
    assert calls.mock_calls == [*copy, *copy, call.main.wait_event("end of copy 0")]
    calls.reset_mock()
    torch.testing.assert_close(checkpoints.load(first), xs[0])
    assert calls.mock_calls == [call.main.wait_event("end of copy 1")], "this checkpoint was prefetched"


SOFTMAX = Layout(micro_batch=2, global_batch=8, kernels="softmax")


def test_words_of_recompute_equal_boolean_values() -> None:
    """Records store `none` and `block` as false and true."""
    for word, value in (("none", False), ("block", True), ("selective", "selective")):
        assert Layout(recompute=word) == Layout(recompute=value)
        assert asdict(build_dataclass(Layout, {"recompute": word}))["recompute"] == value
        assert Layout(recompute=word).has_checkpoints == (word == "block")
    for invalid in ("full", "yes", 1, 0, 0.5):
        with pytest.raises(ConfigError, match="recompute = "):
            build_dataclass(Layout, {"recompute": invalid})


def test_labels_and_options_show_selective_recomputation() -> None:
    layout = replace(SOFTMAX, recompute="selective")
    assert "selective recomputation" in describe_layout(layout)
    assert "--recompute-selective" in layout_options(layout, "fp32").split()
    assert "--recompute" in layout_options(replace(layout, recompute=True), "fp32").split()


SMALL = replace(TINY, layers=2)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        # `fused` also writes the scores, because training drops attention weights.
        (replace(SOFTMAX, kernels="fused", precision="bf16"), SMALL),
        (replace(SOFTMAX, kernels="unfused"), SMALL),
        (SOFTMAX, replace(SMALL, name="alibi", positions="alibi")),
        (SOFTMAX, replace(SMALL, name="grouped", positions="rotary", kv_heads=2)),
        (replace(SOFTMAX, tp=2), SMALL),
        (replace(SOFTMAX, pp=2, schedule="interleaved", chunks=2), TINY),
        (replace(SOFTMAX, dp=2, zero=2, kernels="unfused", precision="bf16"), SMALL),
        (replace(SOFTMAX, dp=2, zero=3, precision="fp16"), SMALL),
        (replace(SOFTMAX, tp=2, sp=True, pp=2, micro_batch=1), SMALL),
    ],
    ids=name_of,
)
def test_results_are_bitwise_equal(request: pytest.FixtureRequest, layout: Layout, model: Model) -> None:
    """Losses, gradient norms and parameters with dropout equal those without recomputation on all ranks."""
    selective, expected = (
        [train(experiment)] if layout.world == 1 else pool_of(request, layout).run(train, experiment)
        for recompute in ("selective", "none")
        for experiment in [tiny(replace(layout, recompute=recompute), model, **FEW, **DROPOUT)]
    )
    for found, other in zip(selective, expected, strict=True):
        assert (found.loss, found.norm) == (other.loss, other.norm)
        torch.testing.assert_close(found.parameters, other.parameters, rtol=0, atol=0)


DEEP = replace(LONG, layers=3)


def test_backward_repeats_only_the_operators_of_attention() -> None:
    """The hardware's FLOP count the repeated products."""
    names: dict[str, Counter[str]] = {}
    batched_flops: dict[str, int] = {}
    for word in ("selective", "none"):
        layout = Layout(micro_batch=2, kernels="softmax", recompute=word, precision="bf16")
        experiment = tiny(layout, DEEP, **DROPOUT)
        names[word], batched_flops[word] = Counter(), 0
        for times, operator in trace(experiment, roles(experiment)[0]).operators():
            names[word][operator.name] += times
            batched_flops[word] += times * operator.flops if operator.name == "aten.bmm" else 0
    repeated = names["selective"] - names["none"]
    assert repeated.pop("aten.bmm") == 2 * DEEP.layers
    assert repeated.pop("repro.causal_softmax") == DEEP.layers
    assert repeated.pop("repro.bias_dropout_residual") == DEEP.layers
    assert set(repeated) <= {"aten.clone", "aten.detach"}, "batched products copy the samples"
    assert not names["none"] - names["selective"]
    counted = hardware_flops(DEEP, DEEP.seq, 2, "selective") - model_flops(DEEP, DEEP.seq, 2)
    assert batched_flops["selective"] - batched_flops["none"] == counted > 0
