"""Tests of one rank's flat buffers and of the order of reductions, with numbers computed by hand."""

from __future__ import annotations

import gc
import weakref
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
from repro.parallel.zero.partition import plan_bucket
from tests.pool import RankPool

CPU = torch.device("cpu")
SIZES = (5, 10)
"""Sizes of two parameters. Three shards of 8 elements hold 5 + 3 elements, 7 elements, and padding."""


class EqualRanks(NoTransport):
    """Transport of ranks with equal values; records the starts of collectives and the waits for them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.started: list[int] = []
        """Elements of each collective."""
        self.waited: list[int] = []

    def start(self, elements: int) -> Work:
        number = len(self.started)
        self.started.append(elements)
        return Work(finish=lambda: self.waited.append(number))

    def all_reduce(self, tensor: Tensor, op: str) -> Work:
        tensor.mul_(self.ranks)
        return self.start(tensor.numel())

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        output.copy_(input[: output.numel()])
        return self.all_reduce(output, "")

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        super().all_gather(output, input)
        return self.start(output.numel())


def make_group(rank: int = 0, size: int = 3) -> tuple[Group, EqualRanks]:
    transport = EqualRanks(size)
    return Group("dp", tuple(range(size)), rank, transport, CommLedger()), transport


def value(index: int, start: int, stop: int) -> Tensor:
    """Return elements of a parameter: 0, 1, 2, ... of parameter 0 and 100, 101, ... of parameter 1."""
    return torch.arange(start, stop, dtype=torch.float32) + 100 * index


def sharding(group: Group, stage: int, **settings: Any) -> Sharding:
    keys = {"bucket_bytes": 0, "all_reduce_first": False, "dtype": None, **settings}
    return Sharding(stage=stage, group=group, device=CPU, **keys)


def make_bucket(
    group: Group,
    stage: int,
    sizes: tuple[int, ...] = SIZES,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Bucket:
    parameters = [Parameter(torch.empty(size)) for size in sizes]
    plan = plan_bucket([(i, n, Tag(0)) for i, n in enumerate(sizes)], group.size)
    bucket = Bucket(plan, parameters, sharding(group, stage, **settings), dtype)
    with torch.no_grad():
        bucket.fill(value, bucket.master)
    return bucket


FULL = [*map(float, range(5)), *map(float, range(100, 110)), *[0.0] * 9]
SHARDS = [FULL[8 * rank : 8 * rank + 8] for rank in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", range(4))
def test_initial_shards_have_the_values_of_their_parameters(
    stage: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat_parameters, "INITIALISED_ELEMENTS", 3)
    for rank, shard in enumerate(SHARDS):
        bucket = make_bucket(make_group(rank)[0], stage, dtype=dtype)
        expected = shard if stage else FULL
        assert bucket.master.dtype == torch.float32
        assert bucket.shard.tolist() == bucket.master.tolist() == expected
        assert (bucket.master is bucket.shard) == (dtype == torch.float32)
        if stage == 3:
            assert storage.is_released(bucket.full)
            bucket.gather().wait()
            assert bucket.full[:8].tolist() == expected, "this transport gathers the rank's own shard"
        else:
            assert bucket.full.tolist() == FULL
            assert [p.tolist() for p in bucket.parameters] == [FULL[:5], FULL[5:15]]


def test_master_weights_adopt_only_the_written_values() -> None:
    bucket = make_bucket(make_group(size=1)[0], 1, (4,), dtype=torch.bfloat16)
    bucket.master.fill_(1.001)  # 1.0 in bf16
    bucket.shard.copy_(torch.tensor([1.0, 3.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]))
    bucket.adopt_writes()
    assert bucket.master[:4].tolist() == pytest.approx([1.001, 3.0, 1.001, 1.001])


def backward(reducer: GradientReducer, *order: tuple[int, int]) -> None:
    """Run backward passes that give parameter `s` of bucket `b` gradients of ones, in this order."""
    for b, s in order:
        (reducer.buckets[b].parameters[s] * 1.0).sum().backward()


def run_pass(reducer: GradientReducer, *order: tuple[int, int]) -> None:
    """Run the backward passes of a step's only micro-batch, and wait for its reductions."""
    reducer.begin(0, 1)
    backward(reducer, *order)
    reducer.finish()
    reducer.wait()


