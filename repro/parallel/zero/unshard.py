"""ZeRO stage 3, P_os+g+p: parameters exist in full only around their use (1910.02054 sec. 5.3, 7.2.2).

A *unit* (`repro.parallel.zero.units`) is gathered at once, usually one transformer block.  Hooks on its
modules gather it just before use, have the next one gathered meanwhile, and free it afterwards, in forward
and in backward.  The forward pass takes the order of use from the one before it; a use that comes unexpected
is gathered when it comes.  The backward pass follows a schedule that the forward pass leaves
(`ForwardPass`), so that gathers and reductions come in one order on all ranks that use the same
modules, whatever happens in those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from repro.parallel import storage
from repro.parallel.comm import Work
from repro.parallel.zero.flat_parameters import FlatParameters
from repro.parallel.zero.passed import tensors_in
from repro.parallel.zero.released import Guard
from repro.parallel.zero.same_units import SameUnits
from repro.parallel.zero.units import Unit, Use


class ForwardPass:
    """The uses of units in one forward pass, and the schedule that they make for the backward pass."""

    def __init__(self) -> None:
        self.visits: list[tuple[int, Use]] = []
        """Uses of units, in the order in which they began."""
        self.ends: list[int] = []
        """How many visits had begun when each ended; a visit may contain others."""
        self.open: list[int] = []
        """Visits whose forward, or whose recomputation, runs."""
        self.steps: list[tuple[bool, int]] = []
        """The backward schedule: (whether it leaves the visit or enters it, visit)."""
        self.done = 0
        """Steps that have been taken."""

    def visit(self, u: int, use: Use) -> int:
        """Note that a use begins; returns its place among the visits."""
        self.visits.append((u, use))
        self.ends.append(len(self.visits))
        return len(self.visits) - 1

    def close(self, u: int, use: Use) -> int:
        """The innermost open visit of this use ends (recomputation may have broken off others)."""
        while self.visits[visit := self.open.pop()] != (u, use):
            pass
        return visit

    def turn(self) -> None:
        """Make the backward schedule.

        Autograd runs what was recorded last first.  When it enters a visit, all that began after that visit
        had ended is over; when it leaves a visit, all that began with or after it is.
        """
        steps = [(end, False, v) for v, end in enumerate(self.ends)]
        steps += [(v, True, v) for v in range(len(self.visits))]
        self.steps = [step[1:] for step in sorted(steps, key=lambda s: (-s[0], not s[1], s[2]))]
        self.first = {u: v for v, (u, _) in reversed(list(enumerate(self.visits)))}
        """The first visit of every unit: when it has been left, the unit's gradients are complete."""
        self._entry = {v: i for i, (leaves, v) in enumerate(self.steps) if not leaves}
        self._exit = {v: i for i, (leaves, v) in enumerate(self.steps) if leaves}

    def entering(self, visit: int) -> int:
        """How many steps have been taken when the backward pass enters `visit`."""
        return self._entry[visit] + 1

    def leaving(self, visit: int) -> int:
        """How many have been when it leaves `visit`, and so enters what ended just before that began."""
        stop = self._exit[visit] + 1
        while stop < len(self.steps) and not self.steps[stop][0] and self.ends[self.steps[stop][1]] == visit:
            stop += 1
        return stop

    def recomputed(self, u: int, use: Use) -> int | None:
        """The visit that is computed again, or a later one of the same use; None if there is none."""
        visits = [
            v for v, visit in enumerate(self.visits) if visit == (u, use) and self._exit[v] >= self.done
        ]
        return max(visits, default=None)


