"""What megatron-core keeps in its modules' variables: there while an engine works, gone when it has returned.

Groups, ranks, buffers and random states are module variables of the library, one set for a process.  A job runs
several experiments in one process, in turns, so each engine keeps its own set and puts it in place for the time
of a call; whatever was there before comes back after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random

from repro.config import Layout
from repro.parallel.mesh import make_process_group

_ABSENT = object()
Place = tuple[Any, str]
"""A module or class, and the name of one of its attributes."""


class Exchange:
    """Attributes of modules and classes that have other values inside this context than outside; it may be nested.

    What is assigned to them inside is kept for the next time.
    """

    def __init__(self, values: dict[Place, Any]):
        self._values = values
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._swap()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._swap()

    def _swap(self) -> None:
        for (owner, name), inside in self._values.items():
            self._values[owner, name] = vars(owner).get(name, _ABSENT)
            if inside is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, inside)


def variables() -> dict[Place, Any]:
    """The library's module variables as they are when it has just been imported."""
    found: dict[Place, Any] = {}
    _collect(found, parallel_state, (name for name in vars(parallel_state) if _is_state(name)))
    _collect(found, random, ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED"))
    found[parallel_state, "create_group"] = _create_group
    return found


def _is_state(name: str) -> bool:
    return name == "_global_process_group_list" or (name.startswith("_") and name[1:].isupper())


def _collect(found: dict[Place, Any], module: ModuleType, names: Iterable[str]) -> None:
    for name in names:
        found[module, name] = getattr(module, name)


def _create_group(
    ranks: list[int], *_: object, group_desc: str = "", **__: object
) -> dist.ProcessGroup | dist.GroupMember:
    """In place of `parallel_state.create_group`: groups that outlive an experiment, of which each is made once.

    A pipeline's has to be its own: with two stages the library sends in one direction by this group and in the
    other by the default one, whose ranks may be the same.
    """
    purpose = (group_desc,) if group_desc == "PIPELINE_MODEL_PARALLEL_GROUP" else ()
    return make_process_group(tuple(ranks), purpose)


def initialize(layout: Layout) -> None:
    """Make the library's groups, inside the exchange.  With tp = dp = pp = 1 they have one rank each."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.chunks if layout.chunks > 1 else None,
        order=layout.order,
        create_gloo_process_groups=False,
    )


def seed(device: torch.device, value: int) -> None:
    """Give the library its random states.  Without dropout nothing is drawn, but it forks them all the same."""
    if device.type == "cuda":
        random.model_parallel_cuda_manual_seed(value)
