"""Derivation of a twin: scaled-down experiments on an emulated network that preserves their throughput ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import geometric_mean

from repro.accuracy.twins.scaling import Scale, TwinShape, scaled_model, shape_of, width_near
from repro.config import EmulatedNetwork, Experiment, Layout, Training
from repro.config.engines import NATIVE
from repro.config.errors import ConfigError
from repro.config.layout import ELEMENT_BYTES
from repro.config.quantity import Quantity
from repro.config.system import System
from repro.emulate.network import payload_share
from repro.measure.local_system import load_system
from repro.model import counts
from repro.simulate.placement import BETWEEN_NODES, Placement, group_members
from repro.simulate.time.emulated import emulated_system, product_rate
from repro.simulate.time.network import Network
from repro.simulate.time.predict import Prediction, predict
from repro.simulate.time.program import KINDS, OPTIMIZER
from repro.simulate.trace.roles import trace_roles

LARGE_MESSAGE_BYTES = 2**30
"""Size, in bytes, of a message with negligible latency."""
MAX_RATE_DIFFERENCE = 0.02
"""Maximum relative difference of link rates at which two scaled-down experiments share one emulated network. The
rates of emulated links are less accurate."""


@dataclass(frozen=True)
class TwinOptions:
    """Options of `repro twin`: sizes of the scaled-down experiments that the similarity rules do not determine."""

    ranks: int = 16
    part: int = 8
    """Approximate ratio of the published model's width to the width of the scaled-down model, 1/k."""
    width: int = 0
    """Model width of the scaled-down experiments; 0 derives the width from the ratio `part`."""
    layers: int = 4
    """Minimum number of layers of the scaled-down model; rounded up to a multiple of the pipeline stages."""
    steps: int = 10
    """Number of training steps of each scaled-down experiment; the first step is not timed."""
    tp: int = 0
    """Tensor-parallel degree of all scaled-down experiments; 0 selects the largest possible degree."""
    within: float = 0.0
    """Bandwidth per device inside a node of the published system, in bytes/s; 0: as in the file of that system."""
    between: float = 0.0
    """Bandwidth of a node of the published system to other nodes, in bytes/s; 0: as in the file of that system."""


@dataclass
class Member:
    """Published experiment of a comparison, its system, and its scaled-down twin."""

    original: Experiment
    system: System
    shape: TwinShape
    twin: Experiment
    machine: System
    """System on which the scaled-down twin runs, including its emulated network."""

    @cached_property
    def before(self) -> Prediction:
        """Return the predicted step of the published experiment, run by this project's native engine."""
        return predict(replace(self.original, engine=NATIVE), self.system)

    @cached_property
    def after(self) -> Prediction:
        """Return the predicted step of the scaled-down twin on its emulated network, run by the native engine."""
        own = replace(self.twin, engine=NATIVE)
        return predict(own, self.machine, trace_roles(own, gloo=True))

    @property
    def network(self) -> EmulatedNetwork:
        """Return the emulated network on which the scaled-down twin runs."""
        assert self.twin.network is not None
        return self.twin.network


@dataclass
class Twin:
    """Scaled-down copy of a comparison of published experiments; the first member is the baseline."""

    members: list[Member]
    scales: list[Scale]
    """Ratios of scaled-down sizes to original sizes, for each experiment of the comparison."""
    unlimited: list[str] = field(default_factory=list)
    """Messages about link rates that are too high for the machine, so that the links have no rate limit."""

    @property
    def together(self) -> list[Member]:
        """Return the baseline and the experiments that one launch can interleave, since their networks are equal."""
        return [member for member in self.members if member.network == self.members[0].network]


def compute_s(prediction: Prediction) -> float:
    """Return the slowest stage's seconds of forward and backward compute, as if no collective ran at the same time."""
    return sum(s for kind, s in prediction.slowest.busy.items() if kind in KINDS and kind != OPTIMIZER)


def useful_rate(prediction: Prediction) -> float:
    """Return F, the FLOP/s of a device during forward and backward compute."""
    e, layout = prediction.experiment, prediction.experiment.layout
    work = counts.hardware_flops(e.model, e.seq, layout.global_batch, layout.recompute)
    return work / layout.world / compute_s(prediction)