class ParameterUnsharder:
    """Gathers and frees the units of one module.

    `buckets[unit]` are the unit's flat buffers (one a dtype, and frozen parameters apart); `complete` is told of
    each that no gradient of it comes any more.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[Unit],
        buckets: Sequence[Sequence[FlatParameters]],
        complete: Callable[[FlatParameters], None],
    ):
        self.units, self.buckets = list(units), [list(group) for group in buckets]
        self._complete = complete
        self._works: dict[int, list[Work]] = {}
        self._forward = ForwardPass()
        """The forward pass that runs or ran last."""
        self._trained: ForwardPass | None = None
        """The one whose backward pass runs or comes next."""
        self._backward = False
        self._same: SameUnits | None = None
        self._guards: list[Guard] = []
        self._handles: list[Any] = []
        names = dict(module.named_modules())
        order = {name: i for i, name in enumerate(names)}
        uses = [(u, use) for u, unit in enumerate(self.units) for use in unit.uses]
        self._expected = sorted(uses, key=lambda entry: order[entry[1].module])
        """Uses in the last forward pass; before the first, in the order in which modules were declared."""
        for u, use in reversed(uses):
            target = names[use.module]
            # Before pre-hooks that others registered, which may read the parameters (`weight_norm`).
            before = target.register_forward_pre_hook(self._before(u, use), prepend=True, with_kwargs=True)
            self._handles.append(before)
        for u, use in uses:
            target = names[use.module]
            self._handles.append(target.register_forward_hook(self._after(u, use)))

    def distrust(self, same: SameUnits) -> None:
        """For a module of somebody else's: refuse reads of what is released, and ranks that gather different units."""
        self._same = same
        for u, buckets in enumerate(self.buckets):
            for bucket in buckets:
                bucket.group = bucket.group.on_channel(1 + u)
        self._guards = [Guard(p for bucket in buckets for p in bucket.parameters) for buckets in self.buckets]

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    # -- the life of one unit ----------------------------------------------------------------------

    def is_gathered(self, u: int) -> bool:
        """Whether the unit's parameters exist in full, or are on their way."""
        return any(not storage.is_released(bucket.full) for bucket in self.buckets[u])

    def start(self, u: int) -> None:
        """Begin to gather unit `u` unless that has begun."""
        if self.buckets[u] and not self.is_gathered(u):
            self._works[u] = []
            if self._same is not None and not self._backward:
                self._works[u].append(self._same.announce(u))
            with torch.no_grad():
                self._works[u] += [bucket.gather() for bucket in self.buckets[u]]

    def need(self, u: int) -> None:
        """Wait until the full parameters of unit `u` are there: gathered ahead by `start`, or only now."""
        self.start(u)
        if u not in self._works:
            return
        for work in self._works.pop(u):
            work.wait()
        if self._guards:
            self._guards[u].open()

    def free(self, u: int) -> None:
        """Free the full parameters of unit `u`, after the gather if one is under way: it writes there."""
        for work in self._works.pop(u, []):
            work.wait()
        if self._guards:
            self._guards[u].close()
        for bucket in self.buckets[u]:
            storage.release(bucket.full)

    def free_all(self) -> None:
        """Free the full parameters of all units."""
        for u in range(len(self.units)):
            self.free(u)

    # -- forward -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new forward pass starts.  One without gradients leaves that of the next backward pass alone."""
        if self._same is not None:
            self._same.wait()
        if self._forward.visits:
            self._expected = self._forward.visits
        self._forward = ForwardPass()
        if torch.is_grad_enabled():
            self._trained = self._forward
        self._backward = False

    def end(self) -> None:
        """A forward pass is over: the next, or its backward pass, finds out whether all ranks' used the same units."""
        if self._same is not None and not self._backward:
            self._same.end([u for u, _ in self._forward.visits], self._forward is self._trained)

    def _before(self, u: int, use: Use) -> Callable[..., None]:
        def gather(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._backward:
                self._recompute(u, use)
                return
            run = self._forward
            visit = run.visit(u, use)
            run.open.append(visit)
            self.need(u)
            if visit + 1 < len(self._expected) and self._expected[visit] == (u, use):
                self.start(self._expected[visit + 1][0])
            if run is self._trained:
                _on_gradients((args, kwargs), lambda: self._advance(run, run.leaving, visit))

        return gather

    def _after(self, u: int, use: Use) -> Callable[..., None]:
        def release(module: nn.Module, args: Any, output: Any) -> None:
            run = self._trained if self._backward else self._forward
            assert run is not None
            visit = run.close(u, use)
            if not self._backward:
                run.ends[visit] = len(run.visits)
                if not self._stays(u, use):
                    self.free(u)
            if torch.is_grad_enabled():
                _on_gradients(output, lambda: self._advance(run, run.entering, visit))

        return release

    def _stays(self, u: int, use: Use) -> bool:
        """Whether the unit is used again at once: by the next module, or because backward starts with it."""
        position = len(self._forward.visits)
        if use.module and position < len(self._expected):
            return self._expected[position][0] == u
        return torch.is_grad_enabled()

    # -- backward ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """The backward pass is over; steps that it did not come by are taken now, as other ranks took them."""
        if self._trained is not None:
            self._turn(self._trained)
            self._take(self._trained, len(self._trained.steps))
        self.free_all()
        self._trained = None
        self._backward = False

    def _recompute(self, u: int, use: Use) -> None:
        """A block's forward runs inside the backward pass."""
        run = self._trained
        visit = None if run is None else run.recomputed(u, use)
        if run is None or visit is None:
            raise RuntimeError(ONE_BACKWARD_PER_FORWARD)
        run.open.append(visit)
        self.need(u)

    def _advance(self, run: ForwardPass, steps: Callable[[int], int], visit: int) -> None:
        """The backward pass of `run` enters or leaves a visit."""
        if run is not self._trained:
            raise RuntimeError(ONE_BACKWARD_PER_FORWARD)
        self._turn(run)
        self._take(run, steps(visit))

    def _turn(self, run: ForwardPass) -> None:
        if self._backward:
            return
        if self._same is not None:
            self._same.wait()
        self._backward = True
        run.open.clear()
        run.turn()
        for u in range(len(self.units)):
            if u not in run.first:
                self._leave(u)

    def _take(self, run: ForwardPass, stop: int) -> None:
        """Take the schedule's steps up to `stop`: what is communicated depends on nothing else."""
        while run.done < stop:
            leaves, visit = run.steps[run.done]
            run.done += 1
            u, use = run.visits[visit]
            if leaves:
                if use.free_early:
                    self.free(u)
                if run.first[u] == visit:
                    self._leave(u)
                continue
            if use.backward:
                self.need(u)
            coming = next((v for leaves, v in run.steps[run.done :] if not leaves), None)
            if coming is not None and run.visits[coming][1].backward:
                self.start(run.visits[coming][0])

    def _leave(self, u: int) -> None:
        """Nothing in this backward pass reads unit `u` any more, nor makes gradients of it."""
        self.free(u)
        for bucket in self.buckets[u]:
            self._complete(bucket)


ONE_BACKWARD_PER_FORWARD = (
    "under zero = 3 every forward pass with gradients needs its own backward pass before the next one: "
    "this backward pass belongs to an earlier forward pass, or is its second one"
)


def _on_gradients(values: Any, call: Callable[[], None]) -> None:
    """Call when the gradient of a tensor among `values` is complete.

    Leaves do not count: their gradients come at once, not in the reverse order of the forward pass.
    """
    for tensor in tensors_in(values):
        if tensor.grad_fn is not None:
            tensor.register_hook(lambda gradient: call())
