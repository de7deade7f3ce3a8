"""The groups of a layout as DeepSpeed asks for them: an `mpu`, the model-parallel unit of Megatron-LM."""

from __future__ import annotations

import torch.distributed as dist

from repro.config import Layout
from repro.parallel import mesh as meshes
from repro.parallel.mesh import Mesh


class Topology:
    """Tensor parallelism is ours, ZeRO over the other axis DeepSpeed's, as in the release of February 2020."""

    def __init__(self, layout: Layout, mesh: Mesh):
        """Collective: every rank makes all groups."""
        self.mesh = mesh
        self.groups = {axis: _own(layout, axis) for axis in ("tp", "dp")}

    def get_model_parallel_rank(self) -> int:
        return self.mesh.tp.rank

    def get_model_parallel_world_size(self) -> int:
        return self.mesh.tp.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.groups["tp"]

    def get_data_parallel_rank(self) -> int:
        return self.mesh.dp.rank

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.dp.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.groups["dp"]


def _own(layout: Layout, axis: str) -> dist.ProcessGroup:
    """This rank's process group along `axis`, even if it is alone there."""
    found = [(ranks, meshes.make_process_group(ranks)) for ranks in meshes.groups(layout, axis)]
    return next(group for ranks, group in found if dist.get_rank() in ranks)
