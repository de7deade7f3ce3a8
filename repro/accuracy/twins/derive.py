"""Derivation of a twin: smaller experiments, and the emulated network that keeps their ratio."""

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
"""Size of a message whose latency is negligible, in bytes."""
MAX_RATE_DIFFERENCE = 0.02
"""Relative difference up to which two rates count as one network: below the accuracy of measured links."""


@dataclass(frozen=True)
class TwinOptions:
    """Free parameters of a twin."""

    ranks: int = 16
    part: int = 8
    """Approximate ratio of widths, 1/k."""
    width: int = 0
    """Width of the twin's model; 0 derives it from `part`."""
    layers: int = 4
    """Minimum layers of the twin's model; rounded up to a multiple of the stages."""
    steps: int = 10
    """Steps of each experiment; the first is not timed."""
    tp: int = 0
    """Tensor-parallel degree of every member; 0 selects the largest possible degree."""
    within: float = 0.0
    """Bandwidth inside a node of the originals, in bytes/s; 0 takes the system file's."""
    between: float = 0.0
    """Bandwidth of a node of the originals, in bytes/s; 0 takes the system file's."""


@dataclass
class Member:
    """One experiment and its twin."""

    original: Experiment
    system: System
    shape: TwinShape
    twin: Experiment
    machine: System
    """System of the twin, with its network."""

    @cached_property
    def before(self) -> Prediction:
        """Return the prediction of the original, with the native engine."""
        return predict(replace(self.original, engine=NATIVE), self.system)

    @cached_property
    def after(self) -> Prediction:
        """Return the prediction of the twin on its emulated network, with the native engine."""
        own = replace(self.twin, engine=NATIVE)
        return predict(own, self.machine, trace_roles(own, gloo=True))

    @property
    def network(self) -> EmulatedNetwork:
        """Return the network of the twin."""
        assert self.twin.network is not None
        return self.twin.network


@dataclass
class Twin:
    """Scaled comparison; the first member is the baseline."""

    members: list[Member]
    scales: list[Scale]
    """Scale of each member."""
    unlimited: list[str] = field(default_factory=list)
    """Messages about links that exceed the rate of this machine."""

    @property
    def together(self) -> list[Member]:
        """Return the members on the baseline's network, which can run interleaved; the baseline is the first."""
        return [member for member in self.members if member.network == self.members[0].network]


def compute_s(prediction: Prediction) -> float:
    """Return the compute seconds of the slowest stage, forward and backward, without slowdown by communication."""
    return sum(s for kind, s in prediction.slowest.busy.items() if kind in KINDS and kind != OPTIMIZER)


def useful_rate(prediction: Prediction) -> float:
    """Return F, the FLOP/s of a device during compute."""
    e, layout = prediction.experiment, prediction.experiment.layout
    work = counts.hardware_flops(e.model, e.seq, layout.global_batch, layout.recompute)
    return work / layout.world / compute_s(prediction)


def derive(originals: Sequence[Experiment], machine: System, options: TwinOptions) -> Twin:
    """Return the twin of `originals` on `machine`, a system file of `repro calibrate` for `options.ranks` ranks.

    Raises:
        ConfigError: The ranks or degrees do not fit the originals.
    """
    members, scales = [], []
    on = [with_links(load_system(original.system), options) for original in originals]
    shapes = [shape_of(o.layout, s, options.ranks, tp=options.tp) for o, s in zip(originals, on, strict=True)]
    widest = max(4, *(shape.tp for shape in shapes))  # one model for all: its heads divide by every degree
    for original, system, shape in zip(originals, on, shapes, strict=True):
        if shape.nodes * shape.per_node != options.ranks:
            right = f"the ranks of every member: {original.name} has {shape.nodes * shape.per_node}"
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
    """Return `system` with the bandwidths of `options`, which count for collectives without a loss."""
    links = dict(system.links)
    for name, rate in ((system.link_inside(), options.within), (BETWEEN_NODES, options.between)):
        if rate and name in links:
            given = Quantity(value=rate, source="asked for")
            links[name] = replace(links[name], bandwidth=given, efficiency=replace(given, value=1.0))
    return replace(system, links=links)


