"""How far a step is from the limit: the same step without any communication, two gloo ranks, taking turns.

    make benchmarks

The limit is each process training a model of its own as plain torch does it: forward, backward, clipping by the global
norm, fused AdamW.  fp32, 6 layers of 256, 128 tokens x 4 a rank.  A row is the step; beside it stands its ratio to the
limit, of steps that follow each other, median and 95 % interval: `wall` in seconds, `cpu` in seconds of the process's
processors, those of gloo's threads included, which says more where a machine is shared.

`native, alone` is the suite's engine on one process.  The rows `messages` are the gradients and parameters of a step,
in the volumes of 1910.02054 sec. 7, each volume in one message, and nothing else: where every core computes, they are
the part of the distance that no code around them can save.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import repeat
from typing import Any

import pytest
import torch
import torch.distributed as dist

import repro
from repro.config import Experiment, Layout, Training
from repro.config.models import load_model
from repro.engines.native.engine import NativeEngine
from repro.engines.native.model_part import MicroBatch
from repro.engines.torch.model import Dropout, PlainGPT, initialise
from repro.measure.statistics import ratio_interval
from repro.model.counts import total_parameters
from repro.model.gpt import BatchPosition, Part
from repro.parallel import mesh as meshes
from tests.pool import RankPool

CLIP = 1.0
PAIRS = 20
STEPS: dict[str, Callable[[], Any]] = {}
"""Lives in the ranks: what takes one step, by name."""


def experiment(layout: Layout) -> Experiment:
    training = Training(steps=10_000, clip=CLIP, dropout=0.0, attention_dropout=0.0)
    return Experiment(name="limit", model=load_model("smoke-speed"), layout=layout, training=training)


def batch() -> MicroBatch:
    """This rank's samples, the same in every step."""
    model = load_model("smoke-speed")
    numbers = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(model.vocab, (4, model.seq + 1), generator=numbers)
    return MicroBatch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), BatchPosition(0, 4 * dist.get_rank())
    )


def stock(wrap: Callable[..., tuple[Any, torch.optim.Optimizer]]) -> Callable[[], None]:
    """The script that one writes, after `wrap(module, optimizer)`."""
    e, data = experiment(Layout(micro_batch=4)), batch()
    plain = PlainGPT(
        e.model, Dropout(e.training, e.model, e.seq), Part(range(e.model.layers)), recompute=False
    )
    initialise(plain, e, torch.device("cpu"))
    plain.batches = repeat(data)
    module, optimizer = wrap(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True))

    def step() -> None:
        module(data.tokens).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(zero: int) -> Callable[[], None]:
    """`repro.parallelize`."""
    blocks = [f"blocks.{i}" for i in range(load_model("smoke-speed").layers)]
    return stock(lambda m, o: repro.parallelize(m, o, Layout(dp=2, zero=zero), blocks=blocks))


def native(layout: Layout) -> Callable[[], None]:
    """The suite's engine; with `dp = 1` it does not communicate either."""
    data = batch()
    mesh = meshes.single_rank_mesh() if layout.dp == 1 else meshes.distributed_mesh(layout, "cpu")
    engine = NativeEngine(experiment(layout), mesh, torch.device("cpu"))

    def step() -> None:
        engine.step([data], lambda phase: None)
        engine.synchronize()

    return step


def messages(zero: int) -> Callable[[], None]:
    """The gradients and parameters of a step on their way, and nothing else."""
    group = meshes.distributed_mesh(Layout(dp=2), "cpu").dp
    full = torch.zeros(total_parameters(load_model("smoke-speed")))
    shard = full.chunk(2)[group.rank]

    def step() -> None:
        if zero == 0:
            group.all_reduce(full).wait()
            return
        for _ in range(2 if zero == 3 else 1):
            group.all_gather(full, shard).wait()
        group.reduce_scatter(shard, full).wait()

    return step


MAKERS: dict[str, Callable[[], Callable[[], Any]]] = {
    "limit": lambda: stock(lambda module, optimizer: (module, optimizer)),
    "native, alone": lambda: native(Layout(micro_batch=4)),
    "DDP": lambda: stock(
        lambda module, optimizer: (torch.nn.parallel.DistributedDataParallel(module), optimizer)
    ),
    **{f"parallelize, stage {zero}": lambda zero=zero: ours(zero) for zero in range(4)},  # type: ignore[misc]
    **{
        f"native, stage {zero}": lambda zero=zero: native(Layout(dp=2, zero=zero, micro_batch=4))
        for zero in range(4)
    },  # type: ignore[misc]
    **{f"messages, stage {zero}": lambda zero=zero: messages(zero) for zero in range(4)},  # type: ignore[misc]
}


def take(name: str) -> tuple[float, float]:
    """(seconds, processor seconds) of one step on this rank; builds what it trains on the first call."""
    if name not in STEPS:
        STEPS[name] = MAKERS[name]()
        STEPS[name]()
    gc.disable()
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    STEPS[name]()
    spent = time.perf_counter() - wall, time.process_time() - cpu
    gc.enable()
    return spent


def turns(name: str, pairs: int) -> list[dict[str, tuple[float, float]]]:
    """Steps at the limit and of `name`; who comes first changes."""
    return [{who: take(who) for who in (("limit", name), (name, "limit"))[i % 2]} for i in range(pairs)]


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "limit"])
def test_step(benchmark: Any, two: RankPool, name: str) -> None:
    two.run(turns, name, 3)
    ranks = two.run(turns, name, PAIRS)
    for i, unit in enumerate(("wall", "cpu")):
        # The slower rank's seconds, both ranks' processors.
        joined = (max, sum)[i]
        pairs = [[joined(rank[p][who][i] for rank in ranks) for who in ("limit", name)] for p in range(PAIRS)]
        ratio, low, high = ratio_interval(pairs)
        benchmark.extra_info[unit] = f"{ratio:.3f} ({low:.3f} to {high:.3f})"
    benchmark.group = "step and the limit, two ranks"
    benchmark.pedantic(two.run, args=(take, name), rounds=8, iterations=1)
