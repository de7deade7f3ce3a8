"""The counter outside the engines sees what they send: ours by its own ledger, torch's by what its strategies are."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
import torch

from repro.config import Layout
from repro.engines import build_engine
from repro.engines.base import Engine
from repro.measure.collectives import CollectiveWatch
from repro.parallel import mesh as meshes
from repro.parallel.ledger import CommLedger
from tests.pool import RankPool
from tests.training import LEARNING, micro_batches, smallest, tiny


def sent(ledger: CommLedger, names: dict[str, frozenset[int]]) -> dict[frozenset[int], int]:
    """Bytes by the ranks of a group, whatever operation carries them."""
    found: Counter[frozenset[int]] = Counter()
    for row in ledger.rows():
        found[names[row["group"]]] += row["sent_bytes"]
    return dict(found)


def both_ways(layout: Layout, engine: str) -> tuple[dict[frozenset[int], int], ...]:
    """Bytes of the second step by the engine's ledger and by the watch, the watch's rows and the parameters' shapes."""
    experiment = tiny(layout, smallest(layout), engine, **LEARNING)
    mesh = meshes.distributed(layout, "cpu")
    built = build_engine(experiment, mesh, torch.device("cpu"))
    batches = micro_batches(experiment, mesh.dp.rank, 0)
    built.step(batches, lambda phase: None)
    built.synchronize()
    watch = CollectiveWatch(mesh)
    mesh.ledger.reset()
    with watch:
        built.step(batches, lambda phase: None)
        built.synchronize()
    groups = (mesh.world, mesh.dp, mesh.tp, mesh.pp, mesh.embedding)
    ranks = {group.name: frozenset(group.ranks) for group in groups}
    return sent(mesh.ledger, ranks), sent(watch.ledger, ranks), watch.ledger.rows(), shapes(built)


def shapes(engine: Engine) -> list[tuple[int, ...]]:
    """Of the model's parameters."""
    return [tuple(parameter.shape) for parameter in engine.full_parameters().values()]


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


@pytest.mark.parametrize(("zero", "volumes"), [(0, 2), (1, 3), (2, 2), (3, 3)])
def test_what_torchs_strategies_send(two: RankPool, zero: int, volumes: int) -> None:
    """DDP's all-reduce, ZeroRedundancyOptimizer's broadcasts after it, FSDP2's gathers: in volumes of Psi elements.

    FSDP2 pads a parameter's first dimension to a multiple of the ranks.  Norm and loss are what is beyond.
    """
    layout = Layout(dp=2, micro_batch=4, zero=zero)
    for _, _, rows, parameters in two.run(both_ways, layout, "torch"):
        first = [-(-shape[0] // 2) * 2 if zero > 1 else shape[0] for shape in parameters]
        psi = sum(n * prod(shape[1:]) for n, shape in zip(first, parameters, strict=True))
        elements = sum(row["sent_bytes"] for row in rows) // 4 * 2  # (n-1)/n = 1/2
        assert elements == pytest.approx(volumes * psi, rel=2e-3), rows
