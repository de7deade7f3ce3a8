"""Tests of the collective counter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.engines import build_engine
from repro.measure.operators import CollectiveCounter
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.parallel.test_parity import name_of
from tests.pool import RankPool, pool_of
from tests.training import LEARNING, micro_batches, smallest, tiny


def count_both_ways(layout: Layout, engine: str) -> tuple[Any, ...]:
    """Return the second step's sent bytes by group in the ledger and in the counter, and the parameter sizes."""
    experiment = tiny(layout, smallest(layout), engine, **LEARNING)
    mesh = meshes.distributed_mesh(layout, "cpu")
    built = build_engine(experiment, mesh, torch.device("cpu"))
    batches = micro_batches(experiment, mesh.dp.rank, 0)
    built.step(batches, lambda phase: None)
    built.synchronize()
    counter = CollectiveCounter(mesh)
    mesh.ledger.reset()
    with counter:
        built.step(batches, lambda phase: None)
        built.synchronize()
    groups = (mesh.world, mesh.dp, mesh.tp, mesh.pp, mesh.embedding)
    ranks = {group.name: frozenset(group.ranks) for group in groups}
    sent: list[Counter[frozenset[int]]] = []
    for ledger in (mesh.ledger, counter.ledger):
        sent.append(Counter())
        for row in ledger.rows():
            sent[-1][ranks[row["group"]]] += row["sent_bytes"]
    return *sent, {name: parameter.numel() for name, parameter in built.full_parameters().items()}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, micro_batch=2, global_batch=8, zero=1),
        Layout(dp=2, micro_batch=4, zero=3),
        Layout(tp=2, micro_batch=4, recompute=True, pa=True),
        Layout(tp=2, micro_batch=4, sp=True, recompute=True),
        Layout(pp=2, micro_batch=2, global_batch=8, schedule="interleaved", chunks=2),
        # Layouts of several groups along one axis.
        Layout(dp=2, tp=2, micro_batch=2, zero=2),
        Layout(dp=2, pp=2, micro_batch=2, zero=1),
    ],
    ids=name_of,
)
def test_counter_agrees_with_the_native_engine_ledger(request: pytest.FixtureRequest, layout: Layout) -> None:
    for ledger, counter, _ in pool_of(request, layout).run(count_both_ways, layout, "native"):
        assert ledger == counter
        assert sum(counter.values()) > 0
        assert layout.world == 2 or len(counter) > 2


@needs("torch")
@pytest.mark.parametrize("zero", range(4))
def test_torch_strategies_send_their_known_volumes(two: RankPool, zero: int) -> None:
    """Elements of DDP's all-reduce, ZeroRedundancyOptimizer's additional broadcasts, and FSDP2's all-gathers.

    In stage 3, FSDP2 gathers only the blocks a second time. The tolerance covers the norm and the loss.
    """
    layout = Layout(dp=2, micro_batch=4, zero=zero)
    for _, counter, parameters in two.run(count_both_ways, layout, "torch"):
        psi = sum(parameters.values())
        blocks = sum(size for name, size in parameters.items() if name.startswith("blocks."))
        expected = (2 * psi, 3 * psi, 2 * psi, 2 * psi + blocks)[zero]
        elements = sum(counter.values()) // 4 * 2  # (n-1)/n = 1/2
        assert elements == pytest.approx(expected, rel=2e-3)
