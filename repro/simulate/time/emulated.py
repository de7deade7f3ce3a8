"""System of an emulated network: the operators of a calibrated CPU machine, with links of the network's rates.

Gloo sends a rank's part of a ring step in two segments, so that the link transfers one while the CPU cores process the
other (gloo/allreduce.cc). A ring step therefore takes the longer of two times: link plus cores for one small segment,
or cores for all messages. No number comes from a step with messages or from a collective on an emulated link.
"""

from __future__ import annotations

from dataclasses import replace

from repro.config import EmulatedNetwork
from repro.config.errors import ConfigError
from repro.config.links import Collective, Link
from repro.config.network import CORES_SHARE
from repro.config.quantity import Quantity
from repro.config.system import System
from repro.emulate.compute_rate import COMPUTE_RATE_FACT
from repro.emulate.network import payload_share
from repro.parallel.ledger import RING_PASSES
from repro.simulate.placement import BETWEEN_NODES

RING_COLLECTIVE = "all_reduce"
"""Name of the measured collective for which gloo uses one ring of all ranks."""
RING_SEGMENTS = 2
"""Minimum number of segments in which gloo sends a rank's part of a ring step."""
MESSAGE_CORES_FACT = "cores_for_messages"
"""Key in a calibrated machine's file: number of cores that processed messages while other cores computed."""
PROCESS_LINK = "memory"
"""Class of links between processes of one machine; in an emulated network, the class of links inside a node."""


def emulated_system(machine: System, network: EmulatedNetwork) -> System:
    """Return a system with the operators of `machine` (`repro calibrate --system local`) and the links of `network`.

    Operators are slower than measured, because emulated ranks use only the fraction `CORES_SHARE` of each core. Raises
    `ConfigError` if `machine` was measured with another number of ranks, or on other cores than emulated ranks use.
    """
    network = scale_network(network, machine)
    measured = machine.provenance
    if measured is None or PROCESS_LINK not in machine.links or measured.ranks != network.world:
        count = "none" if measured is None else measured.ranks
        right = f"measured with {network.world} ranks: repro calibrate --system local --gpus {network.world}"
        raise ConfigError("machine", f"{machine.name} ({count} ranks)", right)
    if not measured.facts.get(MESSAGE_CORES_FACT):
        right = "measured on the half of the cores on which ranks compute: repro calibrate --suite SUITE.toml"
        raise ConfigError("machine", machine.name, right)
    here = machine.links[PROCESS_LINK]
    most = here.bandwidth.known(f"links.{PROCESS_LINK}.bandwidth", system=machine.name)
    if RING_COLLECTIVE not in here.collectives:
        right = f"a file with times of {RING_COLLECTIVE} on all ranks: run repro calibrate again"
        raise ConfigError("machine", machine.name, right)
    hop = ring_step_times(here.collectives[RING_COLLECTIVE], network.world)
    latency = Quantity(
        value=hop.points[0][1] / RING_SEGMENTS,
        source="the cores' time for a small segment of a ring's step, of all ranks",
    )
    cost = here.used(PROCESS_LINK, "overlap_cost").value or 0.0
    share = payload_share(network)
    inside = min(most, network.within * share) if network.within else most

    def link(per: str, rate: float, ranks: int) -> Link:
        # The cores' time for messages is proportional to bytes, so a slow link leaves more core time for compute.
        lost = cost * min(1.0, rate / (ranks * most))
        return Link(
            per=per,
            bandwidth=Quantity(
                value=rate, source="the token bucket's rate less headers, or what the machine brings"
            ),
            latency_s=latency,
            start_s=Quantity(value=0.0, source="in the latency of its messages"),
            efficiency=Quantity(value=1.0, source="headers are taken off the bandwidth"),
            overlap_cost=Quantity(
                value=lost, source="measured during unlimited messages, in proportion to the rate"
            ),
            adapters=Quantity(value=1, source="a node has one link"),
            rings=Quantity(value=1, source="a node has one link"),
            hop=hop,
        )

    links = {PROCESS_LINK: link("device", inside, 1)}
    if network.nodes > 1:
        between = min(network.between * share, network.ranks_per_node * inside)
        links[BETWEEN_NODES] = link("node", between, network.ranks_per_node)
    operators = {name: rate.slowed(1 / CORES_SHARE) for name, rate in machine.device.operators.items()}
    jitter_s = Quantity(
        value=machine.timing.jitter_s / CORES_SHARE, source="measured, and longer as operators are"
    )
    return replace(
        machine,
        device=replace(
            machine.device, operators=operators, time=replace(machine.device.time, jitter_s=jitter_s)
        ),
        name=f"{machine.name}-emulated",
        devices_per_node=Quantity(value=network.ranks_per_node, source="the emulated network"),
        nodes=Quantity(value=network.nodes, source="the emulated network"),
        links=links,
        provenance=replace(measured, cores=0),
    )


def scale_network(network: EmulatedNetwork, machine: System) -> EmulatedNetwork:
    """Return `network` with links scaled to the compute rate of `machine`, as in a launch of real ranks.

    Raises `ConfigError` if the network's rates are relative to a compute rate and the machine's file has none.
    """
    if not network.flops_per_s:
        return network
    rate = product_rate(machine)
    if not rate:
        right = f"a file with the key {COMPUTE_RATE_FACT}, which scales links: run repro calibrate again"
        raise ConfigError("machine", machine.name, right)
    return network.scaled(rate)


def product_rate(machine: System) -> float:
    """Return the measured FLOP/s of a rank's matrix products on its share of a core; 0 if the file has no such rate."""
    return float(machine.provenance.facts.get(COMPUTE_RATE_FACT, 0.0)) if machine.provenance else 0.0


def ring_step_times(ring: Collective, ranks: int) -> Collective:
    """Return points (bytes that a rank forwards, seconds) of one ring step, from all-reduces of `ranks` ranks."""
    steps = (ranks - 1) * RING_PASSES[RING_COLLECTIVE]
    return Collective(points=tuple((payload / ranks, seconds / steps) for payload, seconds in ring.points))
