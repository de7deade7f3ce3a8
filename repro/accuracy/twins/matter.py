"""What a number that is not kept does to the ratio of two layouts, by the model of time.

A step is its compute and what is waited for beside it; each part of that of the twin is put back to what it is in the
original, one after the other, and the ratio is looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from repro.accuracy.twins.derive import Member, compute_s, useful_rate
from repro.accuracy.twins.numbers import optimizer_share, without_jitter, without_latency
from repro.accuracy.twins.scaling import Scale
from repro.config.system import System
from repro.simulate.time.predict import Prediction, predict
from repro.simulate.trace.roles import trace_roles


@dataclass(frozen=True)
class Effect:
    """One difference between original and twin, and the ratio without it."""

    difference: str
    ratio: float
    """The twin's, if it had this as the original has it."""


@dataclass(frozen=True)
class Ratio:
    """FLOP/s of a member over the baseline's, for each device: predicted at both scales."""

    member: str
    original: float
    twin: float
    effects: tuple[Effect, ...]
    """Of each difference alone."""
    rest: float
    """The twin's ratio when all of these are as in the original."""


Parts = dict[str, float]
"""Seconds of a step over those of its compute: `optimizer`, `exposed (group)`, `bubble`; and `rate`, F over F0."""


def ratio_of(member: Member, baseline: Member, scale: Scale) -> Ratio:
    """How `member` compares with `baseline`, and why the twin's ratio is not the original's."""
    rates = [useful_rate(m.after) / useful_rate(m.before) / scale.rate for m in (member, baseline)]
    twin = _efficiencies(member, baseline, lambda m: m.after)
    original = _efficiencies(member, baseline, lambda m: m.before)
    quick = _efficiencies(member, baseline, lambda m: _on(m, without_latency(m.machine)))
    together = _efficiencies(member, baseline, lambda m: _on(m, without_jitter(m.machine)))
    deep = _efficiencies(member, baseline, _deep)
    effects = (
        Effect("messages cost only their bytes", _ratio(quick)),
        Effect("ranks come to a collective together", _ratio(together)),
        Effect("as many layers as the original", _ratio(deep)),
        Effect("the layouts' rates of compute differ as in the original", _ratio(_at_rates(twin, rates))),
        Effect("the optimizer takes the original's part", _ratio(_swapped(twin, original, "optimizer"))),
    )
    both = _efficiencies(member, baseline, lambda m: _deep(m, ideal=True))
    rest = _ratio(_at_rates(_swapped(both, original, "optimizer"), rates))
    return Ratio(member.original.name, _ratio(original), _ratio(twin), effects, rest)


Pair = tuple[Parts, Parts]
"""Of a member and its baseline."""


def _efficiencies(member: Member, baseline: Member, read: Callable[[Member], Prediction]) -> Pair:
    mine, base = read(member), read(baseline)
    relative = useful_rate(mine) / useful_rate(base)
    return {**_parts(mine), "rate": relative}, {**_parts(base), "rate": 1.0}


def _parts(prediction: Prediction) -> Parts:
    whole, optimizer = compute_s(prediction), optimizer_share(prediction)
    return {"optimizer": optimizer, "waiting": prediction.step_s / whole - 1 - optimizer}


def _ratio(pair: Pair) -> float:
    def useful(parts: Parts) -> float:
        return parts["rate"] / (1 + parts["optimizer"] + parts["waiting"])

    return useful(pair[0]) / useful(pair[1])


def _swapped(pair: Pair, other: Pair, key: str) -> Pair:
    return {**pair[0], key: other[0][key]}, {**pair[1], key: other[1][key]}


def _at_rates(twin: Pair, rates: Sequence[float]) -> Pair:
    """`twin` whose members compute at the same part of their originals' rates, F'/F; what they wait for stays in
    seconds, and is another part of compute.  `rates`: F'/F of each, over that of all."""
    mine, base = ({**parts, "waiting": parts["waiting"] / r} for parts, r in zip(twin, rates, strict=True))
    return {**mine, "rate": mine["rate"] * rates[1] / rates[0]}, base


def _on(member: Member, machine: System) -> Prediction:
    return predict(member.after.experiment, machine, member.after.roles)


def _deep(member: Member, *, ideal: bool = False) -> Prediction:
    """The twin with the original's layers; width, batch and links as they are, the vocabulary for so many.

    Under a pipeline its own, for which the link between stages was made.  `ideal`: messages cost only their bytes, and
    ranks come together.
    """
    twin = member.twin
    system = without_jitter(without_latency(member.machine)) if ideal else member.machine
    if twin.layout.pp > 1:
        return _on(member, system) if ideal else member.after
    layers = member.original.model.layers
    more = layers / twin.model.layers
    vocab = round(twin.model.vocab * more / twin.layout.tp) * twin.layout.tp
    model = replace(twin.model, layers=layers, vocab=vocab)
    layout = replace(twin.layout, bucket_bytes=round(twin.layout.bucket_bytes * more))
    deep = replace(twin, model=model, layout=layout)
    return predict(deep, system, trace_roles(deep, gloo=True))
