"""State dicts of a module whose parameters lie in buckets: of the stock module, and of a rank's own shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repro.parallel.zero.flat_buffer import Bucket
from repro.parallel.zero.flat_parameters import FlatParameters
from repro.parallel.zero.partition import GatherUnit, parameters_by_unit
from repro.parallel.zero.stages import ShardedModule
from repro.wrap.optimizer_states import mark_of, written


class WrappedModule(ShardedModule):
    """Sharded module at `module.repro`, with full and per-rank state dicts."""

    _saving = False

    def full_state_dict(self) -> dict[str, Any]:
        """Return `state_dict()` of the stock module, complete on every rank; all ranks call this at once.

        Parameters have the optimizer's precision, which is fp32 in bf16 training. A bf16 module rounds them on load. A
        wrapped module continues with the same master weights.
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
        """Load the result of `shard_state_dict` of this rank and layout; all ranks call this at once.

        Raises `ValueError` for the shard of another rank or layout.
        """
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
        """Return this rank's part of every parameter by name, flat, in the optimizer's precision."""
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
        """Return the stock `state_dict` with copies of all tensors except those whose ids are in `cut`."""
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
        """Install hooks: `load_state_dict()` updates shards and master weights, and `state_dict()` refuses stage 3."""
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
    """Return this rank's shard: the master weights, or the parameters where there are none."""
    return flat.master if isinstance(flat, Bucket) else flat.shard


def _gathered_values(flat: FlatParameters) -> Tensor:
    """Return the values of all ranks' shards [padded]."""
    mine = _values(flat)
    if mine.numel() == flat.plan.padded:
        return mine
    gathered = mine.new_empty(flat.plan.padded)
    flat.group.all_gather(gathered, mine, purpose="parameters").wait()
    return gathered


@torch.no_grad()
def _set_master(flat: FlatParameters, key: int, value: Tensor) -> None:
    """Set this rank's piece of a parameter's master weights from the full `value`, before rounding."""
    values = _values(flat)
    if values is flat.shard:
        return
    (number,) = (slot.index for slot, p in zip(flat.plan.slots, flat.parameters, strict=True) if id(p) == key)
    for index, first, last, place in flat.pieces():
        if index == number:
            values[place : place + last - first].copy_(value.reshape(-1)[first:last])
