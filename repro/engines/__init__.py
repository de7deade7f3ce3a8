"""Implementations of a strategy behind one interface, `base.Engine`: `native`, `torch`, `deepspeed` and `megatron`.

`build_engine` imports an engine when an experiment names it. `config.engines` states which experiments an engine
supports.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from repro.config.engines import NATIVE
from repro.measure.provenance import major_minor, versions
from repro.util import extras

if TYPE_CHECKING:
    import torch

    from repro.config import Experiment
    from repro.engines.base import Engine
    from repro.parallel.mesh import Mesh

__all__ = ["NATIVE", "build_engine", "load", "missing"]

_ADAPTERS = {
    NATIVE: "repro.engines.native.engine:NativeEngine",
    "torch": "repro.engines.torch.engine:TorchEngine",
    "deepspeed": "repro.engines.deepspeed.engine:DeepSpeedEngine",
    "megatron": "repro.engines.megatron.engine:MegatronEngine",
}
"""Where each engine is, imported only when it is asked for."""
_LIBRARIES = {"torch": "torch._dynamo", "deepspeed": "deepspeed", "megatron": "megatron.core"}
"""What an engine imports beyond torch when it is built: libraries, no part of a model."""


_TORCH = (2, 10)
"""What torch's engine needs of it: from there on `replicate` runs on FSDP2, and a pipeline's step keeps no outputs."""


def missing(engine: str) -> str:
    """Which library the engine lacks here and how to get it, `deepspeed: pip install ...`; empty if it lacks none."""
    if engine == "torch" and (older := _older_torch()):
        return f"torch {'.'.join(map(str, _TORCH))}: this one, {older}, is older than engine torch is written for"
    library = _LIBRARIES.get(engine, "torch").partition(".")[0]
    return "" if extras.is_installed(library) else f"{library}: {extras.installation('engines')}"


def _older_torch() -> str:
    """The version of this torch if it is older; empty where it is not, or nobody can say."""
    version = versions(["torch"]).get("torch", "")
    return version if () < major_minor(version) < _TORCH else ""


def load(engine: str, device_type: str) -> None:
    """Import what this engine imports, so that a limit of memory that is set now leaves it out."""
    if engine == "deepspeed":
        from repro.engines.deepspeed import library

        library.load(device_type)
    elif engine in _LIBRARIES:
        importlib.import_module(_LIBRARIES[engine])


def build_engine(experiment: Experiment, mesh: Mesh, device: torch.device) -> Engine:
    """The engine that the experiment names, with its model built on this rank."""
    module, adapter = _ADAPTERS[experiment.engine].split(":")
    built: Engine = getattr(importlib.import_module(module), adapter)(experiment, mesh, device)
    return built
