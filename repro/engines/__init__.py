"""Who executes a strategy: one adapter per engine, one interface (`base.Engine`).

`native` is this suite's own step, which `simulate` traces too; `torch` runs torch's strategies on the same model, to
compare with.  `checkpoint`, `simulate`, `calibrate` and `launch` import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from repro.config import Experiment
    from repro.engines.base import Engine
    from repro.parallel.mesh import Mesh


LIBRARIES = {"torch": ("torch._dynamo",)}
"""What an engine imports beyond torch when it is built: libraries, no part of a model."""


def load(engine: str) -> None:
    """Import what this engine imports, so that a limit of memory that is set now leaves it out."""
    for name in LIBRARIES.get(engine, ()):
        importlib.import_module(name)


def build_engine(experiment: Experiment, mesh: Mesh, device: torch.device) -> Engine:
    """The engine that the experiment names, with its model built on this rank."""
    if experiment.engine == "torch":
        from repro.engines.torch import TorchEngine

        return TorchEngine(experiment, mesh, device)
    from repro.engines.native import NativeEngine

    return NativeEngine(experiment, mesh, device)
