"""What stage 3 knows of forward passes: which units they used, and what their backward pass will do.

Several forward passes may come before the backward pass of one loss (siamese networks, a module unrolled in time).
Their backward pass runs through the last one first.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence

from repro.parallel.zero.units import Use

Visit = tuple[int, Use]
"""A unit, and the use of it that begins."""


class _Graph:
    """Lives as long as somebody can start a backward pass: hooks in autograd's graph hold it."""


class ForwardPass:
    """The uses of units in one call of the module."""

    def __init__(self, gradients: bool) -> None:
        self.gradients = gradients
        self.visits: list[Visit] = []
        """In the order in which they began."""
        self.ends: list[int] = []
        """How many visits had begun when each ended; a visit may contain others."""
        self.open: list[int] = []
        """Visits that run."""
        self.offset = 0
        """Its first visit's place in the schedule."""
        self.graph: _Graph | None = _Graph()
        self._reference = weakref.ref(self.graph)

    def visit(self, u: int, use: Use) -> int:
        """Note that a use begins; returns its place among the visits."""
        self.visits.append((u, use))
        self.ends.append(len(self.visits))
        self.open.append(len(self.visits) - 1)
        return self.open[-1]

    def close(self, u: int, use: Use) -> int:
        """The innermost open visit of this use ends."""
        visit = innermost(self.open, self.visits, (u, use))
        self.ends[visit] = len(self.visits)
        return visit

    def outlived(self) -> bool:
        """Whether a backward pass of it may come, now that another pass begins."""
        self.graph = None
        return self._reference() is not None


class BackwardSchedule:
    """The steps of the backward pass through some forward passes, of which `visits` are here numbered as one."""

    def __init__(self, passes: Sequence[ForwardPass]) -> None:
        """Autograd runs what was recorded last first.

        When it enters a visit, all that began after that visit had ended is over; when it leaves a visit, all that
        began with or after it is.
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
        """(whether it leaves the visit or enters it, visit)."""
        self.done = 0
        """Steps that have been taken."""
        self.open: list[int] = []
        """Visits that are computed again."""
        self.first = {u: v for v, (u, _) in reversed(list(enumerate(self.visits)))}
        """The first visit of every unit: when it has been left, the unit's gradients are complete."""
        self._entry = {v: i for i, (leaves, v) in enumerate(self.steps) if not leaves}
        self._exit = {v: i for i, (leaves, v) in enumerate(self.steps) if leaves}
        self._of_use: dict[Visit, list[int]] = {}
        for v, visit in enumerate(self.visits):
            self._of_use.setdefault(visit, []).append(v)
        self.coming: list[int | None] = [None] * len(self.steps)
        """After each step: the visit that is entered next."""
        for i in reversed(range(len(self.steps) - 1)):
            leaves, v = self.steps[i + 1]
            self.coming[i] = self.coming[i + 1] if leaves else v
        self.rests = self._rests()
        """After each step: whether it leaves a unit that is neither inside another visit nor entered next."""

    def entering(self, visit: int) -> int:
        """How many steps have been taken when the backward pass enters `visit`."""
        return self._entry[visit] + 1

    def leaving(self, visit: int) -> int:
        """How many have been when it leaves `visit`, and so enters what ended just before that began."""
        stop = self._exit[visit] + 1
        while stop < len(self.steps) and not self.steps[stop][0] and self._ends[self.steps[stop][1]] == visit:
            stop += 1
        return stop

    def _rests(self) -> list[bool]:
        inside: Counter[int] = Counter()
        found = []
        for (leaves, v), coming in zip(self.steps, self.coming, strict=True):
            u = self.visits[v][0]
            inside[u] += -1 if leaves else 1
            found.append(leaves and not inside[u] and (coming is None or self.visits[coming][0] != u))
        return found

    def recompute(self, u: int, use: Use) -> bool:
        """Note that a visit is computed again: the last one of this use that has not been left, if there is one."""
        visits = self._of_use.get((u, use), [])
        while visits and self._exit[visits[-1]] < self.done:
            visits.pop()
        self.open += visits[-1:]
        return bool(visits)

    def close(self, u: int, use: Use) -> int:
        """The innermost of the visits that are computed again ends."""
        return innermost(self.open, self.visits, (u, use))


def innermost(open_visits: list[int], visits: Sequence[Visit], visit: Visit) -> int:
    """Take `visit` off the stack, and what is above it: an error, or the end of a recomputation, broke it off."""
    while open_visits:
        if visits[number := open_visits.pop()] == visit:
            return number
    raise RuntimeError(
        "under zero = 3 the wrapped module must not call itself in its forward pass; call a method that has the "
        "modules inside it work, or use zero = 2"
    )
