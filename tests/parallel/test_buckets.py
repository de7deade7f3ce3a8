"""One rank's flat buffers and when it reduces them, by numbers and orders worked out by hand."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.parallel import storage
from repro.parallel.comm import SUM, Group
from repro.parallel.ledger import CommLedger
from repro.parallel.transports import NoTransport, Work
from repro.parallel.zero import flat_parameters
from repro.parallel.zero.flat_buffer import Bucket
from repro.parallel.zero.flat_parameters import Sharding, Tag
from repro.parallel.zero.grad_reduce import GradientReducer
from repro.parallel.zero.optimizer import GradientShards
from repro.parallel.zero.partition import plan_bucket
from tests.pool import RankPool

CPU = torch.device("cpu")
SIZES = (5, 10)
"""Of three ranks' shards of 8 the first holds 5 + 3 elements, the second 7, the third padding."""


class Alike(NoTransport):
    """All ranks hold the same: a sum is a multiple.  Notes when a collective begins, and when it is waited for."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.begun: list[int] = []
        """Elements of each message."""
        self.waited: list[int] = []

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        number = len(self.begun)
        self.begun.append(tensor.numel())
        tensor.mul_(self.ranks)
        return Work(finish=lambda: self.waited.append(number))

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        output.copy_(input[: output.numel()])
        return self.all_reduce(output, "")


def group(rank: int = 0, size: int = 3) -> tuple[Group, Alike]:
    transport = Alike(size)
    return Group("dp", tuple(range(size)), rank, transport, CommLedger()), transport


def value(index: int, start: int, stop: int) -> Tensor:
    """Parameter 0 is 0, 1, 2, ...; parameter 1 is 100, 101, ..."""
    return torch.arange(start, stop, dtype=torch.float32) + 100 * index


def sharding(of: Group, stage: int, **settings: Any) -> Sharding:
    given = {"bucket_bytes": 0, "all_reduce_first": False, "dtype": None, **settings}
    return Sharding(stage=stage, group=of, device=CPU, **given)


def bucket(
    of: Group,
    stage: int,
    sizes: tuple[int, ...] = SIZES,
    tags: tuple[Tag, ...] = (),
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Bucket:
    parameters = [Parameter(torch.empty(size)) for size in sizes]
    plan = plan_bucket([(i, n, tags[i] if tags else Tag(0)) for i, n in enumerate(sizes)], of.size)
    made = Bucket(plan, parameters, sharding(of, stage, **settings), dtype)
    with torch.no_grad():
        made.fill(value, made.master)
    return made


WHOLE = [*map(float, range(5)), *map(float, range(100, 110)), *[0.0] * 9]
SHARDS = [WHOLE[8 * rank : 8 * rank + 8] for rank in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("rank", range(3))
def test_every_rank_begins_with_its_part_of_the_values(
    rank: int, stage: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_parameters, "INITIALISED_ELEMENTS", 3)
    narrow = dtype == torch.bfloat16
    made = bucket(group(rank)[0], stage, dtype=dtype)
    expected = SHARDS[rank] if stage else WHOLE
    assert made.shard.tolist() == expected
    assert made.master.dtype == torch.float32
    assert made.master.tolist() == expected
    assert (made.master is made.shard) != narrow
    if stage == 3:
        assert storage.is_released(made.full)
        made.gather().wait()
        assert made.full[:8].tolist() == expected, "of this transport, which gathers what it is given"
    else:
        assert made.full.tolist() == WHOLE
        assert [p.tolist() for p in made.parameters] == [WHOLE[:5], WHOLE[5:15]]


def test_parameters_are_gathered_from_several_ranks_that_hold_shards() -> None:
    for stage in range(4):
        three, _ = group()
        bucket(three, stage).gather().wait()
        sent = [(row["op"], row["purpose"], row["payload_bytes"]) for row in three.ledger.rows()]
        assert sent == ([("all_gather", "parameters", 4 * 24)] if stage else [])


@pytest.mark.parametrize("stage", [0, 3])
def test_one_rank_gathers_without_a_message(stage: int) -> None:
    alone, transport = group(size=1)
    made = bucket(alone, stage)
    made.gather().wait()
    assert made.full.tolist() == WHOLE[:16]
    assert not alone.ledger.rows()
    assert not transport.begun


@pytest.mark.parametrize(
    ("stage", "all_reduced", "left"),
    [
        (0, False, [i / 3 for i in range(24)]),
        (1, False, [float(i) if 8 <= i < 16 else 0.0 for i in range(24)]),
        (1, True, [i / 3 for i in range(24)]),
    ],
)
def test_a_reduction_is_undone_so_that_a_later_one_counts_every_rank_once(
    stage: int, all_reduced: bool, left: list[float]
) -> None:
    """Of a mean that all have each keeps a third; of a part that one has the others keep nothing."""
    made = bucket(group(rank=1)[0], stage, all_reduce_first=all_reduced)
    assert made.gradients is not None
    made.gradients.copy_(torch.arange(24.0))
    assert made.gradient_shard.tolist() == (list(range(8, 16)) if stage else list(range(24)))
    made.unreduce()
    assert made.gradients.tolist() == pytest.approx(left)


@pytest.mark.parametrize("size", [1, 3])
def test_a_copy_of_gradients_is_reduced_where_software_works_in_passes(size: int) -> None:
    """They get the sum once it has been waited for, and nothing keeps the copy; a rank alone makes one too."""
    of, transport = group(size=size)
    made = bucket(of, 0, in_passes=True)
    assert made.gradients is not None
    made.gradients.fill_(1.0)
    work = made.reduce(add=False)
    assert len(transport.begun) == (size > 1)
    assert made.gradients.eq(1.0).all(), "not before"
    made.gradients.fill_(7.0)
    work.wait()
    assert made.gradients.eq(float(size)).all()
    assert made.copy is None


@pytest.mark.parametrize("fused", [False, True])
def test_stage_2_adds_micro_batches_in_its_shard_and_frees_what_it_has_reduced(fused: bool) -> None:
    made = bucket(group()[0], 2, constant_buffers=not fused)
    for micro_batch in range(3):
        assert made.gradients is None
        made.gradient_view(0).fill_(1.0)
        made.gradient_view(1).fill_(2.0)
        assert made.gradients is not None
        assert made.gradients.tolist() == [*[1.0] * 5, *[2.0] * 10, *[0.0] * 9]
        made.reduce(add=micro_batch > 0).wait()
        times = 3.0 * (micro_batch + 1)
        assert made.gradient_shard.tolist() == [*[times] * 5, *[2 * times] * 3]


def test_only_what_is_tied_or_partial_is_summed_over_other_groups() -> None:
    ends, transport = group(size=2)
    tags = (Tag(0), Tag(0, tied=True), Tag(0, partial=True), Tag(0, tied=True))
    made = bucket(group(size=1)[0], 0, (2, 3, 4, 5), tags)
    made.gradient_shard.fill_(1.0)
    made.sum_tied_gradients(group(size=1)[0])
    assert made.gradient_shard.eq(1.0).all()
    made.sum_tied_gradients(ends)
    assert transport.begun == [8]
    assert made.gradient_shard.tolist() == [*[1.0] * 2, *[2.0] * 3, *[1.0] * 4, *[2.0] * 5, *[1.0] * 2]
    made.sum_partial_gradients(ends)
    assert transport.begun == [8, 4]
    assert made.gradient_shard[5:9].tolist() == [2.0] * 4
    assert [(r["purpose"], r["payload_bytes"]) for r in ends.ledger.rows()] == [
        ("sequence-parallel gradients", 16),
        ("tied gradients", 32),
    ]


def test_masters_follow_what_was_written_and_keep_their_digits_elsewhere() -> None:
    made = bucket(group(size=1)[0], 1, (4,), dtype=torch.bfloat16)
    made.master.fill_(1.001)  # 1.0 in bf16
    made.shard.copy_(torch.tensor([1.0, 3.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    made.adopt_writes()
    assert made.master[:4].tolist() == pytest.approx([1.001, 3.0, 1.001, 1.001])


def test_the_norm_counts_duplicates_and_tied_parameters_once_and_replicas_once() -> None:
    from repro.config import Layout
    from repro.parallel import mesh as meshes

    tags = (Tag(0), Tag(0, duplicate=True), Tag(0, tied=True))

    def squares(layout: Layout, rank: int, stage: int) -> float:
        mesh = meshes.shape_only_mesh(layout, rank)
        made = bucket(mesh.dp, stage, (2, 3, 4), tags)
        made.gradient_shard.fill_(1.0)
        norms = GradientShards([made], mesh).agree(torch.tensor(6.0), torch.tensor(0.5))
        assert float(norms.loss) == 6.0 / (layout.world // layout.pp)
        assert float(norms.overflow) == 0.0
        return (float(norms.gradient) * 0.5) ** 2

    by_rank = [squares(Layout(tp=2, pp=2, micro_batch=1, global_batch=2), rank, 0) for rank in range(4)]
    assert by_rank == pytest.approx([9, 6, 5, 2])
    assert [squares(Layout(dp=2), rank, 0) for rank in range(2)] == pytest.approx([9, 0])
    assert [squares(Layout(dp=2), rank, 1) for rank in range(2)] == pytest.approx([8, 1])


# -- when ------------------------------------------------------------------------------------------


def backward(reducer: GradientReducer, *order: tuple[int, int]) -> None:
    """Gradients of ones for parameter `s` of bucket `b`, in this order."""
    for b, s in order:
        (reducer.buckets[b].parameters[s] * 1.0).sum().backward()


def reducer(stage: int, buckets: int = 4, size: int = 2, **settings: bool) -> tuple[GradientReducer, Alike]:
    of, transport = group(size=size)
    made = [bucket(of, stage, (8 * (b + 1),)) for b in range(buckets)]
    return GradientReducer(made, sharding(of, stage, **settings)), transport


@pytest.mark.parametrize(
    ("stage", "in_place", "settings", "waited"),
    [
        (0, False, {}, []),
        (1, True, {}, []),
        (1, False, {"all_reduce_first": True}, []),
        (1, False, {}, [0]),
        (1, True, {"constant_buffers": False, "dtype": torch.bfloat16}, [0]),
        (2, True, {}, [0]),
    ],
)
def test_buckets_are_reduced_in_order_and_two_at_once_if_a_reduction_needs_memory(
    stage: int, in_place: bool, settings: dict[str, Any], waited: list[int]
) -> None:
    of, transport = group(size=2)
    transport.reduces_in_place = in_place
    made = GradientReducer(
        [bucket(of, stage, (8 * (b + 1),), **settings) for b in range(3)], sharding(of, stage)
    )
    parts = 1 if stage == 0 or "all_reduce_first" in settings else 2
    sizes = [bucket.plan.padded // parts for bucket in made.buckets]
    made.begin(0, 1)
    backward(made, (1, 0))
    assert transport.begun == []
    backward(made, (0, 0))
    assert transport.begun == sizes[:2]
    backward(made, (2, 0))
    assert transport.begun == sizes
    assert transport.waited == waited
    made.finish()
    made.wait()
    assert transport.waited == [0, 1, 2]
    assert all(bucket.gradient_shard.eq(1.0).sum() >= 4 for bucket in made.buckets), "the mean of ones"


@pytest.mark.parametrize(("stage", "begun"), [(0, 0), (1, 0), (2, 1)])
def test_without_overlap_nothing_is_under_way_while_gradients_come(stage: int, begun: int) -> None:
    """Stages 0 and 1 begin in the end; stage 2 reduces a bucket at once, and waits for it."""
    made, transport = reducer(stage, 2, overlap=False)
    made.begin(0, 1)
    backward(made, (0, 0))
    assert (len(transport.begun), len(transport.waited)) == (begun, begun)
    backward(made, (1, 0))
    made.finish()
    assert len(transport.begun) == 2 * begun
    made.wait()
    assert transport.waited == [0, 1]


def test_stages_0_and_1_add_up_micro_batches_and_reduce_the_last() -> None:
    for stage, messages in ((0, [0, 0, 1]), (1, [0, 0, 1]), (2, [1, 2, 3])):
        made, transport = reducer(stage, 1)
        for micro_batch, expected in enumerate(messages):
            made.begin(micro_batch, 3)
            assert made.only_adds == (stage < 2 and micro_batch == 1)
            backward(made, (0, 0))
            made.finish()
            made.wait()
            assert len(transport.begun) == expected
        assert made.buckets[0].gradient_shard[:4].tolist() == [3.0] * 4


def test_one_more_micro_batch_than_was_said_is_reduced_with_the_others() -> None:
    for stage in (0, 2):  # under stage 1 not all ranks hold the same then
        made, _ = reducer(stage, 1)
        for micro_batch in range(3):
            made.begin(micro_batch, 2)
            backward(made, (0, 0))
            made.finish()
            made.wait()
        assert made.buckets[0].gradient_shard[:4].tolist() == [3.0] * 4


def test_a_step_that_ends_early_reduces_what_there_is() -> None:
    made, transport = reducer(1, 2)
    made.begin(0, 3)
    backward(made, (0, 0), (1, 0))
    made.finish()
    made.wait()
    assert not transport.begun
    made.reduce_early()
    assert (len(transport.begun), transport.waited) == (2, [0, 1])
    made.reduce_early()
    assert len(transport.begun) == 2


def test_parameters_without_a_gradient_have_a_zero_one() -> None:
    of, _ = group(size=2)
    for stage in range(3):
        made = GradientReducer([bucket(of, stage, (8, 8))], sharding(of, stage))
        made.buckets[0].gradient_view(1).fill_(7.0)  # of the step before
        made.begin(0, 1)
        backward(made, (0, 0))
        made.finish()
        assert made.missing() == {1}
        made.wait()
        (first,) = made.buckets
        assert first.gradient_shard.tolist() == ([1.0] * 8 + [0.0] * 8)[: first.gradient_shard.numel()]


def test_a_bucket_that_is_held_waits_for_the_end_and_adds_what_comes_again() -> None:
    for stage in range(3):
        made, transport = reducer(stage, 1)
        made.begin(0, 1)
        made.hold(made.buckets[0])
        backward(made, (0, 0), (0, 0))
        assert not transport.begun
        made.finish()
        made.wait()
        assert made.buckets[0].gradient_shard[:4].tolist() == [2.0] * 4
        made.begin(0, 1)
        backward(made, (0, 0))
        assert len(transport.begun) == 2, "held for one pass"
        with pytest.raises(RuntimeError, match="after the reduction of its bucket"):
            backward(made, (0, 0))


def test_memory_set_aside_is_for_the_largest_buckets_and_grows_where_it_must() -> None:
    """Two under reduction, one that fills and one that is open for long: of 8, 16, ..., 48 elements the last four."""
    for stage in (2, 3):
        made, _ = reducer(stage, 6, contiguous=True)
        pool = made.buckets[0].pool
        assert pool is not None
        assert all(bucket.pool is pool for bucket in made.buckets)
        assert pool.memory.numel() == 48 + 48 + 32 + 32
        assert (pool.capacity, pool.used) == (4, 0)
    made, _ = reducer(2, 6, contiguous=True)
    pool = made.buckets[0].pool
    assert pool is not None
    made.begin(0, 1)
    backward(made, *((b, 0) for b in range(6)))
    made.finish()
    made.wait()
    assert (pool.capacity, pool.used) == (4, 0), "in order, there is room"
    made.begin(0, 1)
    backward(made, *((b, 0) for b in reversed(range(6))))
    assert pool.capacity > 4
    made.finish()
    made.wait()
    assert pool.used == 0
    assert reducer(1, 2, contiguous=True)[0].buckets[0].pool is None


def free_before_the_other_rank_sends() -> float:
    """Free a reducer of rank 1 during a reduction, as after a failed backward pass; return a later sum of ones."""
    of = meshes.distributed_mesh(Layout(dp=2), "cpu").dp

    def start() -> GradientReducer:
        made = bucket(of, 1, (8,))
        reducing = GradientReducer([made], sharding(of, 1))
        reducing.begin(0, 1)
        made.parameters[0].sum().backward()
        return reducing

    if of.rank == 1:
        start()
        gc.collect()
    dist.barrier()
    if of.rank == 0:
        reducing = start()
        reducing.finish()
        reducing.wait()
    ones = torch.ones(1)
    of.all_reduce(ones, SUM, "test").wait()
    return float(ones)


def test_a_reducer_that_is_freed_during_a_reduction_stops_no_connection(two: RankPool) -> None:
    assert two.run(free_before_the_other_rank_sends, timeout_s=60) == [2.0, 2.0]
