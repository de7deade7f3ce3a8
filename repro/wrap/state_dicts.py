"""State dicts of a wrapped module and its optimizer: complete in PyTorch's format, or only the shards of one rank."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from repro.parallel.comm import Group
from repro.parallel.zero.flat_buffer import Bucket
from repro.parallel.zero.flat_parameters import FlatParameters
from repro.parallel.zero.partition import GatherUnit, parameters_by_unit
from repro.parallel.zero.stages import ShardedModule


@dataclass(frozen=True)
class Shard:
    """Part of a parameter that this rank's optimizer updates: elements `first` to `last` - 1 of parameter `index`."""

    index: int
    first: int
    last: int
    parameter: Parameter
    gradient: Tensor
    """Gradient of this parameter shard, reduced over the ranks before the optimizer step."""


class OptimizerStates:
    """State dicts of the wrapped optimizer: of one rank, labelled with rank and layout, or complete for any layout."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, sharded: ShardedModule, shards: Sequence[Shard], host: Group
    ):
        """Cut existing states of `optimizer`, which still has the module's parameters, to this rank's shards."""
        self._optimizer, self._sharded, self._shards, self._host = optimizer, sharded, shards, host
        index = {id(p): i for i, p in enumerate(sharded.parameters)}
        self._groups = [[index.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
        """Indices of the parameters of each optimizer parameter group; None for a frozen parameter."""
        self._mark = mark_of(sharded)
        states = {index[id(p)]: state for p, state in optimizer.state.items() if id(p) in index}
        optimizer.state.clear()
        for shard in shards:
            if shard.index in states:
                optimizer.state[shard.parameter] = self._cut(states[shard.index], shard)
        optimizer.register_state_dict_post_hook(lambda _, states: {**states, "repro": self._mark})
        optimizer.register_load_state_dict_pre_hook(self._load)

    def _cut(self, state: dict[str, Any], shard: Shard) -> dict[str, Any]:
        """Return the elements of `shard` from the optimizer `state` of a full parameter."""
        numel = self._sharded.shapes[shard.index].numel()
        cut: dict[str, Any] = {}
        for key, value in state.items():
            if _is_part(value):
                if value.numel() != numel:
                    name = self._sharded.names[shard.index]
                    raise ValueError(
                        f"optimizer: state {key!r} of {name} differs in size from {name}. Use another optimizer."
                    )
                value = value.reshape(-1)[shard.first : shard.last].to(shard.parameter.dtype).clone()
            cut[key] = value.clone() if isinstance(value, Tensor) else value
        return cut

    def _load(self, optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> dict[str, Any]:
        mark = states.get("repro")
        if mark is None:
            return self._from_stock(states)
        if mark != self._mark:
            raise ValueError(
                f"optimizer.load_state_dict(): the states of {written(mark)} do not fit {written(self._mark)}. "
                "Save optimizer.repro.full_state_dict(), which any rank and layout can load."
            )
        return states

    def _from_stock(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's shards of `states`, the full state dict of a stock torch optimizer."""
        if [len(g["params"]) for g in states["param_groups"]] != [len(group) for group in self._groups]:
            raise ValueError("optimizer.load_state_dict(): parameter group sizes differ. Use equal groups.")
        place: dict[int, int] = {}
        for saved, group in zip(states["param_groups"], self._groups, strict=True):
            place.update((i, key) for i, key in zip(group, saved["params"], strict=True) if i is not None)
        shard_of = {id(shard.parameter): shard for shard in self._shards}
        found: dict[str, Any] = {"state": {}, "param_groups": []}
        count = 0
        for saved, mine in zip(states["param_groups"], self._optimizer.param_groups, strict=True):
            numbers = range(count, count + len(mine["params"]))
            for number, parameter in zip(numbers, mine["params"], strict=True):
                shard = shard_of[id(parameter)]
                if place[shard.index] in states["state"]:
                    found["state"][number] = self._cut(states["state"][place[shard.index]], shard)
            found["param_groups"].append({**saved, "params": list(numbers)})
            count += len(numbers)
        return found

    def full_state_dict(self) -> dict[str, Any]:
        """Gather all ranks' optimizer states as a stock optimizer's `state_dict()`. All ranks must call this method."""
        sharded, group = self._sharded, self._sharded.sharding.group
        pieces = {shard.index: shard for shard in self._shards}
        states = {i: self._optimizer.state.get(shard.parameter, {}) for i, shard in pieces.items()}
        mine = {
            i: {key: value.dtype if _is_part(value) else value for key, value in state.items()}
            for i, state in states.items()
        }
        known = {i: state for of_rank in _all_gather_any(mine, self._host) for i, state in of_rank.items()}
        numbers = {i: n for n, i in enumerate(i for indices in self._groups for i in indices)}
        state: dict[int, dict[str, Any]] = {}
        for i in sorted(i for i in known if known[i]):
            full = state[numbers[i]] = dict(known[i])
            for key, dtype in known[i].items():
                if isinstance(dtype, torch.dtype):
                    flat = torch.zeros(sharded.shapes[i].numel(), dtype=dtype, device=sharded.sharding.device)
                    if i in pieces:
                        flat[pieces[i].first : pieces[i].last] = states[i][key]
                    if sharded.sharding.stage:
                        group.all_reduce(flat, purpose="optimizer states").wait()
                    full[key] = flat.view(sharded.shapes[i])
        settings = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        first = 0
        for indices, setting in zip(self._groups, settings, strict=True):
            setting["params"] = list(range(first, first + len(indices)))
            first += len(indices)
        return {"state": state, "param_groups": settings}


