"""Interfaces, switches and token buckets of an emulated network, made over netlink.

Every rank has a link to its node's switch, every node one to the switch between the nodes::

    rank 0 eth0 -- port0 [node 0] uplink -- port0 [core] port1 -- uplink [node 1] port0 -- eth0 rank 2
    rank 1 eth0 -- port1 [node 0]                                 [node 1] port1 -- eth0 rank 3

A token bucket at either end of a link holds what is sent from there: of a rank's link, what the rank sends and what it
receives; of a node's, what its ranks send to other nodes and what they receive from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute, NetlinkError

from repro.config import EmulatedNetwork
from repro.emulate.frames import ETHERNET, LEAST_MTU, mtu, piece, window
from repro.emulate.namespaces import Namespace

WAKE_S = 300e-6
"""How late the kernel may wake a bucket: what it holds beyond a frame keeps the rate then."""
QUEUE_BYTES = 1 << 28
"""More than all sockets can have under way: nothing is dropped, as on networks with flow control."""
SUBNET = "10.77"
UPLINK, OWN = "uplink", "eth0"
"""The interface of a node, and of a rank."""


class Place:
    """A namespace and the way to configure it."""

    def __init__(self, window: int) -> None:
        self.namespace = Namespace()
        with self.namespace.inside():
            self.netlink = IPRoute()
            _quiet(window)
        self._bridge = 0
        self._up("lo")

    def _up(self, name: str, **settings: Any) -> int:
        index = int(self.netlink.link_lookup(ifname=name)[0])
        self.netlink.link("set", index=index, state="up", **settings)
        return index

    def switch(self) -> None:
        """Make it a switch."""
        self.netlink.link("add", ifname="switch", kind="bridge")
        self._bridge = self._up("switch")

    def join(self, name: str, other: Place, its_name: str, **settings: int) -> tuple[int, int]:
        """A link from this switch to `other`, which may be one; the interfaces here and there."""
        peer = {"ifname": its_name, "net_ns_fd": other.namespace.descriptor}
        self.netlink.link("add", ifname=name, kind="veth", peer=peer)
        here = self._up(name, master=self._bridge, **settings)
        there = other._up(its_name, **({"master": other._bridge} if other._bridge else {}), **settings)
        return here, there


def _quiet(window: int) -> None:
    """Nothing but what ranks send: no IPv6, no pace of TCP's own, and nothing sent twice since it is late.

    A window of `window` bytes bounds queues, in which acknowledgements wait behind data of the other direction.
    """
    for key, value in (
        ("ipv4/tcp_rmem", f"4096 {2 * window} {2 * window}"),
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
        ("ipv4/tcp_congestion_control", "reno"),
        ("ipv4/tcp_slow_start_after_idle", "0"),
        ("ipv4/tcp_no_metrics_save", "1"),
        ("ipv4/tcp_early_retrans", "0"),
        ("ipv4/tcp_rto_min_us", "2000000"),
    ):
        file = Path("/proc/sys/net", key)
        if file.exists():
            file.write_text(value)


def _at_once(rank: Place, device: int, packets: int) -> None:
    """Have streams start with a full window: nothing here is lost, and there is nothing to probe for."""
    metrics = {"attrs": [("RTAX_INITCWND", packets), ("RTAX_INITRWND", packets)]}
    rank.netlink.route(
        "replace", dst=f"{SUBNET}.0.0/16", oif=device, scope=253, proto="kernel", metrics=metrics
    )


@dataclass(frozen=True)
class End:
    """One end of a link."""

    place: Place
    device: int
    rate: float
    """Bytes/s that what is sent from it is held to."""
    frame: int
    """Bytes of the largest frame that is sent from it."""
    delay_s: float = 0.0
    """Added to each of them."""

    @property
    def burst(self) -> int:
        """Bytes of the bucket: a frame, and what comes until the kernel wakes up.

        A message of `n` bytes takes `(n - burst) / rate` and the latency: a larger bucket would let short messages
        pass at no cost, a smaller one would lose the rate.
        """
        return round(self.frame + self.rate * WAKE_S)

    def hold(self) -> None:
        """Keep the rate."""
        settings = {"rate": round(self.rate), "burst": self.burst, "limit": QUEUE_BYTES}
        self.place.netlink.tc("add", "tbf", self.device, handle="1:", **settings)
        if self.delay_s:
            delay = {"delay": round(self.delay_s * 1e6), "limit": QUEUE_BYTES // LEAST_MTU}
            try:
                self.place.netlink.tc("add", "netem", self.device, parent="1:1", handle="2:", **delay)
            except NetlinkError as error:
                right = (
                    f"delay_s = {self.delay_s:g} needs a kernel with netem (CONFIG_NET_SCH_NETEM): {error}"
                )
                raise OSError(right) from None

    def let_go(self) -> None:
        """Undo `hold`."""
        self.place.netlink.tc("del", index=self.device, root=True)


def address(network: EmulatedNetwork, rank: int) -> str:
    """Of a rank: each node has a subnet."""
    return f"{SUBNET}.{network.node_of(rank)}.{rank % network.ranks_per_node + 1}"


class Links:
    """All places of a network and the links between them, not held to any rate yet."""

    def __init__(self, network: EmulatedNetwork):
        self.network = network
        packet, whole = mtu(network), piece(network)
        frame, own_frame = packet + ETHERNET, whole + ETHERNET
        queued = window(network)
        core = Place(queued)
        core.switch()
        self.nodes: list[Place] = []
        self.ranks: list[Place] = []
        self.sent: dict[str, list[End]] = {"rank": [], "node": []}
        """Ends that hold what each rank, or node, sends."""
        self.received: dict[str, list[End]] = {"rank": [], "node": []}
        """Ends that hold what each receives."""
        for number in range(network.nodes):
            node = Place(queued)
            node.switch()
            self.nodes.append(node)
            port, uplink = core.join(f"port{number}", node, UPLINK, mtu=packet)
            self.sent["node"].append(End(node, uplink, network.between, frame, network.delay_s))
            self.received["node"].append(End(core, port, network.between, frame))
            for place in range(network.ranks_per_node):
                rank = Place(queued)
                port, own = node.join(f"port{place}", rank, OWN, mtu=packet, gso_max_size=whole)
                rank.netlink.addr("add", index=own, address=address(network, len(self.ranks)), prefixlen=16)
                _at_once(rank, own, queued // packet)
                self.sent["rank"].append(End(rank, own, network.within, own_frame))
                self.received["rank"].append(End(node, port, network.within, own_frame))
                self.ranks.append(rank)

    def ends(self) -> Iterator[End]:
        """All ends that have a rate."""
        for side in (self.sent, self.received):
            for ends in side.values():
                yield from (end for end in ends if end.rate)
