"""The grid of ranks and its groups.

Ranks are numbered with tp innermost, as Megatron does, so that the ranks of one tensor-parallel group are
neighbours and share a node: ``rank = dp_index * tp + tp_index``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from repro.parallel.comm import GlooTransport, Group, NcclTransport, NoTransport, Transport
from repro.parallel.ledger import Ledger


def tp_groups(dp: int, tp: int) -> list[tuple[int, ...]]:
    """The tensor-parallel groups of a dp x tp grid, as tuples of ranks."""
    return [tuple(range(d * tp, (d + 1) * tp)) for d in range(dp)]


def dp_groups(dp: int, tp: int) -> list[tuple[int, ...]]:
    """The data-parallel groups of a dp x tp grid, as tuples of ranks."""
    return [tuple(range(t, dp * tp, tp)) for t in range(tp)]


@dataclass(frozen=True)
class Mesh:
    """The groups that one rank belongs to."""

    rank: int
    world: Group
    dp: Group
    tp: Group
    ledger: Ledger


def build(
    dp: int,
    tp: int,
    rank: int,
    transport_of: Callable[[tuple[int, ...]], Transport],
    ledger: Ledger | None = None,
) -> Mesh:
    """The mesh of ``rank`` in a dp x tp grid.

    ``transport_of`` is called for every group of the grid in the same order on every rank (creating a
    process group is itself collective).
    """
    ledger = ledger or Ledger()

    def mine(name: str, groups: list[tuple[int, ...]]) -> Group:
        found: Group | None = None
        for ranks in groups:
            transport = transport_of(ranks) if len(ranks) > 1 else NoTransport()
            if rank in ranks:
                found = Group(name, ranks, rank, transport, ledger)
        assert found is not None
        return found

    return Mesh(
        rank=rank,
        world=mine("world", [tuple(range(dp * tp))]),
        dp=mine("dp", dp_groups(dp, tp)),
        tp=mine("tp", tp_groups(dp, tp)),
        ledger=ledger,
    )


def single(ledger: Ledger | None = None) -> Mesh:
    """The mesh of one process that communicates with nobody."""
    return build(1, 1, 0, lambda ranks: NoTransport(), ledger)


def shape_only(dp: int, tp: int, rank: int = 0) -> Mesh:
    """One rank's mesh for ``meta`` tensors: collectives are counted and carry nothing."""
    return build(dp, tp, rank, lambda ranks: NoTransport())


def distributed(dp: int, tp: int, device_type: str) -> Mesh:
    """The mesh of this process in the initialised default process group (gloo on CPU, NCCL on CUDA)."""
    kind = NcclTransport if device_type == "cuda" else GlooTransport
    members: dict[tuple[int, ...], Transport] = {}

    def transport_of(ranks: tuple[int, ...]) -> Transport:
        if ranks not in members:
            everyone = len(ranks) == dist.get_world_size()
            group = dist.group.WORLD if everyone else dist.new_group(list(ranks))
            outside = dist.get_rank() not in ranks
            assert group is not None
            members[ranks] = NoTransport() if outside else kind(group)
        return members[ranks]

    return build(dp, tp, dist.get_rank(), transport_of)
