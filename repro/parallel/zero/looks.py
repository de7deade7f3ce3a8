"""Backward passes that only look: `torch.autograd.grad(..., create_graph=True)`, as of a gradient penalty.

They bring no parameter a gradient, and leave the graph for the backward pass that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter


class Looks:
    """Tells such passes, from inside them, by whether autograd will accumulate a gradient of any parameter."""

    def __init__(self, parameters: Sequence[Parameter]):
        self._parameters = parameters
        self._accumulate: dict[int, Any] = {}

    def now(self) -> bool:
        """Whether the backward pass that runs only looks."""
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
            return False
        with torch._C.DisableTorchFunctionSubclass():
            for i, p in enumerate(self._parameters):
                if i not in self._accumulate and p.requires_grad:  # it may be frozen for a while
                    self._accumulate[i] = get_gradient_edge(p).node
        return not any(map(_runs, self._accumulate.values()))


def _runs(node: Any) -> bool:
    try:
        found: bool = torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # `grad` was asked for this parameter's gradient, and hands it over
        return False
    return found
