"""Dimensionless numbers of published experiments and their twins, and effects of their differences on throughput.

The effect of a difference is the throughput ratio predicted for scaled-down twins without this difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from repro.accuracy.twins.derive import Member, compute_s, useful_rate
from repro.accuracy.twins.scaling import Scale
from repro.config import TwinOf
from repro.config.experiment import TWIN_RATIO
from repro.config.layout import ELEMENT_BYTES
from repro.config.quantity import Quantity
from repro.config.system import System
from repro.simulate.placement import BETWEEN_NODES, GROUPS
from repro.simulate.time.network import Network
from repro.simulate.time.predict import Prediction, predict
from repro.simulate.time.program import OPTIMIZER, OTHER
from repro.simulate.trace.roles import trace_roles

MAX_KEPT_CHANGE = 0.05
"""Maximum relative change up to which a scaled-down twin counts as preserving a dimensionless number."""


@dataclass(frozen=True)
class SimilarityNumber:
    """Dimensionless number of a published experiment and of its scaled-down twin."""

    name: str
    original: float
    twin: float
    by: str = ""
    """Rule by which the scaled-down twin preserves this dimensionless number, or the reason why the twin changes it."""

    @property
    def kept(self) -> bool:
        """Return whether twin and original differ in this dimensionless number by at most `MAX_KEPT_CHANGE`."""
        return abs(self.twin - self.original) <= MAX_KEPT_CHANGE * abs(self.original)

    @property
    def change(self) -> float:
        """Return the number's relative change, twin / original - 1; infinite if only the original number is 0."""
        if self.original:
            return self.twin / self.original - 1
        return 0.0 if not self.twin else float("inf")


def similarity_numbers(member: Member, baseline: Member) -> list[SimilarityNumber]:
    """Return the dimensionless numbers of an experiment and its scaled-down twin; rates are divided by `baseline`'s."""
    before, after = member.before, member.after
    found = [SimilarityNumber(name, read(before), read(after), by) for name, read, by in _NUMBERS]
    relative = SimilarityNumber(
        "rate of compute over the baseline's, F/F0",
        useful_rate(before) / useful_rate(baseline.before),
        useful_rate(after) / useful_rate(baseline.after),
        "differs in the twin: small shards lower the compute rate of each layout differently",
    )
    found.append(relative)
    if member is not baseline:
        pairs = ((before, baseline.before), (after, baseline.after))
        original, twin = (mine.flops_per_device / base.flops_per_device for mine, base in pairs)
        found.append(SimilarityNumber(TWIN_RATIO, original, twin, "compared ratio of FLOP/s per device"))
    return [number for number in found if number.original or number.twin]


def twin_of(member: Member, baseline: Member) -> TwinOf:
    """Return the description of the published experiment, for the suite file of its scaled-down twin."""
    system = member.system
    return TwinOf(
        original=member.original.name,
        part=member.twin.model.hidden / member.original.model.hidden,
        between=_bandwidth(system, BETWEEN_NODES) if BETWEEN_NODES in system.links else 0.0,
        within=_bandwidth(system, system.link_inside()),
        numbers={n.name: (n.original, n.twin) for n in similarity_numbers(member, baseline)},
    )


def _bandwidth(system: System, name: str) -> float:
    link = system.links[name]
    share = link.used(name, "efficiency").value or 1.0
    return link.bandwidth.known(f"links.{name}.bandwidth", system=system.name) * share


def tp_number(prediction: Prediction) -> float:
    """Return the ratio of compute to tensor-parallel communication time of a layer, from FLOP and bytes, or 0."""
    e, layout = prediction.experiment, prediction.experiment.layout
    return _over_ring(prediction, "tp", 8 * e.model.hidden, layout.tp - 1)


def dp_number(prediction: Prediction) -> float:
    """Return the ratio of compute to gradient all-reduce time of a layer, from FLOP and bytes; 0 without replicas."""
    e, layout = prediction.experiment, prediction.experiment.layout
    return _over_ring(prediction, "dp", 4 * layout.replica_batch * e.seq, _hops(layout.dp))


def _over_ring(prediction: Prediction, group: str, work: float, hops: float) -> float:
    """Return compute time over communication time of a ring. `work`: FLOP per element; `hops`: sends per element."""
    if not hops:
        return 0.0
    layout = prediction.experiment.layout
    rate = Network(prediction.system, layout).bus_bandwidth(group)
    element_bytes = layout.grad_bytes if group == "dp" else ELEMENT_BYTES[layout.precision]
    return work * rate / (hops * element_bytes * useful_rate(prediction))


def communication_share(prediction: Prediction, *, group: str) -> float:
    """Return the ratio of a group's communication time to compute time, including overlapped communication."""
    seconds = (s for label, s in prediction.slowest.communication.items() if label.endswith(f"({group})"))
    return sum(seconds) / compute_s(prediction)


