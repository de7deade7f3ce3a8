"""Mesh of ranks: their communication groups by parallel axis, process groups of torch, and NCCL communicators.

`layout.order` defines which axis is innermost.  With Megatron's order `tp-dp-pp`, a rank's number is
`((pp_index * dp + dp_index) * cp + cp_index) * tp + tp_index`, so that the ranks of a tp group share a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from repro.config import Layout
from repro.parallel.comm import Group
from repro.parallel.ledger import CommLedger
from repro.parallel.transports import (
    Channels,
    GlooRing,
    GlooTransport,
    NcclTransport,
    NoTransport,
    Transport,
    needs_ring,
    ranks_per_node,
)


def groups(layout: Layout, axis: str) -> list[tuple[int, ...]]:
    """Return the ranks of all groups along the parallel axis `dp`, `cp`, `tp` or `pp`, ordered by first rank."""
    found = (layout.group_of(axis, rank) for rank in range(layout.world))
    return [ranks for rank, ranks in enumerate(found) if ranks[0] == rank]


@dataclass(frozen=True)
class Mesh:
    """Communication groups of one rank: all ranks, its group along each parallel axis, and its embedding group."""

    rank: int
    world: Group
    dp: Group
    """Group that averages gradients: the dp x cp ranks with the same part of the model, ordered by replica."""
    cp: Group
    """Context-parallel group: the ranks that divide the tokens of the same samples."""
    tp: Group
    pp: Group
    """Group of the ranks of one pipeline, one for each stage; `pp.rank` is this rank's stage."""
    embedding: Group
    """Group of the first and last pipeline stage, which share the tied embedding; on other stages, only this rank."""
    ledger: CommLedger
    beside_torch: Mapping[str, int] = field(default_factory=dict)
    """Device memory outside torch's allocator in bytes, by its use (NCCL communicators, CUDA context)."""

    def every_group(self) -> tuple[Group, ...]:
        """Return all communication groups of this rank, by axis in an order that is equal on every rank."""
        return self.world, self.dp, self.cp, self.tp, self.pp, self.embedding


def build_mesh(
    layout: Layout,
    rank: int,
    transport_of: Callable[[tuple[int, ...]], Transport],
    ledger: CommLedger | None = None,
) -> Mesh:
    """Return the communication groups of `rank`; `transport_of` creates the transport of a group of several ranks."""
    ledger = ledger or CommLedger()

    def group(name: str, ranks: tuple[int, ...], *, blocking: bool = False) -> Group:
        transport = transport_of(ranks) if len(ranks) > 1 else NoTransport()
        return Group(name, ranks, rank, transport, ledger, blocking=blocking)

    stages = layout.group_of("pp", rank)
    ends = (stages[0], stages[-1])
    return Mesh(
        rank=rank,
        world=group("world", tuple(range(layout.world))),
        dp=group("dp", layout.group_of("dp", rank)),
        cp=group("cp", layout.group_of("cp", rank)),
        tp=group("tp", layout.group_of("tp", rank), blocking=not layout.tp_overlap),
        pp=group("pp", stages),
        embedding=group("embedding", ends if layout.pp > 1 and rank in ends else (rank,)),
        ledger=ledger,
    )


def single_rank_mesh(ledger: CommLedger | None = None) -> Mesh:
    """Return the mesh of a single process, whose communication groups contain only this process."""
    return build_mesh(Layout(), 0, lambda ranks: NoTransport(), ledger)


def shape_only_mesh(layout: Layout, rank: int = 0) -> Mesh:
    """Return the mesh of one rank for `meta` tensors: communication is counted, and nothing is sent."""
    return build_mesh(layout, rank, lambda ranks: NoTransport())


def distributed_mesh(layout: Layout, device_type: str) -> Mesh:
    """Return the communication groups of this process under torch's default process group (gloo or NCCL)."""
    members: dict[tuple[int, ...], Transport] = {}
    pipelines = groups(layout, "pp")
    ends = [(ranks[0], ranks[-1]) for ranks in pipelines if layout.pp > 1]
    # Creating a process group is a collective operation, so every rank creates all groups in the same order.
    for ranks in (
        tuple(range(layout.world)),
        *groups(layout, "dp"),
        *groups(layout, "cp"),
        *groups(layout, "tp"),
        *pipelines,
        *ends,
    ):
        if len(ranks) == 1 or ranks in members:
            continue
        group = make_process_group(ranks)
        # NCCL has no tags, so each sequence of messages between two stages needs a separate communicator.
        piped = device_type == "cuda" and ranks in pipelines
        channels = _channels(ranks, ring=layout.chunks > 1) if piped else {}
        if dist.get_rank() not in ranks:
            members[ranks] = NoTransport()
        elif device_type == "cuda":
            members[ranks] = NcclTransport(group, channels)
        else:
            ring = needs_ring(ranks, ranks_per_node(layout.world))
            members[ranks] = GlooRing(group) if ring else GlooTransport(group)
    return build_mesh(layout, dist.get_rank(), members.__getitem__)