def scaled_experiment(original: Experiment, shape: TwinShape, tp: int, options: TwinOptions) -> Experiment:
    """Return `original` with the twin's sizes and degrees, without dropout and without a network.

    `tp` divides the sizes of the model.
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
    """Return the scale of `twin`, without its rate."""
    element = ELEMENT_BYTES[twin.layout.precision] / ELEMENT_BYTES[original.layout.precision]
    return Scale(twin.model.hidden / original.model.hidden, twin.seq / original.seq, element)


def network_of(member: Member, scale: Scale) -> EmulatedNetwork:
    """Return the network on which the rate of every group's ring keeps its dimensionless number."""
    before, after, shape = member.original.layout, member.twin.layout, member.shape
    real, probe = Network(member.system, before), Network(member.machine, after)
    layers = member.original.model.layers, member.twin.model.layers
    factors = {
        "tp": scale.tp_link(before, after),
        "dp": scale.dp_link(before, after),
        "pp": scale.pp_link(before, after, layers),
    }
    within = between = 0.0
    for group in ("dp", "pp", "tp"):  # the last one decides: tp communication cannot be hidden
        if not factors[group]:
            continue
        rate = (_stage_rate(real) if group == "pp" else real.bus_bandwidth(group)) * factors[group]
        if probe.link(group) == BETWEEN_NODES:
            unlimited = _stage_rate(probe) if group == "pp" else _across(member, group)
            if group != "pp":  # the nodes' link by itself: hops inside a node have `within`
                rate = Network(_open_inside(member.system), before).bus_bandwidth(group) * factors[group]
            between = rate * probe.peak(BETWEEN_NODES) / unlimited
            if _ring_inside(member, group):
                within = inside_rate(member.system) * factors[group]
        else:
            within = rate
    # A link that no group needs carries the small sums over all ranks.
    between = between or (1e8 if shape.nodes > 1 else 0.0)
    bare = EmulatedNetwork(nodes=shape.nodes, ranks_per_node=shape.per_node, between=between, within=within)
    share = payload_share(bare)  # headers come on top
    # Four digits are beyond the accuracy of a token bucket.
    between, within = (float(f"{rate / share:.4g}") for rate in (bare.between, bare.within))
    return replace(bare, between=between, within=within)


def _ring_inside(member: Member, group: str) -> bool:
    """Return whether rings of `group` that leave a node also have hops inside it."""
    placed = Placement(member.twin.layout, member.machine)
    nodes = placed.nodes(group_members(placed.layout, group))
    return group != "pp" and len(set(nodes[0].tolist())) < nodes.shape[1]


def _across(member: Member, group: str) -> float:
    """Return the bytes/s of a ring of `group` that only the nodes' links limit."""
    placed = Placement(member.twin.layout, member.machine)
    members = group_members(placed.layout, group)
    nodes = placed.nodes(members)
    spread = [set(row) for row in nodes.tolist() if len(set(row)) > 1]
    sharing = max(sum(node in row for row in spread) for node in range(int(nodes.max()) + 1))
    return Network(member.machine, member.twin.layout).peak(BETWEEN_NODES) / sharing


def _stage_rate(network: Network) -> float:
    """Return the bytes/s of each rank between the first two stages."""
    sizes = (LARGE_MESSAGE_BYTES, 2 * LARGE_MESSAGE_BYTES)
    few, many = (network.send_seconds(size, from_stage=0, to_stage=1) for size in sizes)
    return LARGE_MESSAGE_BYTES / (many - few)


def _open_inside(system: System) -> System:
    """Return `system` with unlimited links inside a node."""
    name = system.link_inside()
    free = Quantity(value=1e18, source="left out")
    return replace(system, links={**system.links, name: replace(system.links[name], bandwidth=free)})


def inside_rate(system: System) -> float:
    """Return the bytes/s of one ring of all devices of a node."""
    devices = int(system.devices_per_node.known("devices_per_node", system=system.name))
    return Network(system, Layout(dp=devices)).bus_bandwidth("dp")


def limit_to_machine(network: EmulatedNetwork, machine: System) -> tuple[EmulatedNetwork, list[str]]:
    """Return `network` without a limit inside nodes if the machine is slower, and a message for that case."""
    most = machine.links["memory"].bandwidth.known("links.memory.bandwidth", system=machine.name)
    wanted = network.within * payload_share(network)
    if wanted <= most:
        return network, []
    times = wanted / most
    return replace(network, within=0.0), [f"within: {times:.1f} times what all ranks get here at once"]


def _alike(one: EmulatedNetwork, other: EmulatedNetwork) -> bool:
    rates = ((one.between, other.between), (one.within, other.within))
    same = (one.nodes, one.ranks_per_node) == (other.nodes, other.ranks_per_node)
    return same and all(abs(a - b) <= MAX_RATE_DIFFERENCE * max(a, b) for a, b in rates)
