"""ZeRO stage 3, P_os+g+p: parameters exist in full only around their use (1910.02054 sec. 5.3, 7.2.2).

A *unit* (`repro.parallel.zero.units`) is gathered at once, usually one transformer block.  Hooks on its
modules gather it just before use, have the next one gathered meanwhile, and free it afterwards, in forward
and in backward.  The forward pass takes the order of use from the one before it; a use that comes unexpected
is gathered when it comes.  The backward pass follows a schedule that the forward passes leave
(`repro.parallel.zero.passes`), so that gathers and reductions come in one order on all ranks that use the
same modules, whatever happens in those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repro.parallel import storage
from repro.parallel.comm import Work
from repro.parallel.zero.by_parameter import reused_late
from repro.parallel.zero.flat_parameters import FlatParameters
from repro.parallel.zero.looks import Looks
from repro.parallel.zero.passed import tensors_in
from repro.parallel.zero.passes import BackwardSchedule, ForwardPass
from repro.parallel.zero.released import Guard
from repro.parallel.zero.same_units import SameUnits
from repro.parallel.zero.units import Unit, Use


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
        looks: Looks,
        *,
        ahead: bool = True,
    ):
        """`ahead`: gather the unit that is used next while one computes; else wait for each flat buffer in turn."""
        self._ahead = ahead
        self._module, self._looks = module, looks
        self.units, self.buckets = list(units), [list(group) for group in buckets]
        self._complete = complete
        self._twice = [_gathered_twice(group) for group in self.buckets]
        """Of each unit, what is gathered for a block's second forward pass and again for its backward pass."""
        self._works: dict[int, list[Work]] = {}
        self._forward = ForwardPass(False)
        """The forward pass that runs or ran last."""
        self._recorded: list[ForwardPass] = []
        """Those through which a backward pass runs or may come."""
        self._schedule: BackwardSchedule | None = None
        """Of the backward pass that runs."""
        self.held = False
        """Whether units stay whole, since a backward pass that only looked has made graphs which read them."""
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
        uses = {use.module for unit in self.units for use in unit.uses}
        unit_of = {
            id(p): u for u, flats in enumerate(self.buckets) for flat in flats for p in flat.parameters
        }
        for name, module in self._module.named_modules():
            own = sorted({unit_of[id(p)] for p in module._parameters.values() if id(p) in unit_of})
            if own and name not in uses:
                before, after = self._by_itself(own)
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))
                self._handles.append(module.register_forward_hook(after))
                self._handles.append(module.register_forward_hook(self._inside))
        self._guards = [Guard(p for bucket in buckets for p in bucket.parameters) for buckets in self.buckets]

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    # -- the life of one unit ----------------------------------------------------------------------

    def is_gathered(self, u: int) -> bool:
        """Whether the unit's parameters exist in full, or are on their way."""
        return not any(storage.is_released(bucket.full) for bucket in self.buckets[u])

    def start(self, u: int) -> None:
        """Begin to gather unit `u` unless that has begun."""
        if self.buckets[u] and not self.is_gathered(u):
            self._works[u] = []
            if self._same is not None and self._schedule is None:
                self._works[u].append(self._same.announce(u))
            with torch.no_grad():
                for bucket in self.buckets[u]:
                    if storage.is_released(bucket.full):
                        self._works[u].append(work := bucket.gather())
                        if not self._ahead:
                            work.wait()

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
        self._free(u, self.buckets[u])

    def _free(self, u: int, buckets: Sequence[FlatParameters]) -> None:
        for work in self._works.pop(u, []):
            work.wait()
        if self._guards:
            self._guards[u].close()
        for bucket in buckets:
            storage.release(bucket.full)

    def free_all(self) -> None:
        """Free the full parameters of all units."""
        self.held = False
        for u in range(len(self.units)):
            self.free(u)

    def hold(self) -> None:
        """Keep all units whole of which there are graphs, until `free_all`."""
        if not self.held:
            self.held = True
            for u in sorted({u for run in self._recorded for u, _ in run.visits}):
                self.need(u)

    def _gather_again(self, u: int) -> None:
        with torch.no_grad():
            for bucket in self._twice[u]:
                storage.release(bucket.full)
                bucket.gather().wait()

    def _rest(self, u: int) -> None:
        if not self.held:
            training = self._forward.gradients
            self._free(u, [bucket for bucket in self.buckets[u] if not (bucket.stays and training)])

    # -- forward -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new forward pass starts.  One without gradients leaves those of the next backward pass alone."""
        if self._same is not None:
            self._same.wait()
        if self._forward.visits:
            self._expected = self._forward.visits
        if self._schedule is not None:  # of a backward pass that failed
            self._recorded, self._schedule = [], None
        self._forward = ForwardPass(torch.is_grad_enabled())
        if self._forward.gradients:
            self._recorded = self._outlived()
            if self.held and not self._recorded:
                self.free_all()
            self._recorded.append(self._forward)

    def _outlived(self) -> list[ForwardPass]:
        """Forward passes whose graph is still there, on any rank: what is communicated for them is."""
        if not self._recorded:
            return []
        there = [run.outlived() for run in self._recorded]
        if self._same is not None:
            there = self._same.union(there)
        return [run for run, kept in zip(self._recorded, there, strict=True) if kept]

    def end(self) -> None:
        """A forward pass is over: the next, or its backward pass, finds out whether all ranks' used the same units."""
        if self._same is not None and self._schedule is None:
            self._same.end([u for u, _ in self._forward.visits], self._forward.gradients)

    def _before(self, u: int, use: Use) -> Callable[..., None]:
        def gather(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.held and torch._C._current_graph_task_id() != -1:
                return
            if self._schedule is not None:  # a block's forward runs inside the backward pass
                if not self._schedule.recompute(u, use):
                    raise RuntimeError(ONE_BACKWARD_PER_FORWARD)
                self.need(u)
                return
            run = self._forward
            visit = run.visit(u, use)
            self.need(u)
            if self._ahead and visit + 1 < len(self._expected) and self._expected[visit] == (u, use):
                self.start(self._expected[visit + 1][0])
            if run.gradients:
                self._on_gradients((args, kwargs), run, visit, BackwardSchedule.leaving)

        return gather

    def _after(self, u: int, use: Use) -> Callable[..., None]:
        def release(module: nn.Module, args: Any, output: Any) -> None:
            if self.held and torch._C._current_graph_task_id() != -1:
                return
            run = self._forward
            if self._schedule is not None:
                run, visit = self._recomputed(self._schedule.close(u, use))
                self._gather_again(u)
            else:
                visit = run.close(u, use)
                if not self._stays(u, use):
                    self._rest(u)
            if torch.is_grad_enabled():
                self._on_gradients(output, run, visit, BackwardSchedule.entering)

        return release

    def _recomputed(self, visit: int) -> tuple[ForwardPass, int]:
        """The pass to which one of the schedule's visits belongs, and its number there."""
        run = next(run for run in reversed(self._recorded) if run.offset <= visit)
        return run, visit - run.offset

    def _inside(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module with parameters ran inside a visit.  The backward pass may come here before the visit's output.

        That is so where a block keeps something beside its output that becomes part of the loss.
        """
        if not torch.is_grad_enabled() or (self.held and torch._C._current_graph_task_id() != -1):
            return
        if self._schedule is not None:
            if self._schedule.open:
                run, visit = self._recomputed(self._schedule.open[-1])
                self._on_gradients(output, run, visit, BackwardSchedule.entering)
        elif self._forward.open:
            self._on_gradients(output, self._forward, self._forward.open[-1], BackwardSchedule.entering)

    def _by_itself(self, units: Sequence[int]) -> tuple[Callable[..., None], Callable[..., None]]:
        """Hooks for a module that has parameters of these units, and is called outside all uses, to look at its output.

        Parts of a module are used so between its passes: an encoder, by what generates text from it.
        """
        mine: list[int] = []

        def gather(module: nn.Module, args: Any) -> None:
            if self._forward.open or self._schedule is not None or torch.is_grad_enabled():
                return
            mine[:] = [u for u in units if u in self._works or not self.is_gathered(u)]
            for u in mine:
                self.need(u)

        def free(module: nn.Module, args: Any, output: Any) -> None:
            while mine:
                self._rest(mine.pop())

        return gather, free

    def _stays(self, u: int, use: Use) -> bool:
        """Whether the unit is used again at once: by the next module, or because backward starts with it; or still."""
        if any(self._forward.visits[v][0] == u for v in self._forward.open):
            return True
        position = len(self._forward.visits)
        if use.module and position < len(self._expected):
            return self._expected[position][0] == u
        return torch.is_grad_enabled()

    # -- backward ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """The backward pass is over; steps that it did not come by are taken now, as other ranks took them."""
        if self._recorded:
            schedule = self._turn()
            self._take(schedule, len(schedule.steps))
        self.held = False
        for u in range(len(self.units)):
            self._rest(u)
        self._recorded, self._schedule = [], None

    def _on_gradients(
        self, values: Any, run: ForwardPass, visit: int, steps: Callable[[BackwardSchedule, int], int]
    ) -> None:
        """Take the schedule's steps when the gradient of a tensor among `values` is complete.

        Leaves do not count: their gradients come at once, not in the reverse order of the forward pass.
        """
        graph = run.graph

        def advance(gradient: Tensor, graph: object = graph) -> None:
            if run not in self._recorded:
                raise RuntimeError(ONE_BACKWARD_PER_FORWARD)
            if self._looks.now():
                self.hold()
                return
            schedule = self._turn()
            self._take(schedule, steps(schedule, run.offset + visit))

        for tensor in tensors_in(values, attributes=steps is BackwardSchedule.entering):
            if tensor.grad_fn is not None:
                tensor.register_hook(advance)

    def _turn(self) -> BackwardSchedule:
        """The schedule of the backward pass, which may begin now."""
        if self._schedule is None:
            if self._same is not None:
                self._same.wait()
            self._schedule = BackwardSchedule(self._recorded)
            for u in range(len(self.units)):
                if u not in self._schedule.first:
                    self._leave(u)
        return self._schedule

    def _take(self, schedule: BackwardSchedule, stop: int) -> None:
        """Take the schedule's steps up to `stop`: what is communicated depends on nothing else."""
        while schedule.done < stop:
            step = schedule.done
            leaves, visit = schedule.steps[step]
            schedule.done += 1
            u, use = schedule.visits[visit]
            if leaves:
                if schedule.first[u] == visit:
                    self._leave(u)
                elif schedule.rests[step]:
                    self._rest(u)
                continue
            if use.backward:
                self.need(u)
            coming = schedule.coming[step]
            if self._ahead and coming is not None and schedule.visits[coming][1].backward:
                self.start(schedule.visits[coming][0])

    def _leave(self, u: int) -> None:
        """Nothing in this backward pass reads unit `u` any more, nor makes gradients of it."""
        self._rest(u)
        for bucket in self.buckets[u]:
            self._complete(bucket)


def _gathered_twice(buckets: Sequence[FlatParameters]) -> list[FlatParameters]:
    alone = [bucket for bucket in buckets if bucket.in_parts and not bucket.stays]
    late = reused_late([bucket.plan.numel for bucket in alone])
    return [bucket for bucket, again in zip(alone, late, strict=True) if again][::-1]


ONE_BACKWARD_PER_FORWARD = (
    "under zero = 3 a backward pass runs once through the forward passes since the last one: this one goes through an "
    "earlier forward pass, or calls a module that they did not use; sum the losses for one backward pass"
)
