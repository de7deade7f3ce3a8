"""Records of forward passes under ZeRO stage 3, the schedule of their backward pass, and helpers to observe autograd.

A *visit* is one call of a module that uses the parameters of a gather unit. Several forward passes may precede the
backward pass of one loss (siamese networks, a module unrolled in time).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from repro.parallel.zero.partition import ModuleUse

Visit = tuple[int, ModuleUse]
"""Module call in a forward pass: index of the module's gather unit (jointly gathered parameters), and the module."""


class _Graph:
    """Token that lives as long as an autograd graph, because hooks in the graph refer to it."""


class ForwardPass:
    """Record of the visits (module calls) in one forward pass of the wrapped module."""

    def __init__(self, has_gradients: bool) -> None:
        self.has_gradients = has_gradients
        """Whether autograd records the forward pass, so that a backward pass can follow."""
        self.visits: list[Visit] = []
        """Module calls of the forward pass in the order in which they began."""
        self.ends: list[int] = []
        """For each visit (module call), the number of visits that had begun when it ended; visits may be nested."""
        self.open_visits: list[int] = []
        """Indices in `visits` of the module calls that have not ended, the innermost call last."""
        self.offset = 0
        """Index of this forward pass's first module call among the calls of all passes in `BackwardSchedule.visits`."""
        self.graph: _Graph | None = _Graph()
        self._reference = weakref.ref(self.graph)

    def begin_visit(self, u: int, use: ModuleUse) -> int:
        """Record that a module call of the forward pass begins, and return the index of the call."""
        self.visits.append((u, use))
        self.ends.append(len(self.visits))
        self.open_visits.append(len(self.visits) - 1)
        return self.open_visits[-1]

    def end_visit(self, u: int, use: ModuleUse) -> int:
        """Record that the innermost open call of a module ends, and return the index of the call."""
        visit = _pop_innermost(self.open_visits, self.visits, (u, use))
        self.ends[visit] = len(self.visits)
        return visit

    def has_live_graph(self) -> bool:
        """Return whether the pass's autograd graph still exists, after this record drops its reference to the graph."""
        self.graph = None
        return self._reference() is not None


class BackwardSchedule:
    """Order in which one backward pass enters and leaves the visits (module calls) of several forward passes."""

    def __init__(self, passes: Sequence[ForwardPass]) -> None:
        """Order the entries and exits of all visits (module calls) as autograd reaches them.

        Autograd runs the operators that were recorded last first. When autograd enters a visit, all visits that began
        after its end are finished. When autograd leaves a visit, all visits that began after its start are finished.
        """
        self.visits: list[Visit] = []
        self._ends: list[int] = []
        for run in passes:
            run.offset = len(self.visits)
            self.visits += run.visits
            self._ends += [run.offset + end for end in run.ends]
        steps = [(end, False, v) for v, end in enumerate(self._ends)]
        steps += [(v, True, v) for v in range(len(self.visits))]
        self.steps = [step[1:] for step in sorted(steps, key=lambda s: (-s[0], not s[1], s[2]))]
        """Steps of the backward pass in order: (True to leave, False to enter a module call; index of the call)."""
        self.steps_taken = 0
        self.open_visits: list[int] = []
        """Indices of the module calls that activation recomputation is running again, the innermost call last."""
        self.first_visit = {u: v for v, (u, _) in reversed(list(enumerate(self.visits)))}
        """Index of each gather unit's first module call, after whose backward the unit's gradients are complete."""
        self._entry = {v: i for i, (leaves, v) in enumerate(self.steps) if not leaves}
        self._exit = {v: i for i, (leaves, v) in enumerate(self.steps) if leaves}
        self._of_use: dict[Visit, list[int]] = {}
        for v, visit in enumerate(self.visits):
            self._of_use.setdefault(visit, []).append(v)
        self.next_entry: list[int | None] = [None] * len(self.steps)
        """For each step of backward, the index of the module call that autograd enters next; None if it enters none."""
        for i in reversed(range(len(self.steps) - 1)):
            leaves, v = self.steps[i + 1]
            self.next_entry[i] = self.next_entry[i + 1] if leaves else v
        self.frees_unit = self._frees_unit()
        """For each step of backward, whether its gather unit can be freed: no call of the unit is open or next."""

    def steps_until_entry(self, visit: int) -> int:
        """Return how many entries and exits of module calls autograd passes up to the entry of module call `visit`."""
        return self._entry[visit] + 1

    def steps_until_exit(self, visit: int) -> int:
        """Return how many entries and exits of module calls autograd passes up to the exit of the module call `visit`.

        The number includes the entries of module calls that ended when `visit` began.
        """
        stop = self._exit[visit] + 1
        while stop < len(self.steps) and not self.steps[stop][0] and self._ends[self.steps[stop][1]] == visit:
            stop += 1
        return stop

    def _frees_unit(self) -> list[bool]:
        entered: Counter[int] = Counter()
        found = []
        for (leaves, v), following in zip(self.steps, self.next_entry, strict=True):
            u = self.visits[v][0]
            entered[u] += -1 if leaves else 1
            found.append(leaves and not entered[u] and (following is None or self.visits[following][0] != u))
        return found

    def begin_recomputation(self, u: int, use: ModuleUse) -> bool:
        """Record that recomputation runs a module again; return False if autograd has left all calls of the module."""
        visits = self._of_use.get((u, use), [])
        while visits and self._exit[visits[-1]] < self.steps_taken:
            visits.pop()
        self.open_visits += visits[-1:]
        return bool(visits)

    def end_recomputation(self, u: int, use: ModuleUse) -> int:
        """Record that the innermost recomputation of a module ends, and return the index of the module call."""
        return _pop_innermost(self.open_visits, self.visits, (u, use))


