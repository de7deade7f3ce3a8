"""The counter outside the engines sees what they send: ours by its own ledger, torch's by what its strategies are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.engines import build_engine
from repro.measure.operators import CollectiveCounter
from repro.parallel import mesh as meshes
from repro.parallel.ledger import CommLedger
from tests.engines.needs import needs
from tests.pool import RankPool
from tests.training import LEARNING, micro_batches, smallest, tiny


def sent(ledger: CommLedger, names: dict[str, frozenset[int]]) -> dict[frozenset[int], int]:
    """Bytes by the ranks of a group, whatever operation carries them."""
    found: Counter[frozenset[int]] = Counter()
    for row in ledger.rows():
        found[names[row["group"]]] += row["sent_bytes"]
    return dict(found)


def both_ways(layout: Layout, engine: str) -> tuple[Any, ...]:
    """Bytes of the second step by the engine's ledger and by the watch, the watch's rows and the parameters' sizes."""
    experiment = tiny(layout, smallest(layout), engine, **LEARNING)
    mesh = meshes.distributed_mesh(layout, "cpu")
    built = build_engine(experiment, mesh, torch.device("cpu"))
    batches = micro_batches(experiment, mesh.dp.rank, 0)
    built.step(batches, lambda phase: None)
    built.synchronize()
    watch = CollectiveCounter(mesh)
    mesh.ledger.reset()
    with watch:
        built.step(batches, lambda phase: None)
        built.synchronize()
    groups = (mesh.world, mesh.dp, mesh.tp, mesh.pp, mesh.embedding)
    ranks = {group.name: frozenset(group.ranks) for group in groups}
    seen = sent(mesh.ledger, ranks), sent(watch.ledger, ranks), watch.ledger.rows()
    return *seen, {name: parameter.numel() for name, parameter in built.full_parameters().items()}


NATIVE = [
    Layout(dp=2, micro_batch=4),
    Layout(dp=2, micro_batch=2, global_batch=8, zero=1),
    Layout(dp=2, micro_batch=4, zero=2),
    Layout(dp=2, micro_batch=4, zero=3),
    Layout(tp=2, micro_batch=4),
    Layout(tp=2, micro_batch=4, sp=True, recompute=True),
    Layout(tp=2, micro_batch=4, recompute=True, pa=True),
    Layout(pp=2, micro_batch=2, global_batch=8),
    Layout(pp=2, micro_batch=2, global_batch=8, schedule="interleaved", chunks=2),
]


@pytest.mark.parametrize("layout", NATIVE, ids=str)
def test_our_engine_counted_both_ways(two: RankPool, layout: Layout) -> None:
    """Every byte that a group's ledger has passes by the watch, and no other."""
    for ledger, watch, _, _ in two.run(both_ways, layout, "native"):
        assert ledger == watch
        assert sum(watch.values()) > 0


def test_products_counted_both_ways(four: RankPool) -> None:
    """Groups of an axis are kept apart."""
    for layout in (Layout(dp=2, tp=2, micro_batch=2, zero=2), Layout(dp=2, pp=2, micro_batch=2, zero=1)):
        for ledger, watch, _, _ in four.run(both_ways, layout, "native"):
            assert ledger == watch
            assert len(watch) > 2


@needs("torch")
@pytest.mark.parametrize("zero", range(4))
def test_what_torchs_strategies_send(two: RankPool, zero: int) -> None:
    """DDP's all-reduce, ZeroRedundancyOptimizer's broadcasts after it, FSDP2's gathers: in elements.

    Under stage 3 FSDP2 gathers the blocks once more, not what is outside of them.  Norm and loss are what is beyond.
    """
    layout = Layout(dp=2, micro_batch=4, zero=zero)
    for _, _, rows, parameters in two.run(both_ways, layout, "torch"):
        psi = sum(parameters.values())
        blocks = sum(size for name, size in parameters.items() if name.startswith("blocks."))
        expected = (2 * psi, 3 * psi, 2 * psi, 2 * psi + blocks)[zero]
        elements = sum(row["sent_bytes"] for row in rows) // 4 * 2  # (n-1)/n = 1/2
        assert elements == pytest.approx(expected, rel=2e-3), rows
