"""The dimensionless numbers of a step, of original and twin: what has to be equal for their ratios to be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from repro.accuracy.twins.derive import Member, compute_s, useful_rate
from repro.config import TwinOf
from repro.config.experiment import TWIN_RATIO
from repro.config.layout import ELEMENT_BYTES
from repro.config.system import System
from repro.simulate.placement import BETWEEN_NODES, GROUPS
from repro.simulate.time.emulated import sourced_quantity
from repro.simulate.time.network import Network
from repro.simulate.time.predict import Prediction
from repro.simulate.time.program import OPTIMIZER, OTHER

CLOSE = 0.05
"""Numbers that differ by less are kept."""


@dataclass(frozen=True)
class Number:
    """One dimensionless number of a member."""

    name: str
    original: float
    twin: float
    by: str = ""
    """What keeps it, or why it is not kept."""

    @property
    def kept(self) -> bool:
        """Whether the twin has it as the original does."""
        return abs(self.twin - self.original) <= CLOSE * abs(self.original)

    @property
    def change(self) -> float:
        """Twin over original, less 1; infinite where the original has none."""
        if self.original:
            return self.twin / self.original - 1
        return 0.0 if not self.twin else float("inf")


def numbers(member: Member, baseline: Member) -> list[Number]:
    """Those of `member`; rates are relative to the `baseline` of the comparison."""
    before, after = member.before, member.after
    found = [
        Number(name, read(before), read(after), "W' = W (F'/F) (e'/e) / k")
        for name, read in (
            ("compute / tensor-parallel communication, 8hW/(t-1)eF", tp_number),
            ("compute / data-parallel communication, 4bsW/((d-1)/d)eF", dp_number),
        )
    ]
    found += [
        Number(f"{_NAMES[group]} communication / compute, predicted", share, shares(after)[group], _SIMULATED)
        for group, share in shares(before).items()
    ]
    found += [
        Number(name, read(before), read(after), by)
        for name, read, by in (
            ("latency of messages / compute", latency_share, "not kept: a message here costs more"),
            ("optimizer / compute", optimizer_share, "not kept: follows from the two machines"),
            ("element-wise part of compute", elementwise_share, "not kept: follows from the two machines"),
            ("attention / other products, s/6h", attention, "s' = k s"),
            ("vocabulary / layers, V/12lh", vocabulary, "V' = V k l'/l"),
            ("all-reduces over tp a layer", tp_calls, "not kept: fewer layers share embedding and head"),
            ("bucket / gradients", bucket, "the bucket scales with the gradients"),
            ("replica batch", lambda p: float(p.experiment.layout.replica_batch), "as it is"),
            ("pipeline bubble, (p-1)/m", bubble, "stages and micro-batches stay, or are said"),
            ("tp hops, (t-1)/t", lambda p: _hops(p.experiment.layout.tp), "in the link's rate"),
            ("dp hops, (d-1)/d", lambda p: _hops(p.experiment.layout.dp), "in the link's rate"),
        )
    ]
    relative = Number(
        "rate of compute over the baseline's, F/F0",
        useful_rate(before) / useful_rate(baseline.before),
        useful_rate(after) / useful_rate(baseline.after),
        "not kept: shards lose another part of the rate",
    )
    found.append(relative)
    if member is not baseline:
        rates = before.flops_per_device / baseline.before.flops_per_device
        found.append(
            Number(
                TWIN_RATIO, rates, after.flops_per_device / baseline.after.flops_per_device, "what is asked"
            )
        )
    return [number for number in found if number.original or number.twin]


def twin_of(member: Member, baseline: Member) -> TwinOf:
    """What `member` stands for, as its record will say it."""
    system = member.system
    return TwinOf(
        original=member.original.name,
        part=member.twin.model.hidden / member.original.model.hidden,
        between=_bandwidth(system, BETWEEN_NODES) if BETWEEN_NODES in system.links else 0.0,
        within=_bandwidth(system, system.link_inside()),
        numbers={n.name: (n.original, n.twin) for n in numbers(member, baseline)},
    )


def _bandwidth(system: System, name: str) -> float:
    link = system.links[name]
    share = link.used(name, "efficiency").value or 1.0
    return link.bandwidth.known(f"links.{name}.bandwidth", system=system.name) * share


_NAMES = {"tp": "tensor-parallel", "dp": "data-parallel", "pp": "pipeline"}
_SIMULATED = "the above with latency, embedding, head, and all that is sent"


def tp_number(prediction: Prediction) -> float:
    """Compute over communication of one layer under tensor parallelism, by products and bytes alone; 0 without."""
    e, layout = prediction.experiment, prediction.experiment.layout
    if layout.tp == 1:
        return 0.0
    rate = Network(prediction.system, layout).bus_bandwidth("tp")
    sent = (layout.tp - 1) * ELEMENT_BYTES[layout.precision] * useful_rate(prediction)
    return 8 * e.model.hidden * rate / sent


def dp_number(prediction: Prediction) -> float:
    """Compute over an all-reduce of gradients, of a layer, by products and bytes alone; 0 without."""
    e, layout = prediction.experiment, prediction.experiment.layout
    if layout.dp == 1:
        return 0.0
    rate = Network(prediction.system, layout).bus_bandwidth("dp")
    sent = (layout.dp - 1) / layout.dp * ELEMENT_BYTES[layout.precision] * useful_rate(prediction)
    return 4 * layout.replica_batch * e.seq * rate / sent


def shares(prediction: Prediction) -> dict[str, float]:
    """Seconds of each group's communication, hidden or not, over those of compute."""
    whole, found = compute_s(prediction), dict.fromkeys(_NAMES, 0.0)
    for label, seconds in prediction.slowest.communication.items():
        group = label.rpartition("(")[2].rstrip(")")
        if group in found:
            found[group] += seconds / whole
    return found


