"""A twin of compared experiments: each as small, and the emulated network that keeps their ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import geometric_mean

from repro.accuracy.twins.scaling import Scale, model_of, width_near
from repro.accuracy.twins.shape import Shape, shape_of
from repro.config import EmulatedNetwork, Experiment, Layout, Training
from repro.config.engines import NATIVE
from repro.config.errors import ConfigError
from repro.config.layout import ELEMENT_BYTES
from repro.config.quantity import Quantity
from repro.config.system import System
from repro.emulate.network import payload_share
from repro.measure.local_system import load_system
from repro.model import counts
from repro.simulate.placement import BETWEEN_NODES, Placement
from repro.simulate.time.emulated import emulated_system, product_rate
from repro.simulate.time.network import Network
from repro.simulate.time.predict import Prediction, predict
from repro.simulate.time.program import KINDS, OPTIMIZER
from repro.simulate.trace.roles import trace_roles

LARGE = 2**30
"""Bytes of a message that is all bandwidth."""
ALIKE = 0.02
"""Rates that differ by less are one network's: less than what links are measured to and whole tokens round off."""


@dataclass(frozen=True)
class Choice:
    """What is free in a twin."""

    ranks: int = 16
    part: int = 8
    """1/k: the twin's model is so many times narrower, nearly."""
    width: int = 0
    """Of the twin's model; 0: as `part` says."""
    layers: int = 4
    """Of the twin's model, at least; a multiple of the stages."""
    steps: int = 10
    """Of each experiment; the first is not timed."""
    tp: int = 0
    """Tensor-parallel degree of every member; 0: as the ranks allow."""
    within: float = 0.0
    """Bytes/s of an original's links inside a node, in place of what its system file says (nobody published it)."""
    between: float = 0.0
    """Bytes/s of a node's link in an original, in place of what its system file says."""


@dataclass
class Member:
    """One experiment and its twin."""

    original: Experiment
    system: System
    shape: Shape
    twin: Experiment
    machine: System
    """What the twin runs on, with its network."""

    @cached_property
    def before(self) -> Prediction:
        """The original, predicted; of a library, as this suite's own step in its layout."""
        return predict(replace(self.original, engine=NATIVE), self.system)

    @cached_property
    def after(self) -> Prediction:
        """The twin, predicted on its emulated network; of a library likewise."""
        own = replace(self.twin, engine=NATIVE)
        return predict(own, self.machine, trace_roles(own, gloo=True))

    @property
    def network(self) -> EmulatedNetwork:
        """The twin's."""
        assert self.twin.network is not None
        return self.twin.network


@dataclass
class Twin:
    """Compared experiments as small ones; the first is the baseline."""

    members: list[Member]
    scales: list[Scale]
    """Of each member."""
    unlimited: list[str] = field(default_factory=list)
    """Links that would have to be faster than this machine is, and by how much."""

    @property
    def together(self) -> list[Member]:
        """Those that run on the baseline's network and so can take turns with it; the baseline is the first."""
        return [member for member in self.members if member.network == self.members[0].network]


def compute_s(prediction: Prediction) -> float:
    """Seconds that the slowest stage computes, forward and backward; not those that communication beside it takes."""
    return sum(s for kind, s in prediction.slowest.busy.items() if kind in KINDS and kind != OPTIMIZER)


def useful_rate(prediction: Prediction) -> float:
    """F: FLOP/s of a device while it computes."""
    e, layout = prediction.experiment, prediction.experiment.layout
    work = counts.hardware_flops(e.model, e.seq, layout.global_batch, layout.recompute)
    return work / layout.world / compute_s(prediction)