def make_reducer(stage: int, count: int, **settings: Any) -> tuple[GradientReducer, EqualRanks]:
    group, transport = make_group(size=2)
    buckets = [make_bucket(group, stage, (8 * (b + 1),), **settings) for b in range(count)]
    return GradientReducer(buckets, sharding(group, stage, **settings)), transport


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
def test_reductions_that_allocate_memory_run_two_at_a_time(
    stage: int, in_place: bool, settings: dict[str, Any], waited: list[int]
) -> None:
    reducer, transport = make_reducer(stage, 3, **settings)
    transport.reduces_in_place = in_place
    parts = 1 if stage == 0 or "all_reduce_first" in settings else 2
    sizes = [bucket.plan.padded // parts for bucket in reducer.buckets]
    reducer.begin(0, 1)
    backward(reducer, (1, 0))
    assert transport.started == []
    backward(reducer, (0, 0))
    assert transport.started == sizes[:2]
    backward(reducer, (2, 0))
    assert transport.started == sizes
    assert transport.waited == waited
    reducer.finish()
    reducer.wait()
    assert transport.waited == [0, 1, 2]
    assert all(bucket.gradient_shard.eq(1.0).sum() >= 4 for bucket in reducer.buckets), "the mean of ones"


def test_missing_gradients_count_as_zero() -> None:
    group, _ = make_group(size=2)
    for stage in range(3):
        reducer = GradientReducer([make_bucket(group, stage, (8, 8))], sharding(group, stage))
        (bucket,) = reducer.buckets
        bucket.gradient_view(1).fill_(7.0)  # from the previous step
        run_pass(reducer, (0, 0))
        assert reducer.missing() == {1}
        assert bucket.gradient_shard.tolist() == ([1.0] * 8 + [0.0] * 8)[: bucket.gradient_shard.numel()]


def test_held_bucket_adds_repeated_gradients_before_its_reduction() -> None:
    for stage in range(3):
        reducer, transport = make_reducer(stage, 1)
        reducer.begin(0, 1)
        reducer.hold(reducer.buckets[0])
        backward(reducer, (0, 0), (0, 0))
        assert not transport.started
        reducer.finish()
        reducer.wait()
        assert reducer.buckets[0].gradient_shard[:4].tolist() == [2.0] * 4
        reducer.begin(0, 1)
        backward(reducer, (0, 0))
        assert len(transport.started) == 2, "a hold ends with the pass"
        with pytest.raises(RuntimeError, match="after the reduction of its bucket"):
            backward(reducer, (0, 0))


def test_gradient_pool_grows_once_for_gradients_in_reverse_order() -> None:
    """The pool has pieces for two reductions, a bucket that is being filled, and a bucket that is open for long.

    The reverse order opens all buckets before the first is complete.
    """
    reducer, _ = make_reducer(2, 6, contiguous=True)
    pool = reducer.buckets[0].pool
    assert pool is not None
    in_order = [(b, 0) for b in range(6)]
    for order, capacity in ((in_order, 4), (in_order[::-1], 6), (in_order[::-1], 6)):
        run_pass(reducer, *order)
        assert (pool.capacity, pool.used) == (capacity, 0)
        assert all(bucket.gradient_shard[:4].eq(1.0).all() for bucket in reducer.buckets)
    assert make_reducer(1, 2, contiguous=True)[0].buckets[0].pool is None


def sum_after_a_reducer_is_freed() -> float:
    """Free a reducer of rank 1 during a reduction, as after a failed backward pass; return a later sum of ones."""
    group = meshes.distributed_mesh(Layout(dp=2), "cpu").dp

    def start() -> GradientReducer:
        bucket = make_bucket(group, 1, (8,))
        reducer = GradientReducer([bucket], sharding(group, 1))
        reducer.begin(0, 1)
        bucket.parameters[0].sum().backward()
        return reducer

    if group.rank == 1:
        start()
        gc.collect()
    dist.barrier()
    if group.rank == 0:
        reducer = start()
        reducer.finish()
        reducer.wait()
    ones = torch.ones(1)
    group.all_reduce(ones, SUM, "test").wait()
    return float(ones)


def test_reducer_freed_during_a_reduction_breaks_no_connection(two: RankPool) -> None:
    assert two.run(sum_after_a_reducer_is_freed, timeout_s=60) == [2.0, 2.0]


def test_a_reducer_exists_as_long_as_a_parameter() -> None:
    """Autograd's hooks do not count as references, so gradients would otherwise not be reduced."""
    reducer, _ = make_reducer(1, 1)
    parameter, reference = reducer.buckets[0].parameters[0], weakref.ref(reducer)
    del reducer
    gc.collect()
    assert reference() is vars(parameter)["reducer"]
    del parameter
    gc.collect()
    assert reference() is None