def latency_share(prediction: Prediction) -> float:
    """What messages cost beside their bytes, over compute: the step's collectives without latency, taken off."""
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
    """`system` whose messages cost nothing but their bytes."""
    zero = sourced_quantity(0.0, "left out")
    links = {
        name: replace(link, latency_s=zero, start_s=zero, chunk_s=zero, hop=None)
        for name, link in system.links.items()
    }
    return replace(system, links=links)


def without_jitter(system: System) -> System:
    """`system` whose ranks take the same at every moment, and so wait for none that is late."""
    time = replace(system.device.time, jitter_s=sourced_quantity(0.0, "left out"))
    return replace(system, device=replace(system.device, time=time))


def optimizer_share(prediction: Prediction) -> float:
    """The optimizer's seconds over compute's."""
    return prediction.slowest.busy.get(OPTIMIZER, 0.0) / compute_s(prediction)


def elementwise_share(prediction: Prediction) -> float:
    """The part of compute that is no matrix product."""
    return prediction.slowest.busy.get(OTHER, 0.0) / compute_s(prediction)


def attention(prediction: Prediction) -> float:
    """s/6h: what the scores and their use add to a layer's FLOP (2104.04473 eq. 3)."""
    e = prediction.experiment
    return e.seq / (6 * e.model.hidden)


def vocabulary(prediction: Prediction) -> float:
    """V/12lh: the vocabulary's part of FLOP and parameters (2104.04473 eq. 3)."""
    model = prediction.experiment.model
    return model.vocab / (12 * model.layers * model.hidden)


def tp_calls(prediction: Prediction) -> float:
    """All-reduces over tp in a step, for each layer of a stage and micro-batch."""
    layout = prediction.experiment.layout
    trace = next(r for r in prediction.roles if r.role.stage == 0)
    calls = sum(times for times, m in trace.messages() if (m.op, m.group) == ("all_reduce", "tp"))
    return calls / (prediction.experiment.model.layers / layout.pp) / layout.accumulation


def bucket(prediction: Prediction) -> float:
    """A bucket's bytes over all of a rank's gradients; at most 1, which is one bucket."""
    layout = prediction.experiment.layout
    trace = next(r for r in prediction.roles if r.role.stage == 0)
    gradients = trace.parameters * (4 if layout.precision == "fp32" else 2)
    return min(1.0, layout.bucket_bytes / gradients) if layout.dp > 1 else 0.0


def bubble(prediction: Prediction) -> float:
    """Idle over ideal time of a pipeline (2104.04473 sec. 2.2)."""
    layout = prediction.experiment.layout
    return (layout.pp - 1) / (layout.accumulation * layout.chunks)


def _hops(degree: int) -> float:
    return (degree - 1) / degree
