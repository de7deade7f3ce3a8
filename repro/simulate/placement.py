"""Placement of a layout's ranks on a system's nodes, and the links that the groups of ranks use.

Nodes are filled one after another in the order of the ranks. `layout.order` therefore decides which groups stay inside
a node. With `tp-dp-pp`, tensor parallelism stays inside a node if tp divides the devices of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.config import Layout
from repro.config.errors import ConfigError
from repro.config.system import System

BETWEEN_NODES = "inter-node"
GROUPS = ("world", "tp", "cp", "dp", "pp", "embedding")
"""Names of a rank's process groups in `repro.parallel.mesh.Mesh`. `embedding` joins first and last pipeline stage."""


def group_members(layout: Layout, group: str) -> npt.NDArray[Any]:
    """Return the ranks of all process groups named `group`, [groups, members]; empty if the groups have one member."""
    if group == "world":
        return np.arange(layout.world)[None, :] if layout.world > 1 else np.empty((0, 0), dtype=int)
    axis = "pp" if group == "embedding" else group
    offsets = np.array(layout.offsets(axis))
    if len(offsets) == 1:
        return np.empty((0, 0), dtype=int)
    first = np.arange(layout.world)
    for one in layout.within(axis):
        first = first[first // layout.strides[one] % getattr(layout, one) == 0]
    found = first[:, None] + offsets
    return found[:, [0, -1]] if group == "embedding" else found


@dataclass(frozen=True)
class Placement:
    """Placement of the ranks of `layout` on nodes of `system`.

    The layout uses as many nodes as its ranks need, even if the system has fewer. The last node may be partly empty. On
    a CPU system (only links of class `memory`), all ranks are processes of one node.
    """

    layout: Layout
    system: System

    def node_of(self, rank: int) -> int:
        """Return the index of a rank's node. Raises `ConfigError` if the system's devices per node are unknown."""
        assert 0 <= rank < self.layout.world, f"rank {rank} is not one of {self.layout.world} ranks"
        return rank // self.devices_per_node

    def nodes(self, ranks: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the index of the node of each of `ranks`."""
        return ranks // self.devices_per_node

    def link_of(self, group: str, ranks: Sequence[int]) -> str:
        """Return the slowest class of links between `ranks`, which are members of `group`; empty for a single rank.

        The class is `inter-node` if the ranks are on different nodes. Otherwise, it is the first of memory, nvlink and
        pcie that the system has. Raises `ConfigError` if the system has none of these.
        """
        least, most = min(ranks), max(ranks)
        if least == most:
            return ""
        if self.node_of(least) != self.node_of(most):
            return BETWEEN_NODES
        try:
            return self.system.link_inside()
        except ConfigError as error:
            what = f"{error.expected}, because all ranks of the {group} group {_ranks_text(ranks)} are on one node"
            raise ConfigError(error.key, error.value, what, file=self.system.name) from None

    def links(self, rank: int) -> dict[str, str]:
        """Return the slowest class of links for each process group of `rank` that has more than one member."""
        groups = {group: self.ranks_of(group, rank) for group in GROUPS}
        return {group: self.link_of(group, ranks) for group, ranks in groups.items() if len(ranks) > 1}

    def ranks_of(self, group: str, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group named `group` (one of `GROUPS`) to which `rank` belongs, in mesh order."""
        layout = self.layout
        if group == "world":
            return tuple(range(layout.world))
        # First and last stage share the tied embedding; other stages form groups of one.
        if group == "embedding":
            pipeline = self.ranks_of("pp", rank)
            ends = (pipeline[0], pipeline[-1])
            return ends if layout.pp > 1 and rank in ends else (rank,)
        return layout.group_of(group, rank)

    @cached_property
    def devices_per_node(self) -> int:
        """Number of ranks on a full node; on a CPU system, number of all ranks, which are processes of one node."""
        processor = "memory" in self.system.links and BETWEEN_NODES not in self.system.links
        if self.layout.world == 1 or processor:
            return self.layout.world
        return int(self.system.devices_per_node.known("devices_per_node", system=self.system.name))


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:3]))
    return f"({shown}, ...)" if len(ranks) > 3 else f"({shown})"
