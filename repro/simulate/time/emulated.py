"""An emulated network as a system: the operators of a calibrated machine, joined by links of the rates asked for.

No step with messages enters, and no collective behind a link: operators, copies, single messages, a ring of all ranks
without links and steps without messages were measured by `repro calibrate` with as many ranks at once, and a link
brings what its token bucket lets through.  gloo sends a rank's
part of a ring in two segments, so that one is on its link while the other is handled (gloo/allreduce.cc).  So a step
takes what its link needs and then what the cores need for the small segments of all ranks, which come at once; or what
the cores need for the messages of all ranks, if that is more.
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
"""The collective that goes round all ranks in one ring."""
RING_SEGMENTS = 2
"""In which gloo sends a rank's part of a message, at least."""
MESSAGE_CORES_FACT = "cores_for_messages"
"""The fact of a calibrated file that says how many cores carried messages while the others computed."""
PROCESS_LINK = "memory"
"""The class of links between processes of one machine, which a rank's own link stands for here."""


def emulated_system(machine: System, network: EmulatedNetwork) -> System:
    """`machine` (a file of `repro calibrate --system local`) as ranks on `network`.

    Each rank has its part of a core to itself, whatever the others wait for: `CORES_SHARE` of what it had when the file
    was measured.  Links are scaled to it as those of a run are.  Raises `ConfigError` if the file was measured with
    another number of ranks, or not on the cores that ranks of a network compute on.
    """
    network = scale_network(network, machine)
    measured = machine.provenance
    if measured is None or PROCESS_LINK not in machine.links or measured.ranks != network.world:
        count = "none" if measured is None else measured.ranks
        right = f"measured with {network.world} ranks: repro calibrate --system local --gpus {network.world}"
        raise ConfigError("machine", f"{machine.name} ({count} ranks)", right)
    if not measured.facts.get(MESSAGE_CORES_FACT):
        right = "measured where ranks of a network compute, on half of the cores: repro calibrate --suite SUITE.toml"
        raise ConfigError("machine", machine.name, right)
    here = machine.links[PROCESS_LINK]
    most = here.bandwidth.known(f"links.{PROCESS_LINK}.bandwidth", system=machine.name)
    if RING_COLLECTIVE not in here.collectives:
        right = "measured with a ring of all ranks, as repro calibrate does now: calibrate anew"
        raise ConfigError("machine", machine.name, right)
    hop = ring_step_times(here.collectives[RING_COLLECTIVE], network.world)
    latency = sourced_quantity(
        hop.points[0][1] / RING_SEGMENTS, "the cores' time for a small segment of a ring's step, of all ranks"
    )
    cost = here.used(PROCESS_LINK, "overlap_cost").value or 0.0
    share = payload_share(network)
    inside = min(most, network.within * share) if network.within else most

    def link(per: str, rate: float, ranks: int) -> Link:
        # What a message costs the cores goes with its bytes: a slow one leaves them to the products beside it.
        lost = cost * min(1.0, rate / (ranks * most))
        return Link(
            per=per,
            bandwidth=sourced_quantity(
                rate, "the token bucket's rate less headers, or what the machine brings"
            ),
            latency_s=latency,
            start_s=sourced_quantity(0.0, "in the latency of its messages"),
            efficiency=sourced_quantity(1.0, "headers are taken off the bandwidth"),
            overlap_cost=sourced_quantity(
                lost, "measured beside unlimited messages, in proportion to the rate"
            ),
            adapters=sourced_quantity(1, "a node has one link"),
            rings=sourced_quantity(1, "a node has one link"),
            hop=hop,
        )

    links = {PROCESS_LINK: link("device", inside, 1)}
    if network.nodes > 1:
        between = min(network.between * share, network.ranks_per_node * inside)
        links[BETWEEN_NODES] = link("node", between, network.ranks_per_node)
    operators = {name: rate.slowed(1 / CORES_SHARE) for name, rate in machine.device.operators.items()}
    jitter_s = sourced_quantity(
        machine.timing.jitter_s / CORES_SHARE, "measured, and longer as operators are"
    )
    return replace(
        machine,
        device=replace(
            machine.device, operators=operators, time=replace(machine.device.time, jitter_s=jitter_s)
        ),
        name=f"{machine.name}-emulated",
        devices_per_node=sourced_quantity(network.ranks_per_node, "the emulated network"),
        nodes=sourced_quantity(network.nodes, "the emulated network"),
        links=links,
        provenance=replace(measured, cores=0),
    )


def scale_network(network: EmulatedNetwork, machine: System) -> EmulatedNetwork:
    """`network` where ranks compute as those of `machine`, as `repro.launch.local_launch` starts it there.

    Raises `ConfigError` if the rates hold for a rate of compute and the machine's file does not say its own.
    """
    if not network.flops_per_s:
        return network
    rate = product_rate(machine)
    if not rate:
        right = f"with {COMPUTE_RATE_FACT}, to which links are scaled, as repro calibrate measures now: calibrate anew"
        raise ConfigError("machine", machine.name, right)
    return network.scaled(rate)


def product_rate(machine: System) -> float:
    """FLOP/s of a rank's matrix products, held to its share of a core; 0 where the machine's file does not have it."""
    return float(machine.provenance.facts.get(COMPUTE_RATE_FACT, 0.0)) if machine.provenance else 0.0


def ring_step_times(ring: Collective, ranks: int) -> Collective:
    """Seconds of one step of a measured all-reduce of all `ranks`, by what each of them passes on in it."""
    steps = (ranks - 1) * RING_PASSES[RING_COLLECTIVE]
    return Collective(points=tuple((payload / ranks, seconds / steps) for payload, seconds in ring.points))


def sourced_quantity(value: float, source: str) -> Quantity:
    """A number and where it comes from."""
    return Quantity(value=value, source=source)
