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
        self._accumulate: list[Any] = []

    def now(self) -> bool:
        """Whether the backward pass that runs only looks."""
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
            return False
        if not self._accumulate:
            with torch._C.DisableTorchFunctionSubclass():
                self._accumulate = [get_gradient_edge(p).node for p in self._parameters]
        return not any(map(_runs, self._accumulate))


def _runs(node: Any) -> bool:
    try:
        found: bool = torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # `grad` was asked for this parameter's gradient, and hands it over
        return False
    return found