def derive(originals: Sequence[Experiment], machine: System, options: TwinOptions) -> Twin:
    """Return the scaled-down twin of a comparison on `machine`, which `repro calibrate` measured with all ranks.

    Raises:
        ConfigError: The number of ranks or a degree does not fit the original experiments.
    """
    members, scales = [], []
    on = [with_links(load_system(original.system), options) for original in originals]
    shapes = [shape_of(o.layout, s, options.ranks, tp=options.tp) for o, s in zip(originals, on, strict=True)]
    widest = max(4, *(shape.tp for shape in shapes))  # every tp degree must divide the number of heads
    for original, system, shape in zip(originals, on, shapes, strict=True):
        if shape.nodes * shape.per_node != options.ranks:
            right = f"{shape.nodes * shape.per_node}, to which the ranks of {original.name} scale down"
            raise ConfigError("--ranks", options.ranks, right)
        twin = scaled_experiment(original, shape, widest, options)
        fast = 1e12 if shape.nodes > 1 else 0.0
        probe = EmulatedNetwork(nodes=shape.nodes, ranks_per_node=shape.per_node, between=fast)
        twin = replace(twin, network=probe)
        members.append(Member(original, system, shape, twin, emulated_system(machine, probe)))
        scales.append(scale_of(original, twin))
    rate = geometric_mean([useful_rate(m.after) / useful_rate(m.before) for m in members])
    scales = [replace(scale, rate=rate) for scale in scales]
    wanted = [network_of(m, scale) for m, scale in zip(members, scales, strict=True)]
    wanted = [next(first for first in wanted if _alike(first, network)) for network in wanted]
    found, unlimited = [], []
    for member, network in zip(members, wanted, strict=True):
        network, reasons = limit_to_machine(network, machine)
        network = replace(network, flops_per_s=product_rate(machine))
        unlimited += [text for text in reasons if text not in unlimited]
        twin = replace(member.twin, network=network)
        found.append(replace(member, twin=twin, machine=emulated_system(machine, network)))
    return Twin(found, scales, unlimited)


def with_links(system: System, options: TwinOptions) -> System:
    """Return `system` with the link bandwidths of the command's `options`, of which collectives then reach 100 %."""
    links = dict(system.links)
    for name, rate in ((system.link_inside(), options.within), (BETWEEN_NODES, options.between)):
        if rate and name in links:
            given = Quantity(value=rate, source="option of repro twin")
            links[name] = replace(links[name], bandwidth=given, efficiency=replace(given, value=1.0))
    return replace(system, links=links)


