"""ZeRO stage 3, P_os+g+p: parameters exist in full only around their use (1910.02054 sec. 5.3, 7.2.2).

In forward and backward, hooks gather a gather unit (usually a transformer block) before its use, begin to gather the
next unit, and free the unit after its use. The forward pass expects the order of the previous forward pass, and the
backward pass follows a schedule that forward passes record (`repro.parallel.zero.backward_schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repro.parallel import storage
from repro.parallel.comm import Work
from repro.parallel.zero.backward_schedule import BackwardSchedule, ForwardPass, GradOnlyBackward, tensors_in
from repro.parallel.zero.flat_parameters import FlatParameters, exceed_reuse_distance
from repro.parallel.zero.partition import GatherUnit, ModuleUse
from repro.parallel.zero.stage3_checks import FreedParameterGuard, UnitAgreement


class ParameterUnsharder:
    """Gather and free the parameters of a module's gather units in forward and backward passes.

    `buckets[unit]` are the unit's flat buffers: one for each dtype, and separate buffers for frozen parameters. The
    unsharder calls `complete` with every flat buffer whose gradients are complete.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[GatherUnit],
        buckets: Sequence[Sequence[FlatParameters]],
        complete: Callable[[FlatParameters], None],
        grad_only_backward: GradOnlyBackward,
        *,
        ahead: bool = True,
    ):
        """Install the hooks. `ahead`: prefetch the next block (gather unit) during computation, not only at its use."""
        self._ahead = ahead
        self._module, self._grad_only_backward = module, grad_only_backward
        self.units, self.buckets = list(units), [list(group) for group in buckets]
        self._complete = complete
        self._gathered_twice = [_gathered_twice(group) for group in self.buckets]
        """Flat buffers of each gather unit (block) that are freed after recomputation and gathered for its backward."""
        self._works: dict[int, list[Work]] = {}
        self._forward = ForwardPass(False)
        """Recorded module calls of the forward pass that runs at present, or that ran last."""
        self._recorded: list[ForwardPass] = []
        """Recorded forward passes through whose autograd graphs a backward pass runs or can still run."""
        self._schedule: BackwardSchedule | None = None
        """Order of module calls in the running backward pass; None outside backward passes."""
        self.retains_units = False
        """Whether parameters remain gathered for a later backward pass after one that computed only input gradients."""
        self._agreement: UnitAgreement | None = None
        self._guards: list[FreedParameterGuard] = []
        self._handles: list[Any] = []
        names = dict(module.named_modules())
        order = {name: i for i, name in enumerate(names)}
        uses = [(u, use) for u, unit in enumerate(self.units) for use in unit.uses]
        self._expected = sorted(uses, key=lambda entry: order[entry[1].module])
        """Expected module calls: those of the previous forward pass; initially, all modules as declared, once each."""
        for u, use in reversed(uses):
            target = names[use.module]
            # The gather hook runs before the pre-hooks of users, which may read the parameters (`weight_norm`).
            before = target.register_forward_pre_hook(self._before(u, use), prepend=True, with_kwargs=True)
            self._handles.append(before)
        for u, use in uses:
            target = names[use.module]
            self._handles.append(target.register_forward_hook(self._after(u, use)))

    def enable_checks(self, agreement: UnitAgreement) -> None:
        """Enable errors for reads of freed parameters in a user's module, and for ranks that gather different units."""
        self._agreement = agreement
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
                before, after = self._hooks_outside_uses(own)
                self._handles.append(module.register_forward_pre_hook(before, prepend=True))
                self._handles.append(module.register_forward_hook(after))
                self._handles.append(module.register_forward_hook(self._inside_visit))
        self._guards = [
            FreedParameterGuard(p for bucket in buckets for p in bucket.parameters)
            for buckets in self.buckets
        ]

    def remove(self) -> None:
        """Remove the hooks that gather and free parameters from the module."""
        for handle in self._handles:
            handle.remove()

    def is_gathered(self, u: int) -> bool:
        """Return whether the parameters of unit `u` (such as a block) are gathered, or their gather has started."""
        return not any(storage.is_released(bucket.full) for bucket in self.buckets[u])

    def start_gather(self, u: int) -> None:
        """Start the all-gather of the parameters of gather unit `u` (such as a block), unless it has started."""
        if self.buckets[u] and not self.is_gathered(u):
            self._works[u] = []
            if self._agreement is not None and self._schedule is None:
                self._works[u].append(self._agreement.compare(u))
            with torch.no_grad():
                for bucket in self.buckets[u]:
                    if storage.is_released(bucket.full):
                        self._works[u].append(work := bucket.gather())
                        if not self._ahead:
                            work.wait()

    def gather(self, u: int) -> None:
        """Gather the parameters of unit `u` (such as a block): start the all-gather if necessary, and await its end."""
        self.start_gather(u)
        if u not in self._works:
            return
        for work in self._works.pop(u):
            work.wait()
        if self._guards:
            self._guards[u].allow_reads()

    def free(self, u: int) -> None:
        """Free the full parameters of gather unit `u` (such as a block), after waiting for their running gather."""
        self._free(u, self.buckets[u])

    def _free(self, u: int, buckets: Sequence[FlatParameters]) -> None:
        for work in self._works.pop(u, []):
            work.wait()
        if self._guards:
            self._guards[u].refuse_reads()
        for bucket in buckets:
            storage.release(bucket.full)

    def free_all(self) -> None:
        """Free the full parameters of all blocks and other gather units."""
        self.retains_units = False
        for u in range(len(self.units)):
            self.free(u)

    def retain_units(self) -> None:
        """Gather all blocks (units) whose parameters autograd graphs reference, and retain them until `free_all`."""
        if not self.retains_units:
            self.retains_units = True
            for u in sorted({u for run in self._recorded for u, _ in run.visits}):
                self.gather(u)

    def _gather_again(self, u: int) -> None:
        with torch.no_grad():
            for bucket in self._gathered_twice[u]:
                storage.release(bucket.full)
                bucket.gather().wait()

    def _free_after_use(self, u: int) -> None:
        if not self.retains_units:
            training = self._forward.has_gradients
            self._free(u, [flat for flat in self.buckets[u] if not (flat.is_persistent and training)])

    def begin_forward(self) -> None:
        """Begin a forward pass, whose module calls are recorded for the gathers of backward, unless under `no_grad`."""
        if self._agreement is not None:
            self._agreement.wait()
        if self._forward.visits:
            self._expected = self._forward.visits
        if self._schedule is not None:  # An earlier backward pass failed and did not reset its schedule.
            self._recorded, self._schedule = [], None
        self._forward = ForwardPass(torch.is_grad_enabled())
        if self._forward.has_gradients:
            self._recorded = self._with_live_graphs()
            if self.retains_units and not self._recorded:
                self.free_all()
            self._recorded.append(self._forward)

    def _with_live_graphs(self) -> list[ForwardPass]:
        """Return the forward passes whose autograd graph exists on any rank, as backward gathers on all ranks."""
        if not self._recorded:
            return []
        alive = [run.has_live_graph() for run in self._recorded]
        if self._agreement is not None:
            alive = self._agreement.union(alive)
        return [run for run, is_alive in zip(self._recorded, alive, strict=True) if is_alive]

    def end_forward(self) -> None:
        """End a forward pass. The next forward pass raises `RuntimeError` if the ranks have used different modules."""
        if self._agreement is not None and self._schedule is None:
            self._agreement.end_forward([u for u, _ in self._forward.visits], self._forward.has_gradients)

    def _before(self, u: int, use: ModuleUse) -> Callable[..., None]:
        def gather(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.retains_units and torch._C._current_graph_task_id() != -1:
                return
            # The module runs inside backward: activation recomputation of a block.
            if self._schedule is not None:
                if not self._schedule.begin_recomputation(u, use):
                    raise RuntimeError(ONE_BACKWARD_PER_FORWARD)
                self.gather(u)
                return
            run = self._forward
            visit = run.begin_visit(u, use)
            self.gather(u)
            if self._ahead and visit + 1 < len(self._expected) and self._expected[visit] == (u, use):
                self.start_gather(self._expected[visit + 1][0])
            if run.has_gradients:
                self._on_gradients((args, kwargs), run, visit, BackwardSchedule.steps_until_exit)

        return gather

    def _after(self, u: int, use: ModuleUse) -> Callable[..., None]:
        def release(module: nn.Module, args: Any, output: Any) -> None:
            if self.retains_units and torch._C._current_graph_task_id() != -1:
                return
            run = self._forward
            if self._schedule is not None:
                run, visit = self._recomputed(self._schedule.end_recomputation(u, use))
                self._gather_again(u)
            else:
                visit = run.end_visit(u, use)
                if not self._is_used_next(u, use):
                    self._free_after_use(u)
            if torch.is_grad_enabled():
                self._on_gradients(output, run, visit, BackwardSchedule.steps_until_entry)

        return release

    def _recomputed(self, visit: int) -> tuple[ForwardPass, int]:
        """Return the forward pass that contains module call `visit` of the schedule, and the call's index in it."""
        run = next(run for run in reversed(self._recorded) if run.offset <= visit)
        return run, visit - run.offset

    def _inside_visit(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook the output of a submodule of a gathered block, as backward may reach it before the block's output."""
        if not torch.is_grad_enabled() or (self.retains_units and torch._C._current_graph_task_id() != -1):
            return
        if self._schedule is not None:
            if self._schedule.open_visits:
                run, visit = self._recomputed(self._schedule.open_visits[-1])
                self._on_gradients(output, run, visit, BackwardSchedule.steps_until_entry)
        elif self._forward.open_visits:
            self._on_gradients(
                output, self._forward, self._forward.open_visits[-1], BackwardSchedule.steps_until_entry
            )

    def _hooks_outside_uses(self, units: Sequence[int]) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return hooks that gather and free `units` for an inner module's call outside the full module's forward."""
        gathered: list[int] = []

        def gather(module: nn.Module, args: Any) -> None:
            if self._forward.open_visits or self._schedule is not None or torch.is_grad_enabled():
                return
            gathered[:] = [u for u in units if u in self._works or not self.is_gathered(u)]
            for u in gathered:
                self.gather(u)

        def free(module: nn.Module, args: Any, output: Any) -> None:
            while gathered:
                self._free_after_use(gathered.pop())

        return gather, free

    def _is_used_next(self, u: int, use: ModuleUse) -> bool:
        """Return whether gather unit `u` remains in use: in an unfinished or the next module call, or in backward."""
        if any(self._forward.visits[v][0] == u for v in self._forward.open_visits):
            return True
        position = len(self._forward.visits)
        if use.module and position < len(self._expected):
            return self._expected[position][0] == u
        return torch.is_grad_enabled()

    def finish_backward(self) -> None:
        """End a backward pass: run the remaining steps of its schedule, whose gathers other ranks may have started."""
        if self._recorded:
            schedule = self._current_schedule()
            self._take(schedule, len(schedule.steps))
        self.retains_units = False
        for u in range(len(self.units)):
            self._free_after_use(u)
        self._recorded, self._schedule = [], None

    def _on_gradients(
        self, values: Any, run: ForwardPass, visit: int, steps: Callable[[BackwardSchedule, int], int]
    ) -> None:
        """Register hooks that gather and free parameters during backward when a tensor in `values` gets its gradient.

        Leaf tensors get no hook, because their gradients do not arrive in the reverse order of the forward pass.
        """
        graph = run.graph

        def advance(gradient: Tensor, graph: object = graph) -> None:
            if run not in self._recorded:
                raise RuntimeError(ONE_BACKWARD_PER_FORWARD)
            if self._grad_only_backward.is_running():
                self.retain_units()
                return
            schedule = self._current_schedule()
            self._take(schedule, steps(schedule, run.offset + visit))

        for tensor in tensors_in(values, attributes=steps is BackwardSchedule.steps_until_entry):
            if tensor.grad_fn is not None:
                tensor.register_hook(advance)

    def _current_schedule(self) -> BackwardSchedule:
        """Return the order of module calls in the running backward pass, which its first call here builds."""
        if self._schedule is None:
            if self._agreement is not None:
                self._agreement.wait()
            self._schedule = BackwardSchedule(self._recorded)
            for u in range(len(self.units)):
                if u not in self._schedule.first_visit:
                    self._leave(u)
        return self._schedule

    def _take(self, schedule: BackwardSchedule, stop: int) -> None:
        """Gather and free parameters at the next entries and exits of module calls in backward, up to number `stop`."""
        while schedule.steps_taken < stop:
            step = schedule.steps_taken
            leaves, visit = schedule.steps[step]
            schedule.steps_taken += 1
            u, use = schedule.visits[visit]
            if leaves:
                if schedule.first_visit[u] == visit:
                    self._leave(u)
                elif schedule.frees_unit[step]:
                    self._free_after_use(u)
                continue
            if use.is_read_in_backward:
                self.gather(u)
            following = schedule.next_entry[step]
            if self._ahead and following is not None and schedule.visits[following][1].is_read_in_backward:
                self.start_gather(schedule.visits[following][0])

    def _leave(self, u: int) -> None:
        """Free gather unit `u` (such as a block) after its last use in backward, and report complete gradients."""
        self._free_after_use(u)
        for bucket in self.buckets[u]:
            self._complete(bucket)


def _gathered_twice(buckets: Sequence[FlatParameters]) -> list[FlatParameters]:
    single = [flat for flat in buckets if flat.has_part_lists and not flat.is_persistent]
    exceeding = exceed_reuse_distance([flat.plan.numel for flat in single])
    return [flat for flat, exceeds in zip(single, exceeding, strict=True) if exceeds][::-1]


ONE_BACKWARD_PER_FORWARD = (
    "A backward pass through an earlier forward pass, or through a module that the last passes did not use, is "
    "not supported under zero = 3. Sum the losses for one backward pass."
)
