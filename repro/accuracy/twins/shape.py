"""Where a layout's ranks go when there are fewer of them: nodes and degrees of the twin."""

from __future__ import annotations

from dataclasses import dataclass, replace

from repro.config import Layout
from repro.config.errors import ConfigError, require
from repro.config.system import System


@dataclass(frozen=True)
class Shape:
    """Nodes and degrees of one twin; `nodes * per_node = tp * pp * dp`."""

    nodes: int
    per_node: int
    tp: int
    pp: int
    dp: int

    def layout(self, original: Layout) -> Layout:
        """`original` in these degrees: replicas keep their batch, in fp32, which a processor computes in."""
        return replace(
            original,
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            global_batch=original.replica_batch * self.dp,
            stage_layers=(),
            precision="fp32",
            sp=original.sp and self.tp > 1,
            pa=original.pa and self.tp > 1,
            scatter_gather=original.scatter_gather and self.tp > 1 and self.pp > 1,
            cb=original.cb or self.dp == 1,
        )


def shape_of(layout: Layout, system: System, ranks: int, *, tp: int = 0) -> Shape:
    """The shape of `layout`, which is on `system`, on at most `ranks` ranks.

    With enough ranks nothing changes.  Else nodes stay, with fewer ranks each; tensor parallelism stays inside the
    nodes that it was inside of, as wide as fits (`tp` asks for another degree); stages stay as far as there are
    ranks; replicas are what is left.  Raises `ConfigError` where the ranks do not divide.
    """
    devices = int(system.devices_per_node.known("devices_per_node", system=system.name))
    nodes = -(-layout.world // devices)
    devices = min(devices, layout.world)
    if layout.world <= ranks and tp in (0, layout.tp):
        return Shape(nodes, layout.world // nodes, layout.tp, layout.pp, layout.dp)
    if tp and layout.tp == devices:  # a group of tp is a node, whatever its size
        nodes = ranks // tp
    require(ranks % nodes == 0, "--ranks", ranks, f"a multiple of the {nodes} nodes of {system.name}")
    per_node = ranks // nodes
    inside = layout.tp <= devices
    degree = tp or (min(layout.tp, per_node) if inside else layout.tp * per_node // devices)
    require(degree >= 1 and ranks % degree == 0, "--tp", degree, f"a divisor of {ranks} ranks")
    stages = min(layout.pp, ranks // degree)
    if ranks % (degree * stages):
        raise ConfigError("--ranks", ranks, f"a multiple of tp {degree} x pp {stages}")
    return Shape(nodes, per_node, degree, stages, ranks // (degree * stages))
