"""Reproduce the published claims of ZeRO, DeepSpeed, Turing-NLG, Megatron-LM and Yuan 1.0.

From Python most users need `repro.parallelize` and `repro.Layout` only; everything else is
behind the `repro` command. Importing this package imports no torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Layout", "__version__", "parallelize"]

if TYPE_CHECKING:
    from repro.config import Layout
    from repro.wrap.parallelize import parallelize

if not os.path.isdir(os.path.join(__path__[0], "kernels")):
    # A checkout: `repro.kernels` and `repro.examples` are in the same folder as this package and need no installation.
    __path__.append(os.path.dirname(__path__[0]))


def __getattr__(name: str) -> Any:
    if name == "parallelize":
        from repro.wrap.parallelize import parallelize

        return parallelize
    if name == "Layout":
        from repro.config import Layout

        return Layout
    raise AttributeError(f"module 'repro' has no attribute {name!r}")
