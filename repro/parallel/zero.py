"""ZeRO stage 3, P_os+g+p: parameters exist in full only around their use (1910.02054 sec. 5.3, 7.2.2).

A *unit* is what is gathered at once, usually one transformer block.  Hooks on its modules gather it just
before use, have the next one gathered meanwhile, and free it afterwards, in forward and in backward.  The
order of use is taken from the last forward pass; a use that comes unexpected is gathered when it comes.

Any ``nn.Module`` whose blocks have names can be sharded: hooks see modules, not a particular model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from repro.parallel import storage
from repro.parallel.bucket import Bucket
from repro.parallel.comm import Work


@dataclass(frozen=True)
class Use:
    """One module whose forward uses a unit's parameters."""

    module: str
    """The submodule's name; empty for the module itself."""
    backward: bool = True
    """Whether its backward reads the parameters (an embedding's does not)."""
    free_early: bool = False
    """Free the parameters once the next module's backward begins, although their gradients are not
    complete (a tied head: the embedding's part comes last)."""


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together: those of ``uses``' modules that no earlier unit has."""

    name: str
    uses: tuple[Use, ...]


def default_units(module: nn.Module, blocks: Sequence[str] | None = None) -> list[Unit]:
    """Units of a stock module: the whole for what is outside blocks, and one per block.

    ``blocks`` are submodule names; by default the children of every ``nn.ModuleList`` (and of
    ``nn.Sequential`` where there is no list).  Raises ``ValueError`` for a name that does not exist.
    """
    names = list(blocks) if blocks is not None else _children_of(module, nn.ModuleList)
    if not names:
        names = _children_of(module, nn.Sequential)
    known = dict(module.named_modules())
    for name in names:
        if name not in known:
            raise ValueError(
                f"blocks: {name!r}: not a submodule; known are {', '.join(list(known)[1:9])}, ..."
            )
    return [*(Unit(name, (Use(name),)) for name in names if name), Unit("", (Use(""),))]


