"""Units: what of a module is gathered at once, usually one transformer block.

Any `nn.Module` whose blocks have names can be cut into units: hooks see modules, not a particular model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Use:
    """One module whose forward uses a unit's parameters."""

    module: str
    """The submodule's name; empty for the module itself."""
    backward: bool = True
    """Whether its backward reads the parameters (an embedding's does not)."""


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together: those of `uses`' modules that no earlier unit has."""

    name: str
    uses: tuple[Use, ...]


def default_units(module: nn.Module, blocks: Sequence[str] | None = None) -> list[Unit]:
    """Units of a stock module: the whole for what is outside blocks, and one per block.

    `blocks` are submodule names; by default the children of every `nn.ModuleList` (and of
    `nn.Sequential` where there is no list), or what is inside where these are bare containers.
    Raises `ValueError` for a name that does not exist, or of a module without a forward of its own.
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
        if not has_forward(known[name]):
            kind = type(known[name]).__name__
            raise ValueError(f"blocks: {name!r}: {kind} has no forward of its own; name modules inside it")
    whole = Unit("", (Use(""), *map(Use, _wrapped(module))))
    return [*(Unit(name, (Use(name),)) for name in names if name), whole]


def _wrapped(module: nn.Module) -> list[str]:
    """Names of modules that are all that the one around them has, which may call them by other ways (`generate`)."""
    found: list[str] = []
    while not module._parameters and len(children := list(module.named_children())) == 1:
        ((name, module),) = children
        if not has_forward(module):
            break  # a bare container of blocks
        found.append(f"{found[-1]}.{name}" if found else name)
    return found


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called; `nn.ModuleList` and other bare containers cannot, so no hook sees them."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _children_of(module: nn.Module, kind: type[nn.Module]) -> list[str]:
    """Names of what containers of `kind` hold: the nearest modules inside that have a forward of their own."""
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


def parameters_of(module: nn.Module, units: Sequence[Unit]) -> list[list[nn.Parameter]]:
    """The parameters of every unit.  What several units use belongs to the one around them all (`""`).

    Raises `ValueError` if units share a parameter and there is none around them.
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
