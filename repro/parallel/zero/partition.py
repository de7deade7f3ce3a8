"""Partition of a module: modules into gather units, parameters into buckets, buckets into equal shards.

Under stage 3 the parameters of a gather unit are gathered together, as those of an FSDP unit. Usually a unit is one
transformer block. A bucket is a sequence of parameters in one flat buffer, padded so that each of `n` ranks owns an
equal shard (1910.02054 sec. 5.1: "equal partitions"). Sizes are numbers of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

Tag = TypeVar("Tag")

ALIGNMENT = 8
"""Divisor of shard sizes, in elements. A shard of 16-bit elements then starts on a 16-byte boundary."""


@dataclass(frozen=True)
class ModuleUse:
    """Module whose forward uses the parameters of a gather unit (parameters that ZeRO stage 3 gathers together)."""

    module: str
    """Name of the submodule whose forward uses the parameters; empty for the wrapped module itself."""
    is_read_in_backward: bool = True
    """Whether the module's backward reads the parameters, which an embedding's backward does not."""


@dataclass(frozen=True)
class GatherUnit:
    """Parameters that ZeRO stage 3 gathers together: those in the modules of `uses`, without those of earlier units."""

    name: str
    uses: tuple[ModuleUse, ...]


@dataclass(frozen=True)
class ParameterSlot(Generic[Tag]):
    """Range of elements (`start` to `stop`) that one parameter occupies in a bucket's flat buffer."""

    index: int
    """Index of the parameter in the list of parameters that are partitioned into buckets."""
    start: int
    stop: int
    tag: Tag
    """Properties of the parameter (optimizer group, tp duplicate); shards are divided into ranges of equal tags."""


@dataclass(frozen=True)
class BucketPlan(Generic[Tag]):
    """Ranges of all parameters in one bucket (flat buffer), which is divided into equal shards over `n` ranks."""

    slots: tuple[ParameterSlot[Tag], ...]
    n: int

    @property
    def numel(self) -> int:
        """Return the number of elements of the bucket without padding."""
        return self.slots[-1].stop if self.slots else 0

    @property
    def padded(self) -> int:
        """Return the elements of the bucket with padding: `numel`, rounded up to a multiple of `n * ALIGNMENT`."""
        step = self.n * ALIGNMENT
        return -(-self.numel // step) * step

    @property
    def shard(self) -> int:
        """Return the number of elements of one rank's shard of the bucket, with padding."""
        return self.padded // self.n

    def ranges(self, rank: int) -> list[tuple[Tag, int, int]]:
        """Return the ranges (tag, start, stop) of parameters with equal properties (tag) in the rank's shard."""
        low, high = rank * self.shard, (rank + 1) * self.shard
        runs: list[tuple[Tag, int, int]] = []
        for slot in self.slots:
            start, stop = max(slot.start, low) - low, min(slot.stop, high) - low
            if start >= stop:
                continue
            if runs and runs[-1][0] == slot.tag and runs[-1][2] == start:
                runs[-1] = (slot.tag, runs[-1][1], stop)
            else:
                runs.append((slot.tag, start, stop))
        return runs

    def pieces(self, rank: int) -> list[tuple[int, int, int, int]]:
        """Return the parameters of a rank's shard as (index, first element, last element + 1, offset in the shard)."""
        low, high = rank * self.shard, (rank + 1) * self.shard
        found = []
        for slot in self.slots:
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                found.append((slot.index, start - slot.start, stop - slot.start, start - low))
        return found


def plan_bucket(sizes: Iterable[tuple[int, int, Tag]], n: int) -> BucketPlan[Tag]:
    """Return a bucket with the given parameters, each as (parameter index, number of elements, tag), in this order."""
    slots, start = [], 0
    for index, numel, tag in sizes:
        slots.append(ParameterSlot(index, start, start + numel, tag))
        start += numel
    return BucketPlan(tuple(slots), n)


def plan_buckets(sizes: Sequence[tuple[int, int, Tag]], n: int, bucket_numel: int) -> list[BucketPlan[Tag]]:
    """Divide parameters in order into buckets of at most `bucket_numel` elements, or of one larger parameter."""
    plans: list[BucketPlan[Tag]] = []
    current: list[tuple[int, int, Tag]] = []
    filled = 0
    for entry in sizes:
        if current and filled + entry[1] > bucket_numel:
            plans.append(plan_bucket(current, n))
            current, filled = [], 0
        current.append(entry)
        filled += entry[1]
    if current:
        plans.append(plan_bucket(current, n))
    return plans


def default_units(module: nn.Module, blocks: Sequence[str] | None = None) -> list[GatherUnit]:
    """Return the gather units of any torch module: one for each block, and one for all other parameters.

    `blocks` are names of submodules. Default: the children of every `nn.ModuleList`, or of every `nn.Sequential` if
    there is no list. A container without forward is replaced by its children.

    Raises: `ValueError` for an unknown name, and for a module without a forward of its own.
    """
    names = list(blocks) if blocks is not None else _children_of(module, nn.ModuleList)
    if not names:
        names = _children_of(module, nn.Sequential)
    known = dict(module.named_modules())
    for name in names:
        if name not in known:
            raise ValueError(
                f"blocks: {name!r} is no submodule. Use one of {', '.join(list(known)[1:9])}, ..."
            )
        if not has_forward(known[name]):
            kind = type(known[name]).__name__
            raise ValueError(f"blocks: {name!r}: {kind} has no forward. Name the modules inside it.")
    rest = GatherUnit("", (ModuleUse(""), *map(ModuleUse, _only_children(module))))
    return [*(GatherUnit(name, (ModuleUse(name),)) for name in names if name), rest]


def _only_children(module: nn.Module) -> list[str]:
    """Return the names of nested submodules, each its parent's only child, that a user may call instead of `module`."""
    found: list[str] = []
    while not module._parameters and len(children := list(module.named_children())) == 1:
        ((name, module),) = children
        if not has_forward(module):
            break  # A container without forward, such as `nn.ModuleList`, cannot be called.
        found.append(f"{found[-1]}.{name}" if found else name)
    return found


def has_forward(module: nn.Module) -> bool:
    """Return whether the module defines `forward`; hooks of containers without it (`nn.ModuleList`) never run."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _children_of(module: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Return the names of the outermost modules with a forward inside containers of class `kind`."""
    found: list[str] = []
    seen: set[int] = set()

    def descend(name: str, container: nn.Module) -> None:
        for child_name, child in container.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            inner = f"{name}.{child_name}" if name else child_name
            if has_forward(child):
                found.append(inner)
                seen.update(map(id, child.modules()))
            else:
                descend(inner, child)

    for name, container in module.named_modules():
        if isinstance(container, kind) and id(container) not in seen:
            descend(name, container)
    return found


def parameters_by_unit(module: nn.Module, units: Sequence[GatherUnit]) -> list[list[nn.Parameter]]:
    """Return the parameters of every gather unit (parameters that ZeRO stage 3 gathers together).

    A parameter that several blocks share belongs to the unit of the full module.

    Raises: `ValueError` if units share a parameter and no unit is the full module.
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
            raise ValueError(
                f"blocks {names} share a parameter. Add a module that contains all of these blocks to `blocks`."
            )
        owner = inner[0] if len(inner) == 1 else outer
        assert owner is not None
        found[owner].append(named[key])
    return found
