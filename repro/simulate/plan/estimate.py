"""The memory and traffic of a layout from its family's shallow traces, extended along straight lines.

Per phase of the step and category of memory, with l layers of a part, f micro-batches in flight and b samples
of a micro-batch:

    model states    closed form (`repro.simulate.plan.closed_form`), and what the trace has beside it
    the rest        what the trace has, interpolated in b, and for every further layer and micro-batch in
                    flight what one layer keeps of one sample:  b (c (f l - f0 l0) + d (f - f0))

Live bytes come out within about one percent.  What the allocator reserves for them is not estimated: it
follows from the order of all allocations, which a full trace has.  The stages between first and last are left out:
they hold no embedding and keep fewer micro-batches than the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from repro.config import Layout, Model
from repro.config.system import System
from repro.parallel.ledger import RING_PASSES, SEND
from repro.simulate.placement import Placement
from repro.simulate.plan.closed_form import LAST, MIDDLE, state_bytes
from repro.simulate.plan.shallow import KEPT, WEIGHTS, LayoutFamily, Row, ShallowProfile, kept

ONCE = ("init", "optimizer")
"""Phases in which no activations are alive."""
HOST = "host"


@dataclass(frozen=True)
class RoleEstimate:
    """One role of a layout.  Bytes of one rank."""

    peak_bytes: int
    phase: str
    by_category: dict[str, int]
    """At the peak."""
    states_bytes: int


@dataclass(frozen=True)
class Sent:
    """What one rank sends in a step, in bytes, by group and by class of links."""

    by_group: dict[str, int]
    by_link: dict[str, int]


def memory(model: Model, layout: Layout, families: dict[str, LayoutFamily]) -> dict[str, RoleEstimate]:
    """The roles of `layout`: `all`, or `first` and `last`."""
    layers = model.layers // (layout.pp * layout.chunks)
    return {
        name: _role(layout, layers, kept(layout, layout.pp - 1 if name == LAST else 0), family)
        for name, family in families.items()
        if name != MIDDLE
    }


def _role(layout: Layout, layers: int, in_flight: int, family: LayoutFamily) -> RoleEstimate:
    parameters = _line(family.base.parameters, family.deeper.parameters, _deeper(family, layers))
    states = state_bytes(parameters, layout)
    more = {category: _more(family, category, layers, in_flight) for category in KEPT}
    moments = []
    for phase in family.base.live:
        for i in range(len(WEIGHTS)):
            found = _at(family, phase, i, layers, layout, more)
            sizes = {key: max(0, round(size + states.get(key, 0.0))) for key, size in found.items()}
            moments.append((phase, sizes))
    phase, peak = max(moments, key=lambda moment: _device(moment[1]))
    return RoleEstimate(_device(peak), phase, peak, round(sum(states.values())))


def _device(categories: dict[str, int]) -> int:
    return sum(size for category, size in categories.items() if category != HOST)


def _line(at_base: float, at_other: float, times: float) -> float:
    return at_base + (at_other - at_base) * times


def _deeper(family: LayoutFamily, layers: int) -> float:
    """How often the step from `base` to `deeper` is taken."""
    return (layers - family.base.layers) / (family.deeper.layers - family.base.layers)


def _wider(family: LayoutFamily, micro_batch: int) -> float:
    step = family.wider.layout.micro_batch - family.base.layout.micro_batch
    return (micro_batch - family.base.layout.micro_batch) / step if step else 0.0


def _more(family: LayoutFamily, category: str, layers: int, in_flight: int) -> tuple[float, float]:
    """c, what a layer keeps of a sample; and what is kept beyond `base`: c (f l - f0 l0) + d (f - f0)."""
    base, deeper, longer = family.base, family.deeper, family.longer
    samples = base.layout.micro_batch
    per_layer = (deeper.most[category] - base.most[category]) / (_step(family) * base.in_flight * samples)
    per_pass = 0.0
    if longer.in_flight != base.in_flight:
        more = (longer.most[category] - base.most[category]) / (longer.in_flight - base.in_flight)
        per_pass = more / samples - per_layer * base.layers
    more = per_layer * (in_flight * layers - base.in_flight * base.layers)
    return per_layer, more + per_pass * (in_flight - base.in_flight)


def _at(
    family: LayoutFamily,
    phase: str,
    moment: int,
    layers: int,
    layout: Layout,
    more: dict[str, tuple[float, float]],
) -> dict[str, float]:
    """What is live at one of a phase's moments, but for the closed form of the states."""

    def beside(profile: ShallowProfile) -> dict[str, float]:
        closed = state_bytes(profile.parameters, profile.layout)
        at = profile.live[phase][moment] if phase in profile.live else {}
        return {category: at.get(category, 0) - closed.get(category, 0.0) for category in profile.most}

    def extended(profile: ShallowProfile) -> dict[str, float]:
        found = beside(profile)
        samples = profile.layout.micro_batch
        for category, (per_layer, further) in more.items():
            # If anything is kept at that moment, a deeper model has such a moment with all but as much kept.
            if per_layer and found[category] >= samples * per_layer / 2:
                found[category] += samples * further
        return found

    if phase in ONCE:
        at_base, other, times = beside(family.base), beside(family.deeper), _deeper(family, layers)
    else:
        at_base, other = extended(family.base), extended(family.wider)
        times = _wider(family, layout.micro_batch)
    return {category: _line(at_base[category], other[category], times) for category in at_base}


