"""The kinds of groups whose collectives are measured: all ranks, and the smaller groups that layouts make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repro.config import Layout
from repro.simulate.time.network import GroupSpan

if TYPE_CHECKING:
    from repro.parallel.comm import Group

INSIDE, BETWEEN = "inside", "between"
"""Groups of ranks of one node, and groups that reach over nodes."""


class Kind(GroupSpan):
    """Groups that lie alike; together they hold all ranks and work at the same time."""

    @property
    def place(self) -> str:
        """`INSIDE` or `BETWEEN`."""
        return INSIDE if self.per_node == self.ranks else BETWEEN


def kinds(world: int, per_node: int, device_type: str) -> dict[Kind, Group]:
    """This rank's group of each kind, the largest first: what tp x dp makes of every tp that divides a node.

    Neighbours work inside a node, as tensor parallelism does, and ranks one tp apart all over, as its replicas
    do: with `tp = per_node` these are one rank of each node.
    """
    from repro.parallel import mesh as meshes

    if world == 1:
        return {}
    found = {Kind(world, per_node, 1): meshes.distributed_mesh(Layout(dp=world), device_type).world}
    for tp in range(2, per_node + 1):
        if per_node % tp or tp == world:
            continue
        mesh = meshes.distributed_mesh(Layout(tp=tp, dp=world // tp), device_type)
        found[Kind(tp, tp, 1)] = mesh.tp
        found[Kind(world // tp, per_node // tp, tp)] = mesh.dp
    return dict(sorted(found.items(), key=lambda item: (-item[0].ranks, item[0].stride)))


def pipelines(world: int, per_node: int, device_type: str) -> dict[str, Group]:
    """Groups whose neighbours send to each other, by place: of the ranks of a node, and of one rank of each node."""
    from repro.parallel import mesh as meshes

    found = {}
    if per_node > 1:
        layout = Layout(pp=per_node, dp=world // per_node, order="pp-dp-tp")
        found[INSIDE] = meshes.distributed_mesh(layout, device_type).pp
    if world > per_node:
        layout = Layout(dp=per_node, pp=world // per_node)
        found[BETWEEN] = meshes.distributed_mesh(layout, device_type).pp
    return found
