"""Reproduce the published claims of ZeRO, DeepSpeed, Turing-NLG, Megatron-LM and Yuan 1.0.

Python programs need only `repro.parallelize` and `repro.Layout`; the command `repro` provides everything else.
Importing this package does not import torch.
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
    # In a source checkout, this path makes the folders `kernels/` and `examples/`, which lie outside `repro/`,
    # importable as `repro.kernels` and `repro.examples`.
    __path__.append(os.path.dirname(__path__[0]))


def __getattr__(name: str) -> Any:
    if name == "parallelize":
        from repro.wrap.parallelize import parallelize

        return parallelize
    if name == "Layout":
        from repro.config import Layout

        return Layout
    raise AttributeError(f"module 'repro' has no attribute {name!r}")
