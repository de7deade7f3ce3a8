"""Benchmark of a step on two gloo ranks and its limit, the same step without communication; their steps alternate.

    make benchmarks

At the limit, each process trains a separate model with plain torch: forward, backward, clipping by the global norm and
fused AdamW. The model is in fp32 with 6 layers of width 256, and each rank has 128 tokens x 4. The extra information
of a row is the ratio of adjacent steps to the limit, as median and 95 % interval. `wall` is the ratio of wall times,
and `cpu` the ratio of CPU times including gloo's threads, which depends less on other processes of the machine.

`native, alone` is the native engine on one process. The rows `messages` send only the gradients and parameters of a
step, with the volumes of 1910.02054 sec. 7 and one collective per volume. If all cores compute, this time is the
minimum overhead of communication.
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
"""Functions that run one step, by name; retained in a rank between calls."""


def experiment(layout: Layout) -> Experiment:
    training = Training(steps=10_000, clip=CLIP, dropout=0.0, attention_dropout=0.0)
    return Experiment(name="limit", model=load_model("smoke-speed"), layout=layout, training=training)


def batch() -> MicroBatch:
    """Return this rank's samples, which are equal in all steps."""
    model = load_model("smoke-speed")
    numbers = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(model.vocab, (4, model.seq + 1), generator=numbers)
    return MicroBatch(
        tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), BatchPosition(0, 4 * dist.get_rank())
    )


def torch_step(wrap: Callable[..., tuple[Any, torch.optim.Optimizer]]) -> Callable[[], None]:
    """Return the step of a plain torch script after `wrap(module, optimizer)`."""
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


def parallelized(zero: int) -> Callable[[], None]:
    """Return the step of a torch script with `repro.parallelize`."""
    blocks = [f"blocks.{i}" for i in range(load_model("smoke-speed").layers)]
    return torch_step(lambda m, o: repro.parallelize(m, o, Layout(dp=2, zero=zero), blocks=blocks))


def native(layout: Layout) -> Callable[[], None]:
    """Return the step of the native engine; with `dp = 1` it has no communication."""
    data = batch()
    mesh = meshes.single_rank_mesh() if layout.dp == 1 else meshes.distributed_mesh(layout, "cpu")
    engine = NativeEngine(experiment(layout), mesh, torch.device("cpu"))

    def step() -> None:
        engine.step([data], lambda phase: None)
        engine.synchronize()

    return step


def messages(zero: int) -> Callable[[], None]:
    """Return a step that only communicates the gradients and parameters."""
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


STEP_FACTORIES: dict[str, Callable[[], Callable[[], Any]]] = {
    "limit": lambda: torch_step(lambda module, optimizer: (module, optimizer)),
    "native, alone": lambda: native(Layout(micro_batch=4)),
    "DDP": lambda: torch_step(
        lambda module, optimizer: (torch.nn.parallel.DistributedDataParallel(module), optimizer)
    ),
    **{f"parallelize, stage {zero}": lambda zero=zero: parallelized(zero) for zero in range(4)},  # type: ignore[misc]
    **{
        f"native, stage {zero}": lambda zero=zero: native(Layout(dp=2, zero=zero, micro_batch=4))
        for zero in range(4)
    },  # type: ignore[misc]
    **{f"messages, stage {zero}": lambda zero=zero: messages(zero) for zero in range(4)},  # type: ignore[misc]
}


def time_step(name: str) -> tuple[float, float]:
    """Return (wall seconds, CPU seconds) of one step on this rank; the first call builds the step."""
    if name not in STEPS:
        STEPS[name] = STEP_FACTORIES[name]()
        STEPS[name]()
    gc.disable()
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    STEPS[name]()
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    gc.enable()
    return seconds


def alternate(name: str, pairs: int) -> list[dict[str, tuple[float, float]]]:
    """Return the times of pairs of steps, one at the limit and one of `name`; the order of each pair alternates."""
    return [{n: time_step(n) for n in (("limit", name), (name, "limit"))[i % 2]} for i in range(pairs)]


@pytest.mark.parametrize("name", [name for name in STEP_FACTORIES if name != "limit"])
def test_step_and_limit(benchmark: Any, two: RankPool, name: str) -> None:
    two.run(alternate, name, 3)
    ranks = two.run(alternate, name, PAIRS)
    for i, unit in enumerate(("wall", "cpu")):
        # Wall time of the slower rank, and CPU time of both ranks.
        combine = (max, sum)[i]
        pairs = [[combine(rank[p][n][i] for rank in ranks) for n in ("limit", name)] for p in range(PAIRS)]
        ratio, low, high = ratio_interval(pairs)
        benchmark.extra_info[unit] = f"{ratio:.3f} ({low:.3f} to {high:.3f})"
    benchmark.group = "step and the limit, two ranks"
    benchmark.pedantic(two.run, args=(time_step, name), rounds=8, iterations=1)
