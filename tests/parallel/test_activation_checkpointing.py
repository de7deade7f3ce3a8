"""Checkpoints by themselves: parts, host memory, arenas, and any order of use."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import permutations

import pytest
import torch
from torch import Tensor

from repro.config import ConfigError, Layout
from repro.config.enums import Category
from repro.measure.memory import MemoryTracker
from repro.parallel import mesh as meshes
from repro.parallel import storage
from repro.parallel.zero_r.activation_checkpointing import (
    ActivationCheckpoint,
    ActivationCheckpoints,
    recompute,
)
from repro.parallel.zero_r.defragmentation import Arena
from tests.pool import RankPool

SHAPE = (2, 3, 5)
ALONE = meshes.single_rank_mesh().tp


def inputs(count: int, device: str = "cpu") -> list[Tensor]:
    """Inputs of blocks, all different."""
    return [torch.arange(30.0, device=device).view(SHAPE) + 100 * i for i in range(count)]


def layout(pa_cpu: bool, md: bool, tp: int = 1) -> Layout:
    return Layout(recompute=True, tp=tp, pa=tp > 1, pa_cpu=pa_cpu, md=md)


def save_and_load(settings: Layout, chain: bool, orders: Iterable[Sequence[int]]) -> None:
    """Two micro-batches of two blocks, loaded in these orders; runs on one rank or on a tp group."""
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
        if checkpoints.arena is not None:
            assert checkpoints.arena.used == 0


@pytest.mark.parametrize("md", [False, True], ids=["", "md"])
@pytest.mark.parametrize("pa_cpu", [False, True], ids=["", "cpu"])
def test_any_order_gives_back_what_was_saved(pa_cpu: bool, md: bool) -> None:
    for chain in (False, True):
        save_and_load(layout(pa_cpu, md), chain, permutations(range(4)))


def all_settings() -> None:
    for pa_cpu in (False, True):
        for md in (False, True):
            save_and_load(layout(pa_cpu, md, tp=4), True, [(3, 2, 1, 0), (1, 0, 3, 2)])


def test_parts_are_gathered_also_where_they_do_not_divide(four: RankPool) -> None:
    """30 elements over 4 ranks: parts of 8, the last with 2 of padding."""
    four.run(all_settings)


def test_arena_is_one_allocation_that_is_used_again() -> None:
    with MemoryTracker() as tracker:
        checkpoints = ActivationCheckpoints(layout(pa_cpu=False, md=True), ALONE, capacity=3)
        seen = set()
        for _ in range(3):
            saved = [checkpoints.save(x) for x in inputs(3)]
            seen.add(tracker.live()[Category.CHECKPOINTS])
            assert checkpoints.arena is not None
            assert checkpoints.arena.used == 3
            places = {checkpoints.load(s).data_ptr() for s in saved}
            assert len(places) == 3
            assert checkpoints.arena.used == 3, "what was loaded is still in use"
            for s in saved:
                checkpoints.free(s)
                checkpoints.free(s)
            assert checkpoints.arena.used == 0
    assert seen == {3 * 32 * 4}, "30 elements in pieces of 32"
    assert tracker.most[Category.CHECKPOINTS] == 3 * 32 * 4


def test_more_than_was_planned_is_an_error() -> None:
    checkpoints = ActivationCheckpoints(layout(pa_cpu=False, md=True), ALONE, capacity=1)
    kept = checkpoints.save(inputs(1)[0])
    with pytest.raises(RuntimeError, match="no free piece of 30 elements: 1 of 1 pieces are in use"):
        checkpoints.save(inputs(1)[0])
    checkpoints.load(kept)
    checkpoints.free(kept)
    with pytest.raises(RuntimeError, match="no free piece of 60 elements"):
        checkpoints.save(torch.zeros(4, 3, 5))


def test_arena_pieces() -> None:
    arena = Arena(storage.mark(torch.zeros(12), Category.GRADIENTS), [6, 2, 4])
    small, middle, large = arena.take(1), arena.take(3), arena.take(1)
    assert [p.tensor.storage_offset() for p in (small, middle, large)] == [6, 8, 0], "the smallest that fits"
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
def test_host_memory_is_not_the_device_s(device: str) -> None:
    """Offloaded checkpoints count as host memory; at most two are on the device, one used and one fetched."""
    size = 30 * 4
    with MemoryTracker() as tracker:
        checkpoints = ActivationCheckpoints(layout(pa_cpu=True, md=False), ALONE, capacity=4)
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
            assert tracker.live()[Category.HOST] == max(0, i - 1) * size, "the next one is fetched"
            assert tracker.live()[Category.CHECKPOINTS] == min(2, i + 1) * size
            del loaded
        assert tracker.live()["total"] == 0
    assert tracker.most[Category.HOST] == 4 * size


def test_second_backward_is_refused() -> None:
    x = torch.ones(SHAPE, requires_grad=True)
    y = recompute(lambda x: x * x, x, ActivationCheckpoints(layout(False, False), ALONE, 1)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


@pytest.mark.parametrize("md", [False, True], ids=["", "md"])
@pytest.mark.parametrize("pa_cpu", [False, True], ids=["", "cpu"])
def test_recompute_keeps_nothing_but_the_checkpoint(pa_cpu: bool, md: bool) -> None:
    """Two micro-batches in flight through three blocks; then a graph that is dropped, and one without gradients."""
    checkpoints = ActivationCheckpoints(layout(pa_cpu, md), ALONE, capacity=6)

    def forward(x: Tensor) -> Tensor:
        for factor in (2.0, 3.0, 5.0):
            x = recompute(lambda x, factor=factor: (x * factor).sin(), x, checkpoints)
        return x.sum()

    def plain(x: Tensor) -> Tensor:
        for factor in (2.0, 3.0, 5.0):
            x = (x * factor).sin()
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
    assert live["total"] <= (0 if pa_cpu else 6 * size) + 32, "the losses and autograd's anchors"
    gradients = 2 * 30 * 4
    assert after["total"] == gradients + (6 * size if md and not pa_cpu else 0)
    for x in xs:
        expected = torch.autograd.grad(plain(x), x)[0]
        torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)

    forward(xs[0])  # its backward never runs
    gc.collect()
    with torch.no_grad():
        forward(xs[0])
    if checkpoints.arena is not None:
        assert checkpoints.arena.used == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"pa": True, "tp": 2}, "pa = true: needs recompute = true"),
        ({"pa_cpu": True}, "pa_cpu = true: needs recompute = true"),
        ({"pa": True, "recompute": True}, "pa = true: needs tp > 1 and sp = false"),
        ({"pa": True, "recompute": True, "tp": 2, "sp": True}, "pa = true: needs tp > 1 and sp = false"),
        ({"pa_cpu": True, "recompute": True, "tp": 2}, "pa_cpu = true: needs pa = true"),
        ({"cb": False, "zero": 3, "dp": 2}, "cb = false: must be true with zero = 3"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_refusals(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Layout(**settings)
    assert str(refused.value).startswith(says)
    assert "\n" not in str(refused.value)


class Stream:
    """Stands in for a CUDA stream: notes what it is told, runs everything at once."""

    def __init__(self, name: str, notes: list[str]):
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.notes.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        event = f"copy {sum(note.startswith('event') for note in self.notes)}"
        self.notes.append(f"event {event}")
        return event


def test_copies_are_ordered_between_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA path with streams that stand in: nothing waits on the host, and the next one is fetched before the
    block runs again."""
    notes: list[str] = []
    side, main = Stream("side", notes), Stream("main", notes)
    monkeypatch.setattr(ActivationCheckpoints, "_copy_stream", lambda self, x: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: notes.append(f"kept for {stream.name}"))
    checkpoints = ActivationCheckpoints(layout(pa_cpu=True, md=True), ALONE, capacity=2)
    xs = inputs(2)
    first = checkpoints.save(xs[0])
    second = checkpoints.save(xs[1], first)
    assert notes == ["side waits for main", "kept for side"] * 2
    notes.clear()
    torch.testing.assert_close(checkpoints.load(second), xs[1])
    copied = ["side waits for main", "event copy {}", "kept for side"]
    own, ahead = ([note.format(i) for note in copied] for i in (0, 1))
    assert notes == [*own, *ahead, "main waits for copy 0"]
    notes.clear()
    torch.testing.assert_close(checkpoints.load(first), xs[0])
    assert notes == ["main waits for copy 1"], "it was fetched already"