def ensure_process_group(device: torch.device) -> None:
    """Initialise the default process group of a single process, which libraries need even with one rank."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


_Made = dict[tuple[tuple[int, ...], tuple[object, ...]], dist.ProcessGroup]
_made: WeakKeyDictionary[dist.ProcessGroup, _Made] = WeakKeyDictionary()
"""Process groups that this process has created: for each default process group, groups by (ranks, purpose)."""


def make_process_group(ranks: tuple[int, ...], purpose: tuple[object, ...] = ()) -> dist.ProcessGroup:
    """Return the process group of `ranks`, which all meshes under one default process group share.

    `purpose` is empty for collectives, (sending stage, receiving stage, channel) for messages, and a library's name
    for a group that the library needs.  Groups are reused, because each occupies threads, sockets and, with NCCL,
    device memory until the process ends.
    """
    world = dist.group.WORLD
    assert world is not None
    if not purpose and len(ranks) == world.size():
        return world
    made = _made.setdefault(world, {})
    if (ranks, purpose) not in made:
        group = dist.new_group(sorted(ranks))
        assert group is not None
        made[ranks, purpose] = group
    return made[ranks, purpose]


def _channels(ranks: tuple[int, ...], *, ring: bool) -> Channels:
    """Return process groups for messages between pipeline stages, by (sending stage, receiving stage, channel).

    Channel 0: activations to the next stage; 1: gradients to the preceding stage.  `ring`: include groups between the
    last and the first stage, for interleaved stages.
    """
    p = len(ranks)
    found: Channels = {}
    for channel, step in enumerate((1, -1)):
        for source in range(p):
            to = (source + step) % p
            if not ring and to != source + step:
                continue  # An unused communicator would occupy device memory.
            found[source, to, channel] = make_process_group((ranks[source], ranks[to]), (source, to, channel))
    return found


def host_group(group: Group) -> Group:
    """Return a gloo group of the ranks of `group`, for small values that the host reads without waiting for the GPU."""
    if not isinstance(group.transport, NcclTransport):
        return group
    transport = GlooTransport(dist.new_group(list(group.ranks), backend="gloo"))
    return Group("host", group.ranks, group.ranks[group.rank], transport, group.ledger)


START, CHANNELS, END = "start", "channels", "end"
"""Keys of records of device memory outside torch's allocator. `start`: before the first NCCL communicator. `channels`:
communicators of messages between pipeline stages. `end`: total at the end, since communicators grow with use."""
_communicator_bytes: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Device memory of each NCCL communicator, in bytes. Later experiments of the process reuse the communicators."""


def connect_communicators(mesh: Mesh, device: torch.device) -> dict[str, int]:
    """Use every NCCL communicator of the mesh once, and return the device memory outside torch, in bytes.

    NCCL creates a communicator at its first use, in which the *host* of each rank waits for the other hosts. Within a
    training step, this creation deadlocks if a stage posts a receive before it sends the message that its peer waits
    for. All ranks must call this function before the first step.

    Keys of the result: `start` for memory before the first communicator (CUDA context, other processes), group names
    for their communicators, and `channels` for the communicators of messages between pipeline stages.
    """
    found = {START: non_torch_bytes(device) - sum(_communicator_bytes.values())}
    message = torch.zeros(1, device=device)
    seen: set[dist.ProcessGroup] = set()
    for group in mesh.every_group():
        if not isinstance(group.transport, NcclTransport):
            continue
        for number, (communicator, use) in enumerate(group.transport.first_uses()):
            if communicator in seen:
                continue  # Parallel axes with equal ranks share one communicator.
            seen.add(communicator)
            if communicator not in _communicator_bytes:
                before = non_torch_bytes(device)
                use(message).wait()
                _communicator_bytes[communicator] = non_torch_bytes(device) - before
            name = CHANNELS if number else group.name
            found[name] = found.get(name, 0) + _communicator_bytes[communicator]
    return found


def non_torch_bytes(device: torch.device) -> int:
    """Return the bytes in use on a GPU, without those that torch's allocator in this process has reserved."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