def _children_of(module: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Names of the children of every container of ``kind`` that is not inside another one."""
    found: list[str] = []
    for name, container in module.named_modules():
        if isinstance(container, kind) and not any(name.startswith(f"{outer}.") for outer in found):
            found += [f"{name}.{child}" if name else child for child, _ in container.named_children()]
    return found


def parameters_of(module: nn.Module, units: Sequence[Unit]) -> list[list[nn.Parameter]]:
    """The parameters of every unit.  What several units use belongs to the one around them all (``""``).

    Raises ``ValueError`` if units share a parameter and there is none around them.
    """
    modules = dict(module.named_modules())
    users: dict[int, list[int]] = {}
    named: dict[int, nn.Parameter] = {}
    outer = next((u for u, unit in enumerate(units) if unit.uses[0].module == ""), None)
    for u, unit in enumerate(units):
        for use in unit.uses:
            for parameter in modules[use.module].parameters():
                named[id(parameter)] = parameter
                mine = users.setdefault(id(parameter), [])
                if u not in mine:
                    mine.append(u)
    found: list[list[nn.Parameter]] = [[] for _ in units]
    for key, mine in users.items():
        inner = [u for u in mine if u != outer]
        if len(inner) > 1 and outer is None:
            names = ", ".join(units[u].name for u in inner)
            raise ValueError(f"units {names} share a parameter and no unit is around them")
        owner = inner[0] if len(inner) == 1 else outer
        assert owner is not None
        found[owner].append(named[key])
    return found


class ParameterGatherer:
    """Gathers and frees the units of one module.  ``buckets[unit]`` are the unit's buckets (one a dtype)."""

    def __init__(self, module: nn.Module, units: Sequence[Unit], buckets: Sequence[Sequence[Bucket]]):
        self.units, self.buckets = list(units), [list(group) for group in buckets]
        self._unit_of = {id(bucket): u for u, group in enumerate(self.buckets) for bucket in group}
        self._works: dict[int, list[Work]] = {}
        self._visits: list[tuple[int, Use]] = []
        """Uses of units in this forward pass, in order."""
        self._backward = False
        self._handles: list[Any] = []
        names = dict(module.named_modules())
        order = {name: i for i, name in enumerate(names)}
        uses = [(u, use) for u, unit in enumerate(self.units) for use in unit.uses]
        self._expected = sorted(uses, key=lambda entry: order[entry[1].module])
        """The same of the last forward pass; before the first, the order in which modules were declared."""
        for u, use in uses:
            target = names[use.module]
            self._handles.append(target.register_forward_pre_hook(self._before(u, use)))
            self._handles.append(target.register_forward_hook(self._after(u, use)))

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    # -- the life of one unit ----------------------------------------------------------------------

    def is_gathered(self, u: int) -> bool:
        """Whether the unit's parameters exist in full, or are on their way."""
        return any(not storage.is_released(bucket.full) for bucket in self.buckets[u])

    def start(self, u: int) -> None:
        """Begin to gather unit ``u`` unless that has begun."""
        if self.buckets[u] and not self.is_gathered(u):
            with torch.no_grad():
                self._works[u] = [bucket.gather() for bucket in self.buckets[u]]

    def need(self, u: int) -> None:
        """Have unit ``u`` complete."""
        self.start(u)
        for work in self._works.pop(u, []):
            work.wait()

    def free(self, u: int) -> None:
        """Free the full parameters of unit ``u``."""
        for work in self._works.pop(u, []):
            work.wait()
        for bucket in self.buckets[u]:
            storage.release(bucket.full)

    def complete(self, bucket: Bucket) -> None:
        """All gradients of ``bucket`` are there: nothing in this backward pass reads it any more."""
        u = self._unit_of[id(bucket)]
        for work in self._works.pop(u, []):
            work.wait()
        storage.release(bucket.full)

    # -- when it happens ---------------------------------------------------------------------------

    def begin(self) -> None:
        """A new forward pass starts."""
        if self._visits:
            self._expected = self._visits
        self._visits = []
        self._backward = False

    def finish(self) -> None:
        """The backward pass is over."""
        for u in range(len(self.units)):
            self.free(u)
        self._backward = False

    def _before(self, u: int, use: Use) -> Callable[..., None]:
        def gather(module: nn.Module, inputs: Any) -> None:
            if self._backward:
                # Recomputation: the block's forward runs inside the backward pass.
                self.need(u)
                self._on_gradient(self._last_visit(u, use))
                return
            position = len(self._visits)
            self._visits.append((u, use))
            self.need(u)
            if position + 1 < len(self._expected) and self._expected[position] == (u, use):
                self.start(self._expected[position + 1][0])

        return gather

    def _after(self, u: int, use: Use) -> Callable[..., None]:
        def release(module: nn.Module, inputs: Any, output: Any) -> None:
            position = self._last_visit(u, use)
            if not self._backward and not self._stays(u, use):
                self.free(u)
            if torch.is_grad_enabled():
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(lambda gradient: self._on_gradient(position))

        return release

    def _last_visit(self, u: int, use: Use) -> int:
        return max(i for i, visit in enumerate(self._visits) if visit == (u, use))

    def _stays(self, u: int, use: Use) -> bool:
        """Whether the unit is used again at once: by the next module, or because backward starts with it."""
        position = len(self._visits)
        if use.module and position < len(self._expected):
            return self._expected[position][0] == u
        return torch.is_grad_enabled()

    def _on_gradient(self, position: int) -> None:
        """The backward pass has reached the output of a use: its own backward comes next."""
        self._backward = True
        if position + 1 < len(self._visits):
            after, use = self._visits[position + 1]
            if use.free_early:
                self.free(after)
        u, use = self._visits[position]
        if use.backward:
            self.need(u)
        self._prefetch_backward(position)

    def _prefetch_backward(self, position: int) -> None:
        """Start on the unit whose backward comes after that of ``position``."""
        if position > 0:
            u, use = self._visits[position - 1]
            if use.backward:
                self.start(u)


class ParameterPublisher:
    """Stages 1 and 2: every rank gets the updated parameters while the next forward pass already runs.

    After the optimizer step all buckets are gathered, first layers first; a unit whose forward reads a
    bucket waits for that bucket only.  (A unit, not each module: some modules read a child's parameters
    without calling the child.)
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit], buckets: Sequence[Bucket]):
        self.buckets = list(buckets)[::-1]
        self._works: dict[int, Work] = {}
        bucket_of = {id(p): b for b, bucket in enumerate(self.buckets) for p in bucket.parameters}
        modules = dict(module.named_modules())
        self._handles = []
        for unit, parameters in zip(units, parameters_of(module, units), strict=True):
            needed = sorted({bucket_of[id(p)] for p in parameters if id(p) in bucket_of})
            for use in unit.uses:
                self._handles.append(modules[use.module].register_forward_pre_hook(self._before(needed)))

    def start(self) -> None:
        """Begin to gather every bucket's parameters."""
        with torch.no_grad():
            self._works = {b: bucket.gather() for b, bucket in enumerate(self.buckets)}

    def wait(self) -> None:
        """Have all parameters complete."""
        for b in list(self._works):
            self._works.pop(b).wait()

    def remove(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def _before(self, needed: list[int]) -> Callable[..., None]:
        def await_parameters(module: nn.Module, inputs: Any) -> None:
            if self._works:
                for b in needed:
                    work = self._works.pop(b, None)
                    if work is not None:
                        work.wait()

        return await_parameters