def latency_share(prediction: Prediction) -> float:
    """Return the ratio of the latency of all collectives of a step to the step's compute time."""
    layout = prediction.experiment.layout
    real, none = Network(prediction.system, layout), Network(without_latency(prediction.system), layout)
    trace = next(r for r in prediction.roles if r.role.stage == 0)
    seconds = sum(
        times * (network.seconds(m.op, m.group, m.payload) * sign)
        for network, sign in ((real, 1), (none, -1))
        for times, m in trace.messages()
        if m.group in GROUPS and m.op != "send"
    )
    return seconds / compute_s(prediction)


def without_latency(system: System) -> System:
    """Return `system` with links whose messages and collectives have no latency."""
    zero = Quantity(value=0.0, source="assumed 0")
    quick: dict[str, Any] = {"latency_s": zero, "start_s": zero, "chunk_s": zero, "hop": None}
    return replace(system, links={name: replace(link, **quick) for name, link in system.links.items()})


def without_jitter(system: System) -> System:
    """Return `system` without jitter of kernel times, so that all ranks reach a collective together."""
    time = replace(system.device.time, jitter_s=Quantity(value=0.0, source="assumed 0"))
    return replace(system, device=replace(system.device, time=time))


def optimizer_share(prediction: Prediction) -> float:
    """Return the ratio of optimizer time to compute time of a step."""
    return prediction.slowest.busy.get(OPTIMIZER, 0.0) / compute_s(prediction)


def elementwise_share(prediction: Prediction) -> float:
    """Return the share of a step's compute time that is spent outside of matrix products."""
    return prediction.slowest.busy.get(OTHER, 0.0) / compute_s(prediction)


def attention_share(prediction: Prediction) -> float:
    """Return s/6h, the ratio of attention-score FLOP to the other FLOP of a layer (2104.04473 eq. 3)."""
    e = prediction.experiment
    return e.seq / (6 * e.model.hidden)


def vocabulary_share(prediction: Prediction) -> float:
    """Return V/12lh, the ratio of vocabulary parameters to the parameters of all layers (2104.04473 eq. 2)."""
    model = prediction.experiment.model
    return model.vocab / (12 * model.layers * model.hidden)


def tp_all_reduces_per_layer(prediction: Prediction) -> float:
    """Return the number of tensor-parallel all-reduces per layer of a stage and micro-batch."""
    layout = prediction.experiment.layout
    trace = next(r for r in prediction.roles if r.role.stage == 0)
    calls = sum(times for times, m in trace.messages() if (m.op, m.group) == ("all_reduce", "tp"))
    return calls / (prediction.experiment.model.layers / layout.pp) / layout.accumulation


def bucket_share(prediction: Prediction) -> float:
    """Return the ratio of a gradient bucket's size to the size of a rank's gradients, at most 1; 0 without dp."""
    layout = prediction.experiment.layout
    trace = next(r for r in prediction.roles if r.role.stage == 0)
    gradients = trace.parameters * layout.grad_bytes
    return min(1.0, layout.bucket_bytes / gradients) if layout.dp > 1 else 0.0


def bubble_over_ideal(prediction: Prediction) -> float:
    """Return the ratio of a pipeline's idle time to its ideal time (2104.04473 sec. 2.2)."""
    layout = prediction.experiment.layout
    return (layout.pp - 1) / (layout.accumulation * layout.chunks)


def _hops(degree: int) -> float:
    return (degree - 1) / degree


_LINK_RATE = "equal by the twin's link rate W' = W (F'/F) (e'/e) / k"
_SIMULATED = "result of the twin's link rate W'; includes latency, embedding and head"
_MACHINES = "differs in the twin: each of the two machines has its own ratio"
_STAGES = "equal: the twin has the original's stages and micro-batches"
_NUMBERS: tuple[tuple[str, Callable[[Prediction], float], str], ...] = (
    ("compute / tensor-parallel communication, 8hW/(t-1)eF", tp_number, _LINK_RATE),
    ("compute / data-parallel communication, 4bsW/((d-1)/d)eF", dp_number, _LINK_RATE),
    *(
        (f"{name} communication / compute, predicted", partial(communication_share, group=group), _SIMULATED)
        for group, name in (("tp", "tensor-parallel"), ("dp", "data-parallel"), ("pp", "pipeline"))
    ),
    ("latency of messages / compute", latency_share, "differs in the twin: emulated links are slow"),
    ("optimizer / compute", optimizer_share, _MACHINES),
    ("element-wise part of compute", elementwise_share, _MACHINES),
    ("attention / other products, s/6h", attention_share, "equal by the twin's tokens per sample s' = k s"),
    ("vocabulary / layers, V/12lh", vocabulary_share, "equal by the twin's vocabulary V' = V k l'/l"),
    (
        "all-reduces over tp a layer",
        tp_all_reduces_per_layer,
        "differs in the twin: embedding and head have a larger share",
    ),
    ("bucket / gradients", bucket_share, "equal: bucket bytes scale with gradient bytes"),
    ("replica batch", lambda p: float(p.experiment.layout.replica_batch), "unchanged"),
    ("pipeline bubble, (p-1)/m", bubble_over_ideal, _STAGES),
    ("tp hops, (t-1)/t", lambda p: _hops(p.experiment.layout.tp), "offset by the twin's link rate W'"),
    ("dp hops, (d-1)/d", lambda p: _hops(p.experiment.layout.dp), "offset by the twin's link rate W'"),
)
"""Dimensionless numbers: name, function of a predicted step, and why a scaled-down twin preserves or changes it."""


