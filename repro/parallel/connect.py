"""Connect NCCL's communicators before the first step, and see what they take of the device's memory.

NCCL makes a communicator at its first use, in which the *host* of each of its ranks waits for the others.  In a step
that is for ever where a stage posts a receive before it sends what its peer waits for.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from repro.parallel.mesh import Mesh
from repro.parallel.transports import NcclTransport

START, CHANNELS, END = "start", "channels", "end"
"""Before any group was connected; for messages between stages; when a run is over, as communicators grow with use."""
_taken: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Bytes that each communicator took.  They outlive an experiment, as the groups do (`mesh.process_group`)."""


def connect(mesh: Mesh, device: torch.device) -> dict[str, int]:
    """Use every communicator of the mesh once: all ranks call this, and meet in one order of groups and channels.

    Returns bytes of `device`: `start`, in use beside torch's tensors before any communicator was made (the CUDA
    context, others' processes), and what the communicator of each group took, and those of a pipeline's `channels`.
    """
    found = {START: outside(device) - sum(_taken.values())}
    message, seen = torch.zeros(1, device=device), set[dist.ProcessGroup]()
    for group in mesh.every_group():
        if not isinstance(group.transport, NcclTransport):
            continue
        for number, (made, use) in enumerate(group.transport.first_uses()):
            if made in seen:
                continue  # two axes have the same ranks
            seen.add(made)
            if made not in _taken:
                before = outside(device)
                use(message).wait()
                _taken[made] = outside(device) - before
            name = CHANNELS if number else group.name
            found[name] = found.get(name, 0) + _taken[made]
    return found


def outside(device: torch.device) -> int:
    """Bytes of a GPU that are in use, but not by this process's torch."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
