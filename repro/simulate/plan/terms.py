"""The terms of memory as people call them, and which of them is the one too much."""

from __future__ import annotations

from collections.abc import Mapping

TERMS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "checkpoints": "activation checkpoints",
    "communication": "communication buffers",
    "other": "temporary tensors",
}
"""Category of `repro.parallel.storage`: term.  `temporary tensors` are what forward, backward and update
use and drop: gradients of activations, activations that are recomputed, unscaled gradients."""
FRAGMENTATION = "fragmentation"


def binding(by_category: Mapping[str, int]) -> str:
    """The largest term of what is live."""
    return TERMS[max(TERMS, key=lambda category: by_category.get(category, 0))]