@dataclass(frozen=True)
class Effect:
    """Difference between published experiments and their scaled-down twins, and the throughput ratio without it."""

    difference: str
    ratio: float
    """Throughput of the scaled-down experiment over its baseline's, predicted as if this difference did not exist."""


@dataclass(frozen=True)
class ScaledRatio:
    """FLOP/s per device over the baseline's, predicted for published experiments and for their scaled-down twins."""

    member: str
    original: float
    twin: float
    effects: tuple[Effect, ...]
    """Throughput ratios of the scaled-down twins, each predicted without one of the differences from the originals."""
    rest: float
    """Throughput ratio of the scaled-down twins without any of the differences in `effects`."""


Parts = dict[str, float]
"""Predicted step: `optimizer` and `waiting` time over compute time; `rate`: compute FLOP/s over the baseline's."""


def ratio_of(member: Member, baseline: Member, scale: Scale) -> ScaledRatio:
    """Return throughput over baseline for originals and scaled-down twins, and the effects of their differences."""
    rates = [useful_rate(m.after) / useful_rate(m.before) / scale.rate for m in (member, baseline)]
    twin = _efficiencies(member, baseline, lambda m: m.after)
    original = _efficiencies(member, baseline, lambda m: m.before)
    quick = _efficiencies(member, baseline, lambda m: _on(m, without_latency(m.machine)))
    together = _efficiencies(member, baseline, lambda m: _on(m, without_jitter(m.machine)))
    deep = _efficiencies(member, baseline, _deep)
    effects = (
        Effect("messages without latency", _ratio(quick)),
        Effect("ranks without jitter", _ratio(together)),
        Effect("published number of layers", _ratio(deep)),
        Effect("published ratio of the layouts' compute rates", _ratio(_at_rates(twin, rates))),
        Effect("published optimizer / compute", _ratio(_swapped(twin, original, "optimizer"))),
    )
    both = _efficiencies(member, baseline, lambda m: _deep(m, ideal=True))
    rest = _ratio(_at_rates(_swapped(both, original, "optimizer"), rates))
    return ScaledRatio(member.original.name, _ratio(original), _ratio(twin), effects, rest)


Pair = tuple[Parts, Parts]
"""Ratios (`Parts`) that describe the predicted step of an experiment, and those of its baseline."""


def _efficiencies(member: Member, baseline: Member, read: Callable[[Member], Prediction]) -> Pair:
    mine, base = read(member), read(baseline)
    relative = useful_rate(mine) / useful_rate(base)
    return {**_parts(mine), "rate": relative}, {**_parts(base), "rate": 1.0}


def _parts(prediction: Prediction) -> Parts:
    optimizer = optimizer_share(prediction)
    return {"optimizer": optimizer, "waiting": prediction.step_s / compute_s(prediction) - 1 - optimizer}


def _ratio(pair: Pair) -> float:
    def useful(parts: Parts) -> float:
        return parts["rate"] / (1 + parts["optimizer"] + parts["waiting"])

    return useful(pair[0]) / useful(pair[1])


def _swapped(pair: Pair, other: Pair, key: str) -> Pair:
    return {**pair[0], key: other[0][key]}, {**pair[1], key: other[1][key]}


def _at_rates(twin: Pair, rates: Sequence[float]) -> Pair:
    """Return the predicted `twin` with compute rates in the same ratio to each other as in the original experiments.

    Waiting seconds do not change. `rates`: twin over original compute rate (F'/F) of both, over the mean F'/F.
    """
    mine, base = ({**parts, "waiting": parts["waiting"] / r} for parts, r in zip(twin, rates, strict=True))
    return {**mine, "rate": mine["rate"] * rates[1] / rates[0]}, base


def _on(member: Member, machine: System) -> Prediction:
    return predict(member.after.experiment, machine, member.after.roles)


def _deep(member: Member, *, ideal: bool = False) -> Prediction:
    """Return the predicted step of a scaled-down twin with the original's number of layers and proportional vocabulary.

    A twin with pipeline stages retains its layers, for which its link rate is derived. `ideal`: no latency, no jitter.
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