def _pop_innermost(open_visits: list[int], visits: Sequence[Visit], visit: Visit) -> int:
    """Pop a module's innermost call from the stack of open calls, and the calls above it, which were interrupted."""
    while open_visits:
        if visits[number := open_visits.pop()] == visit:
            return number
    raise RuntimeError(
        "A module that calls itself in its forward pass is not supported under zero = 3. Call a method that runs the "
        "inner modules, or use zero = 2."
    )


class GradOnlyBackward:
    """Detect backward passes that compute gradients of inputs only, for example a gradient penalty.

    `torch.autograd.grad(..., create_graph=True)` accumulates no gradient of a parameter, and retains the graph for a
    later backward pass that accumulates them.
    """

    def __init__(self, parameters: Sequence[Parameter]):
        self._parameters = parameters
        self._accumulate_nodes: dict[int, Any] = {}

    def is_running(self) -> bool:
        """Return whether the running backward pass accumulates no gradient of any parameter."""
        if not torch._C._autograd._get_current_graph_task_keep_graph():  # type: ignore[attr-defined]
            return False
        with torch._C.DisableTorchFunctionSubclass():
            for i, p in enumerate(self._parameters):
                # A frozen parameter has no autograd node yet, but may be trained later.
                if i not in self._accumulate_nodes and p.requires_grad:
                    self._accumulate_nodes[i] = get_gradient_edge(p).node
        return not any(map(_will_execute, self._accumulate_nodes.values()))


def _will_execute(node: Any) -> bool:
    try:
        found: bool = torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # `torch.autograd.grad` returns this gradient without adding it to `p.grad`.
        return False
    return found


def tensors_in(value: Any, attributes: bool = False) -> Iterator[Tensor]:
    """Return the tensors in `value`: in pytrees (tuples, lists, dicts), dataclasses and other mappings.

    `attributes`: include the attributes of any other object, as needed for the output of a module. An object in the
    input of a module may have tensors that the module does not use.
    """
    return _tensors_in(value, attributes, set())


def _tensors_in(value: Any, attributes: bool, seen: set[int]) -> Iterator[Tensor]:
    for leaf in (value,) if isinstance(value, Tensor) else tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
            continue
        inner: list[Any] = []
        if isinstance(leaf, Mapping):
            inner = list(leaf.values())
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            inner = [getattr(leaf, field.name) for field in fields(leaf)]
        elif attributes and hasattr(leaf, "__dict__") and not callable(leaf):
            inner = list(vars(leaf).values())
        if inner and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from _tensors_in(inner, attributes, seen)