def derive(originals: Sequence[Experiment], machine: System, choice: Choice) -> Twin:
    """The twin of `originals` on `machine`, a file of `repro calibrate` for `choice.ranks`.  Raises `ConfigError`."""
    members, scales = [], []
    on = [with_links(load_system(original.system), choice) for original in originals]
    shapes = [shape_of(o.layout, s, choice.ranks, tp=choice.tp) for o, s in zip(originals, on, strict=True)]
    widest = max(4, *(shape.tp for shape in shapes))  # one model for all: its heads divide by every degree
    for original, system, shape in zip(originals, on, shapes, strict=True):
        if shape.nodes * shape.per_node != choice.ranks:
            right = f"the ranks of every member: {original.name} has {shape.nodes * shape.per_node}"
            raise ConfigError("--ranks", choice.ranks, right)
        twin = small(original, shape, widest, choice)
        open_ = EmulatedNetwork(
            nodes=shape.nodes, ranks_per_node=shape.per_node, between=1e12 if shape.nodes > 1 else 0.0
        )
        twin = replace(twin, network=open_)
        members.append(Member(original, system, shape, twin, emulated_system(machine, open_)))
        scales.append(scale_of(original, twin))
    rate = geometric_mean([useful_rate(m.after) / useful_rate(m.before) for m in members])
    scales = [replace(scale, rate=rate) for scale in scales]
    wanted = [network_of(m, scale) for m, scale in zip(members, scales, strict=True)]
    wanted = [next(first for first in wanted if _alike(first, network)) for network in wanted]
    found, unlimited = [], []
    for member, network in zip(members, wanted, strict=True):
        network, said = possible(network, machine)
        network = replace(network, flops_per_s=product_rate(machine))
        unlimited += [text for text in said if text not in unlimited]
        twin = replace(member.twin, network=network)
        found.append(replace(member, twin=twin, machine=emulated_system(machine, network)))
    return Twin(found, scales, unlimited)


def with_links(system: System, choice: Choice) -> System:
    """`system` with the bandwidths that `choice` asks for: of collectives, so that nothing is taken off them."""
    links = dict(system.links)
    for name, rate in ((system.link_inside(), choice.within), (BETWEEN_NODES, choice.between)):
        if rate and name in links:
            said = Quantity(value=rate, source="asked for")
            links[name] = replace(links[name], bandwidth=said, efficiency=replace(said, value=1.0))
    return replace(system, links=links)