def traffic(
    model: Model, layout: Layout, families: dict[str, LayoutFamily], system: System
) -> dict[str, Sent]:
    """What one rank of each role sends in a step; `middle` is there with more than two stages."""
    placement = Placement(layout, system)
    dp = next(iter(families.values())).base.layout.dp
    return {
        name: _sent(layout, rows, placement, name, dp)
        for name, rows in payloads(model, layout, families).items()
    }


def payloads(model: Model, layout: Layout, families: dict[str, LayoutFamily]) -> dict[str, dict[Row, float]]:
    """Bytes of all messages of a step of a rank of each role, as `traffic`; those of `embedding` as the family shards
    them."""
    layers = model.layers // (layout.pp * layout.chunks)
    return {
        name: _payloads(layout, layers, family)
        for name, family in families.items()
        if name != MIDDLE or layout.pp > 2
    }


def _payloads(layout: Layout, layers: int, family: LayoutFamily) -> dict[Row, float]:
    base, further = family.base, layout.accumulation - family.base.micro_batches
    found = {}
    for row in base.rows:
        values = []
        for i in range(2):
            at = [profile.rows.get(row, (0, 0))[i] for profile in (base, family.deeper, family.wider)]
            per_step = at[1] - at[0]
            value = at[0] + per_step * (layers - base.layers) / _step(family)
            grows = at[2] / at[0] - 1 if at[0] else 0.0
            values.append(value * (1 + grows * _wider(family, layout.micro_batch)))
        found[row] = values[0] + further * values[1]
    return found


def _step(family: LayoutFamily) -> int:
    return family.deeper.layers - family.base.layers


def _sent(layout: Layout, rows: dict[Row, float], placement: Placement, role: str, dp: int) -> Sent:
    stage = {LAST: layout.pp - 1, MIDDLE: 1}.get(role, 0)
    rank = stage * layout.strides["pp"]
    by_group: dict[str, int] = {}
    by_link: dict[str, int] = {}
    for (op, group, _), payload in rows.items():
        ranks = placement.ranks_of(group, rank)
        size = len(ranks)
        if group == "embedding" and layout.zero:  # shards of the tied gradients: those of the family's dp
            payload *= dp / layout.dp
        sent = round(payload if op == SEND else RING_PASSES[op] * payload * (size - 1) / size)
        if not sent:  # not by a group of one either
            continue
        link = placement.link_of(group, ranks)
        by_group[group] = by_group.get(group, 0) + sent
        by_link[link] = by_link.get(link, 0) + sent
    return Sent(by_group, by_link)
