"""Engines, which execute the training step of an experiment: `native`, `torch`, `deepspeed` and `megatron`.

All engines implement the interface `Engine`, and `build_engine` imports an engine when an experiment names it.
`config.engines` states which experiments an engine supports.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from repro.config.engines import NATIVE
from repro.measure.provenance import major_minor, versions
from repro.util import extras

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from repro.config import Experiment
    from repro.engines.native.model_part import MicroBatch
    from repro.parallel.mesh import Mesh
    from repro.parallel.pipeline.runner import Observer
    from repro.parallel.zero.optimizer import Norms

__all__ = [
    "NATIVE",
    "Attribute",
    "Engine",
    "EngineReport",
    "Exchange",
    "build_engine",
    "import_libraries",
    "missing_library",
]

_ADAPTERS = {
    NATIVE: "repro.engines.native.engine:NativeEngine",
    "torch": "repro.engines.torch.engine:TorchEngine",
    "deepspeed": "repro.engines.deepspeed.engine:DeepSpeedEngine",
    "megatron": "repro.engines.megatron.engine:MegatronEngine",
}
"""Python module and class that implement each engine, imported when an experiment uses the engine."""
_LIBRARIES = {"torch": "torch._dynamo", "deepspeed": "deepspeed", "megatron": "megatron.core"}
"""Python module of the library that an engine needs, by engine."""
_MIN_TORCH = (2, 10)
"""Minimum version for engine `torch`, which needs FSDP2's `replicate` and `return_outputs` of pipeline steps."""

_ABSENT = object()
Attribute = tuple[Any, str]
"""Attribute of a library whose value depends on the experiment: (module or class, name of the attribute)."""


@dataclass(frozen=True)
class EngineReport:
    """Description of the software that executed an experiment, which the result record of the experiment contains."""

    name: str
    """Name and version of the library that executed the training step, for example `DeepSpeed 0.19.8`."""
    theirs: str
    """Parts of the training step that the library executes, instead of this suite's code."""
    configuration: dict[str, Any] = field(default_factory=dict)
    """Settings that the experiment passed to the library, as JSON data."""


class Engine(Protocol):
    """Interface of an engine: the model, optimizer and training step of one experiment on one rank."""

    def step(self, micro_batches: Sequence[MicroBatch], observe: Observer) -> Norms:
        """Run one training step: forward and backward passes of the replica's micro-batches, and the optimizer step."""

    def loss_scale(self) -> Tensor | None:
        """Return the loss scale of the next training step, 0-dim; None without loss scaling."""

    def synchronize(self) -> None:
        """Wait for communication that an engine starts at the end of a training step and completes in the next step."""

    def local_parameters(self) -> int:
        """Return the number of parameters on this tp rank and pipeline stage, before ZeRO shards them."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter of the pipeline stage by name, gathered over dp but local to the tp rank."""

    def padding(self) -> int:
        """Return the number of padding elements in the engine's flat parameter or gradient buffers."""

    def mark_states(self) -> None:
        """Set the memory category of all parameters, gradients and optimizer states (`repro.parallel.storage`).

        The memory measurement calls this method in the first step when gradients exist, and at the end of the step.
        """

    def report(self) -> EngineReport:
        """Return the name, version and settings of the software that executes the training step."""

    def pipeline_report(self) -> dict[str, Any]:
        """Return pipeline stage and maximum number of in-flight (micro-batch, chunk) pairs; {} without a pipeline."""


class Exchange:
    """Reentrant context in which attributes of a library's modules and classes have the values of one experiment.

    Values that code assigns inside the context are saved at its exit and restored at the next entry.
    """

    def __init__(self, values: dict[Attribute, Any]):
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


def missing_library(engine: str) -> str:
    """Return an engine's missing library and its installation command, `deepspeed: pip install ...`; or nothing."""
    version = versions(["torch"]).get("torch", "") if engine == "torch" else ""
    if () < major_minor(version) < _MIN_TORCH:
        return f"torch {'.'.join(map(str, _MIN_TORCH))} or later: torch {version} is installed. Upgrade torch"
    library = _LIBRARIES.get(engine, "torch").partition(".")[0]
    return "" if extras.is_installed(library) else f"{library}: {extras.installation('engines')}"


def import_libraries(engine: str, device_type: str) -> None:
    """Import the libraries of `engine`, so that a memory limit set afterwards does not count their memory."""
    # torch imports this module, and with it sympy, in the first backward pass that gets gradients of outputs.
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    adapter = importlib.import_module(_ADAPTERS[engine].split(":")[0])
    if engine == "deepspeed":
        adapter.import_deepspeed(device_type)
        importlib.import_module("torch._dynamo")
    elif engine in _LIBRARIES:
        importlib.import_module(_LIBRARIES[engine])


def build_engine(experiment: Experiment, mesh: Mesh, device: torch.device) -> Engine:
    """Return an engine for the experiment, with the rank's part of the model built on `device`."""
    module, adapter = _ADAPTERS[experiment.engine].split(":")
    built: Engine = getattr(importlib.import_module(module), adapter)(experiment, mesh, device)
    return built