def small(original: Experiment, shape: Shape, tp: int, choice: Choice) -> Experiment:
    """`original` in the twin's sizes and degrees, without dropout; its network is still to come.

    `tp`: what the model's sizes have to divide by.
    """
    before, layout = original.model, shape.layout(original.layout)
    width = choice.width or width_near(before, choice.part, tp)
    parts = layout.pp * layout.chunks
    layers = -(-choice.layers // parts) * parts
    name = f"{before.name}-twin-{width}x{layers}-tp{tp}"
    model = model_of(before, original.seq, name=name, width=width, layers=layers, tp=tp)
    sizes = counts.total_parameters(model) / counts.total_parameters(before) * original.layout.tp / layout.tp
    sizes *= ELEMENT_BYTES["fp32"] / ELEMENT_BYTES[original.layout.precision]
    layout = replace(layout, bucket_bytes=max(1, round(layout.bucket_bytes * sizes)))
    training = Training(steps=choice.steps, untimed_steps=1)
    name = f"{original.name}-twin"
    return Experiment(name=name, model=model, layout=layout, training=training, engine=original.engine)


def scale_of(original: Experiment, twin: Experiment) -> Scale:
    """How much smaller `twin` is; the rate is still to come."""
    element = ELEMENT_BYTES[twin.layout.precision] / ELEMENT_BYTES[original.layout.precision]
    return Scale(twin.model.hidden / original.model.hidden, twin.seq / original.seq, element)


def network_of(member: Member, scale: Scale) -> EmulatedNetwork:
    """The network on which every group's ring has the rate that keeps its number."""
    before, after, shape = member.original.layout, member.twin.layout, member.shape
    real, probe = Network(member.system, before), Network(member.machine, after)
    layers = member.original.model.layers, member.twin.model.layers
    factors = {
        "tp": scale.tp_link(before, after),
        "dp": scale.dp_link(before, after),
        "pp": scale.pp_link(before, after, layers),
    }
    within = between = 0.0
    for group in ("dp", "pp", "tp"):  # the last one counts: what it sends cannot be hidden
        if not factors[group]:
            continue
        rate = (_stage_rate(real) if group == "pp" else real.bus_bandwidth(group)) * factors[group]
        if probe.link(group) == BETWEEN_NODES:
            open_ = _stage_rate(probe) if group == "pp" else _across(member, group)
            if group != "pp":  # the nodes' link by itself: hops inside a node have `within`
                rate = Network(_open_inside(member.system), before).bus_bandwidth(group) * factors[group]
            between = rate * probe.peak(BETWEEN_NODES) / open_
            if _ring_inside(member, group):
                within = inside_rate(member.system) * factors[group]
        else:
            within = rate
    bare = EmulatedNetwork(
        nodes=shape.nodes, ranks_per_node=shape.per_node, between=between or _unused(shape), within=within
    )
    share = payload_share(bare)  # headers come on top
    return replace(bare, between=_rounded(bare.between / share), within=_rounded(bare.within / share))


def _rounded(rate: float) -> float:
    """Four digits, which is more than a token bucket keeps, so that a suite reads well and says the same."""
    return float(f"{rate:.4g}")


def _ring_inside(member: Member, group: str) -> bool:
    """Whether rings of `group` that leave a node also have hops inside it."""
    placed = Placement(member.twin.layout, member.machine)
    nodes = placed.nodes(placed.members(group))
    return group != "pp" and len(set(nodes[0].tolist())) < nodes.shape[1]


def _unused(shape: Shape) -> float:
    """A link that no group needs is there all the same: a small sum over all ranks crosses it."""
    return 1e8 if shape.nodes > 1 else 0.0


def _across(member: Member, group: str) -> float:
    """Bytes/s of a ring of `group` while nothing but the nodes' links limits it."""
    placed = Placement(member.twin.layout, member.machine)
    members = placed.members(group)
    nodes = placed.nodes(members)
    sharing = max(
        sum(node in row and len(set(row)) > 1 for row in nodes.tolist())
        for node in range(int(nodes.max()) + 1)
    )
    return Network(member.machine, member.twin.layout).peak(BETWEEN_NODES) / sharing


def _stage_rate(network: Network) -> float:
    """Bytes/s of each rank between the first two stages."""
    few, many = (network.send_seconds(size, from_stage=0, to_stage=1) for size in (LARGE, 2 * LARGE))
    return LARGE / (many - few)


def _open_inside(system: System) -> System:
    """`system` whose links inside a node hold nothing up."""
    name = system.link_inside()
    free = Quantity(value=1e18, source="left out")
    return replace(system, links={**system.links, name: replace(system.links[name], bandwidth=free)})


def inside_rate(system: System) -> float:
    """Bytes/s of one ring of all devices of a node."""
    devices = int(system.devices_per_node.known("devices_per_node", system=system.name))
    return Network(system, Layout(dp=devices)).bus_bandwidth("dp")


def possible(network: EmulatedNetwork, machine: System) -> tuple[EmulatedNetwork, list[str]]:
    """`network` without a limit where this machine is slower than it, and what is to be said of that."""
    most = machine.links["memory"].bandwidth.known("links.memory.bandwidth", system=machine.name)
    wanted = network.within * payload_share(network)
    if wanted <= most:
        return network, []
    times = wanted / most
    return replace(network, within=0.0), [f"within: {times:.1f} times what all ranks get here at once"]


def _alike(one: EmulatedNetwork, other: EmulatedNetwork) -> bool:
    def close(a: float, b: float) -> bool:
        return abs(a - b) <= ALIKE * max(a, b)

    return (
        (one.nodes, one.ranks_per_node) == (other.nodes, other.ranks_per_node)
        and close(one.between, other.between)
        and close(one.within, other.within)
    )
