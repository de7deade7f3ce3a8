"""What CUDA, NCCL and torch read from a rank's environment when they start on a GPU, set before torch is there.

Code stays loaded at its first use (`CUDA_MODULE_LOADING`): eagerly all of torch's kernels would take memory of the
device, and what waits for a first use is waited for by no schedule (`repro.parallel.pipeline.boundary.Later`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from repro.config import Experiment
from repro.config.engines import NATIVE
from repro.measure.provenance import release, versions

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Queues of a device that the streams of a process share, 8 unless something else is said.

A rank of a pipeline has a stream for each of up to ten communicators, and more; in one queue a stream that waits holds
up the others.  Megatron with several tp ranks asks for 1: products then begin after the messages that they are to
overlap with.  Our schedules hang under neither (`tests/parallel/test_streams.py`).
"""
KEEPS = "TORCH_NCCL_AVOID_RECORD_STREAMS"
"""Until torch 2.7 the allocator is told of every stream that uses a collective's tensor, and keeps what ZeRO frees
until it has looked at events; as since 2.8, `1` has what is read held until it is waited for."""
PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
"""Collectives get a free multiprocessor before the products that they overlap with.  Libraries have their own way."""
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_NVLS_ENABLE": "0"}
"""For equal bits (`repro.launch.rank.repeatable`): cuBLAS chooses by the workspace that it happens to get, and sums in
NVLink's switches (NVLS) are left out, as in Megatron-LM's deterministic mode."""


def choose(experiments: Sequence[Experiment], torch_version: str) -> dict[str, str]:
    """For a process that runs these experiments with this torch (`2.6.0+cu126`)."""
    in_order = any(e.engine == "megatron" and e.layout.tp > 1 for e in experiments)
    found = {CONNECTIONS: "1" if in_order else "32"}
    if (2, 6) <= release(torch_version) < (2, 8):
        found[KEEPS] = "1"
    if all(e.engine == NATIVE for e in experiments):
        found[PRIORITY] = "1"
    if any(e.training.deterministic for e in experiments):
        found |= REPEATABLE
    return found


def apply(experiments: Sequence[Experiment]) -> None:
    """Set them for this process, but for what the user has set."""
    for name, value in choose(experiments, versions(["torch"]).get("torch", "")).items():
        os.environ.setdefault(name, value)


def in_force() -> dict[str, str]:
    """What of these this process runs with, whoever set it."""
    names = (CONNECTIONS, KEEPS, PRIORITY, *REPEATABLE)
    return {name: os.environ[name] for name in names if name in os.environ}