def scaled_experiment(original: Experiment, shape: TwinShape, tp: int, options: TwinOptions) -> Experiment:
    """Return the scaled-down twin of an experiment, without dropout and without an emulated network.

    The sizes of the twin's model are multiples of `tp`.
    """
    before, layout = original.model, shape.layout(original.layout)
    width = options.width or width_near(before, options.part, tp)
    parts = layout.pp * layout.chunks
    layers = -(-options.layers // parts) * parts
    name = f"{before.name}-twin-{width}x{layers}-tp{tp}"
    model = scaled_model(before, original.seq, name=name, width=width, layers=layers, tp=tp)
    sizes = counts.total_parameters(model) / counts.total_parameters(before) * original.layout.tp / layout.tp
    sizes *= ELEMENT_BYTES["fp32"] / original.layout.grad_bytes
    layout = replace(layout, bucket_bytes=max(1, round(layout.bucket_bytes * sizes)))
    training = Training(steps=options.steps, untimed_steps=1)
    name = f"{original.name}-twin"
    return Experiment(name=name, model=model, layout=layout, training=training, engine=original.engine)


def scale_of(original: Experiment, twin: Experiment) -> Scale:
    """Return the size ratios of a scaled-down twin to its original; compute rates are taken as equal (ratio 1)."""
    element = ELEMENT_BYTES[twin.layout.precision] / ELEMENT_BYTES[original.layout.precision]
    return Scale(twin.model.hidden / original.model.hidden, twin.seq / original.seq, element)


def network_of(member: Member, scale: Scale) -> EmulatedNetwork:
    """Return the emulated network on which a scaled-down twin has the dimensionless numbers of the original."""
    before, after, shape = member.original.layout, member.twin.layout, member.shape
    real, probe = Network(member.system, before), Network(member.machine, after)
    layers = member.original.model.layers, member.twin.model.layers
    factors = {
        "tp": scale.tp_link(before, after),
        "dp": scale.dp_link(before, after),
        "pp": scale.pp_link(before, after, layers),
    }
    within = between = 0.0
    # If several groups use a link, the rate for tp overwrites the others, because tp communication cannot overlap.
    for group in ("dp", "pp", "tp"):
        if not factors[group]:
            continue
        rate = (_stage_rate(real) if group == "pp" else real.bus_bandwidth(group)) * factors[group]
        if probe.link(group) == BETWEEN_NODES:
            unlimited = _stage_rate(probe) if group == "pp" else _across(member, group)
            # `rate` is the ring's rate if only links between nodes limit it. `within` limits the links inside nodes.
            if group != "pp":
                rate = Network(_open_inside(member.system), before).bus_bandwidth(group) * factors[group]
            between = rate * probe.peak(BETWEEN_NODES) / unlimited
            if _ring_inside(member, group):
                within = inside_rate(member.system) * factors[group]
        else:
            within = rate
    # Links between nodes always need a rate, because small all-reduces span all ranks.
    between = between or (1e8 if shape.nodes > 1 else 0.0)
    bare = EmulatedNetwork(nodes=shape.nodes, ranks_per_node=shape.per_node, between=between, within=within)
    share = payload_share(bare)
    # Rates include packet headers. Four digits suffice, since the rate limiter is less accurate.
    between, within = (float(f"{rate / share:.4g}") for rate in (bare.between, bare.within))
    return replace(bare, between=between, within=within)


def _ring_inside(member: Member, group: str) -> bool:
    """Return whether a ring has several ranks on a node, so that some hops of the ring do not leave the node."""
    placed = Placement(member.twin.layout, member.machine)
    nodes = placed.nodes(group_members(placed.layout, group))
    return group != "pp" and len(set(nodes[0].tolist())) < nodes.shape[1]


def _across(member: Member, group: str) -> float:
    """Return the bandwidth of a group's ring, in bytes/s, if only the links between nodes limit the ring."""
    placed = Placement(member.twin.layout, member.machine)
    members = group_members(placed.layout, group)
    nodes = placed.nodes(members)
    spread = [set(row) for row in nodes.tolist() if len(set(row)) > 1]
    sharing = max(sum(node in row for row in spread) for node in range(int(nodes.max()) + 1))
    return Network(member.machine, member.twin.layout).peak(BETWEEN_NODES) / sharing


def _stage_rate(network: Network) -> float:
    """Return the rate, in bytes/s, at which each rank of the first pipeline stage sends to the second stage."""
    sizes = (LARGE_MESSAGE_BYTES, 2 * LARGE_MESSAGE_BYTES)
    few, many = (network.send_seconds(size, from_stage=0, to_stage=1) for size in sizes)
    return LARGE_MESSAGE_BYTES / (many - few)


def _open_inside(system: System) -> System:
    """Return `system` with links of unlimited bandwidth inside a node."""
    name = system.link_inside()
    free = Quantity(value=1e18, source="unlimited")
    return replace(system, links={**system.links, name: replace(system.links[name], bandwidth=free)})


def inside_rate(system: System) -> float:
    """Return the bandwidth of a ring over all devices of a node, in bytes/s."""
    devices = int(system.devices_per_node.known("devices_per_node", system=system.name))
    return Network(system, Layout(dp=devices)).bus_bandwidth("dp")


def limit_to_machine(network: EmulatedNetwork, machine: System) -> tuple[EmulatedNetwork, list[str]]:
    """Return `network`, without a limit inside nodes if this machine is slower than that limit, and the reason."""
    most = machine.links["memory"].bandwidth.known("links.memory.bandwidth", system=machine.name)
    wanted = network.within * payload_share(network)
    if wanted <= most:
        return network, []
    times = wanted / most
    reason = f"links inside a node need {times:.1f} times the bytes/s that all ranks reach on this machine"
    return replace(network, within=0.0), [reason]


def _alike(one: EmulatedNetwork, other: EmulatedNetwork) -> bool:
    rates = ((one.between, other.between), (one.within, other.within))
    same = (one.nodes, one.ranks_per_node) == (other.nodes, other.ranks_per_node)
    return same and all(abs(a - b) <= MAX_RATE_DIFFERENCE * max(a, b) for a, b in rates)