def _all_gather_any(value: Any, host: Group) -> list[Any]:
    """All-gather a Python object as pickled bytes, and return a copy of the `value` of every rank."""
    if host.size == 1:
        return [pickle.loads(pickle.dumps(value))]
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    size = torch.tensor([mine.numel()])
    sizes = size.repeat(host.size)
    host.all_gather(sizes, size, purpose="optimizer states").wait()
    longest = int(sizes.max())
    padded = torch.cat([mine, mine.new_zeros(longest - mine.numel())])
    found = padded.repeat(host.size)
    host.all_gather(found, padded, purpose="optimizer states").wait()
    parts = zip(found.view(host.size, longest), sizes.tolist(), strict=True)
    return [pickle.loads(part[:size].numpy().tobytes()) for part, size in parts]


def _is_part(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.dim() > 0


def mark_of(sharded: ShardedModule) -> dict[str, int]:
    """Return rank, dp and ZeRO stage, which must be equal when a rank saves and loads its own states."""
    group = sharded.sharding.group
    return {"rank": group.rank, "dp": group.size, "zero": sharded.sharding.stage}


def written(mark: dict[str, int]) -> str:
    """Return a rank, its data-parallel size and its ZeRO stage as text for error messages."""
    return f"rank {mark['rank']} of dp = {mark['dp']}, zero = {mark['zero']}"


class WrappedModule(ShardedModule):
    """Value of `module.repro` of a wrapped module, with complete and per-rank state dicts."""

    _saving = False

    def full_state_dict(self) -> dict[str, Any]:
        """Gather the parameters of all ranks, and return the `state_dict()` of a stock module.

        All ranks must call this method. The values are the master weights, which are fp32 in bf16 training. A plain
        bf16 module rounds these values on load, and a wrapped module loads them as master weights.
        """
        full: dict[int, Tensor] = {}
        for flat in self._flats():
            values = _gathered_values(flat)
            for slot, parameter in zip(flat.plan.slots, flat.parameters, strict=True):
                full[id(parameter)] = values[slot.start : slot.stop].clone().view(parameter.size())
        states = self._copied(full)
        for key, value in states.items():
            states[key] = full.get(id(value), value)
        return states

    def shard_state_dict(self) -> dict[str, Any]:
        """Return this rank's state: its pieces of the parameters by name, and all unsharded values (buffers)."""
        mine = self._pieces()
        cut = {id(parameter) for flat in self._flats() for parameter in flat.parameters}
        rest = {key: value for key, value in self._copied(cut).items() if id(value) not in cut}
        return {
            "repro": mark_of(self),
            "shard": {n: piece.clone() for n, piece in mine.items()},
            "rest": rest,
        }

    def load_shard_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load a result of `shard_state_dict`. Raises `ValueError` if another rank or layout has saved the result."""
        mine = self._pieces()
        sizes = {name: piece.numel() for name, piece in mine.items()}
        if states["repro"] != mark_of(self) or sizes != {n: v.numel() for n, v in states["shard"].items()}:
            raise ValueError(
                f"load_shard_state_dict(): the shard of {written(states['repro'])} does not fit "
                f"{written(mark_of(self))}, or its blocks or buckets differ. Save module.repro.full_state_dict(), "
                "which any rank and layout can load."
            )
        for name, piece in mine.items():
            piece.copy_(states["shard"][name])
        for bucket in self.buckets:
            bucket.shard.copy_(bucket.master)
        self.all_gather_params()
        self.wait()
        self.module.load_state_dict(states["rest"], strict=False)

    def _flats(self) -> Sequence[FlatParameters]:
        for bucket in self.buckets:
            bucket.adopt_writes()
        return (*self.buckets, *self.frozen)

    def _pieces(self) -> dict[str, Tensor]:
        """Return this rank's shard of every parameter by name, as flat tensors in the optimizer's precision."""
        names = {id(p): name for name, p in self._named.items()}
        found = {}
        for flat in self._flats():
            by_index = {
                slot.index: names[id(p)] for slot, p in zip(flat.plan.slots, flat.parameters, strict=True)
            }
            for index, first, last, place in flat.pieces():
                found[by_index[index]] = _values(flat)[place : place + last - first]
        return found

    def _copied(self, cut: Any) -> dict[str, Any]:
        """Return the module's `state_dict` with copies of all tensors but bucket parameters, whose ids are `cut`."""
        self._saving = True
        try:
            states = self.module.state_dict(keep_vars=True)
        finally:
            self._saving = False
        for key, value in states.items():
            if isinstance(value, Tensor) and id(value) not in cut:
                states[key] = value.detach().clone()
        return states

    def guard(self, units: Sequence[GatherUnit]) -> None:
        """Install hooks: `load_state_dict()` updates shards and master weights; `state_dict()` raises under stage 3."""
        flat_of = {id(p): flat for flat in (*self.buckets, *self.frozen) for p in flat.parameters}
        unit_of: dict[int, int] = {}
        if self.gatherer is not None:
            for u, parameters in enumerate(parameters_by_unit(self.module, units)):
                unit_of.update((id(p), u) for p in parameters)

        def save(child: nn.Module, prefix: str, keep_vars: bool) -> None:
            if self.sharding.stage == 3 and not self._saving:
                raise RuntimeError(
                    "state_dict() is not supported under zero = 3, because no rank has complete parameters. Call "
                    "module.repro.full_state_dict() on all ranks, or save module.repro.shard_state_dict() on each rank."
                )

        def before_load(child: nn.Module, states: Any, prefix: str, options: dict[str, Any], *_: Any) -> None:
            if options.get("assign_to_params_buffers"):
                raise RuntimeError("load_state_dict(assign=True) is not supported. Use assign=False.")
            for name, parameter in child._parameters.items():
                if parameter is None or id(parameter) not in flat_of:
                    continue
                flat, value = flat_of[id(parameter)], states.get(prefix + name)
                if isinstance(value, Tensor) and value.shape == parameter.size():
                    _set_master(flat, id(parameter), value)
                if self.gatherer is not None:
                    self.gatherer.gather(unit_of[id(parameter)])

        def after_load(child: nn.Module, _: Any) -> None:
            assert self.gatherer is not None
            for u in {unit_of[id(p)] for p in child._parameters.values() if id(p) in flat_of}:
                if self.gatherer.is_gathered(u):
                    for flat in self.gatherer.buckets[u]:
                        size = flat.plan.shard
                        flat.shard.copy_(flat.full[flat.part * size : (flat.part + 1) * size])
                    self.gatherer.free(u)

        for child in self.module.modules():
            if any(id(p) in flat_of for p in child._parameters.values()):
                child.register_state_dict_pre_hook(save)
                child.register_load_state_dict_pre_hook(before_load)
                if self.gatherer is not None:
                    child.register_load_state_dict_post_hook(after_load)


def _values(flat: FlatParameters) -> Tensor:
    """Return this rank's shard of the master weights, or of the parameters if there are no master weights."""
    return flat.master if isinstance(flat, Bucket) else flat.shard


def _gathered_values(flat: FlatParameters) -> Tensor:
    """All-gather the parameter shards of all ranks, and return the flat buffer with its padding."""
    mine = _values(flat)
    if mine.numel() == flat.plan.padded:
        return mine
    gathered = mine.new_empty(flat.plan.padded)
    flat.group.all_gather(gathered, mine, purpose="parameters").wait()
    return gathered


@torch.no_grad()
def _set_master(flat: FlatParameters, key: int, value: Tensor) -> None:
    """Copy this rank's piece of a parameter's full `value` into the fp32 master weights."""
    values = _values(flat)
    if values is flat.shard:
        return
    (number,) = (slot.index for slot, p in zip(flat.plan.slots, flat.parameters, strict=True) if id(p) == key)
    for index, first, last, place in flat.pieces():
        if index == number:
            values[place : place + last - first].copy_(value.reshape(-1)[first:last])
