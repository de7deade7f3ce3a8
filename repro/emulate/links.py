"""Network namespaces of an emulated network, and the interfaces, switches and token buckets in them.

Every rank has a link to its node's switch, and every node has a link to the switch between the nodes::

    rank 0 eth0 -- port0 [node 0] uplink -- port0 [core] port1 -- uplink [node 1] port0 -- eth0 rank 2
    rank 1 eth0 -- port1 [node 0]                                 [node 1] port1 -- eth0 rank 3

A token bucket at each end of a link limits the rate of the bytes that this end sends.  A namespace has no name and
exists as long as its process (`Namespace.holder`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute, NetlinkError

from repro.config import EmulatedNetwork
from repro.emulate.network import ETHERNET_BYTES, MIN_MTU, mtu_bytes, segment_bytes, window_bytes
from repro.util.processes import die_with_parent

WAKE_S = 300e-6
"""Maximum delay in seconds until the kernel refills a link's token bucket.  A bucket sustains the link's rate if its
size is one frame plus the bytes that the link sends during this delay."""
QUEUE_BYTES = 1 << 28
"""Capacity of a link's send queue in bytes.  All sockets together have fewer bytes in flight, so no packet is lost."""
SUBNET = "10.77"
UPLINK, RANK_INTERFACE = "uplink", "eth0"
"""Names of an emulated node's network interface to other nodes, and of the network interface of each rank."""
_NEWNET, _NEWUSER = 0x40000000, 0x10000000


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def become_root() -> bool:
    """Move this process to a new network namespace; return whether this needed a user namespace. Raises `OSError`."""
    try:
        _call("unshare", _NEWNET)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _call("unshare", _NEWNET | _NEWUSER)
        for file, line in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{file}", "w") as map_file:
                map_file.write(line)
        return True
    return False


class Namespace:
    """A network namespace that lives as long as `holder`, an idle child of this process."""

    def __init__(self) -> None:
        parent, (here, there) = os.getpid(), socket.socketpair()
        self.holder = os.fork()
        if self.holder == 0:
            with contextlib.suppress(BaseException):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                die_with_parent(parent)
                _call("unshare", _NEWNET)
                there.send(b"+")
                while True:
                    signal.pause()
            os._exit(1)
        there.close()
        with here:
            if not here.recv(1):
                raise OSError("a network namespace could not be created")
        self.descriptor = os.open(f"/proc/{self.holder}/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Move the calling thread to this network namespace inside the context, for new sockets and `/proc/sys/net`."""
        home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("setns", self.descriptor, _NEWNET)
            yield
        finally:
            _call("setns", home, _NEWNET)
            os.close(home)


class Host:
    """Network namespace of one rank or one switch of an emulated network, with its network interfaces."""

    def __init__(self, window: int) -> None:
        self.namespace = Namespace()
        with self.namespace.inside():
            self.netlink = IPRoute()
            _configure_tcp(window)
        self._bridge = 0
        self._up("lo")

    def _up(self, name: str, **settings: Any) -> int:
        index = int(self.netlink.link_lookup(ifname=name)[0])
        self.netlink.link("set", index=index, state="up", **settings)
        return index

    def become_switch(self) -> None:
        """Turn this network namespace into a switch: create a Linux bridge, to which `join` attaches its interfaces."""
        self.netlink.link("add", ifname="switch", kind="bridge")
        self._bridge = self._up("switch")

    def join(self, name: str, other: Host, its_name: str, **settings: int) -> tuple[int, int]:
        """Link this switch to `other`, a rank or a switch, and return the interface indices of both ends."""
        peer = {"ifname": its_name, "net_ns_fd": other.namespace.descriptor}
        self.netlink.link("add", ifname=name, kind="veth", peer=peer)
        here = self._up(name, master=self._bridge, **settings)
        there = other._up(its_name, **({"master": other._bridge} if other._bridge else {}), **settings)
        return here, there


def _configure_tcp(window: int) -> None:
    """Disable IPv6, slow start after idle, and early retransmission, which would add traffic and delays.

    `window` limits the bytes in a link's queue. Long queues would delay acknowledgements of the opposite direction.
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


def _start_with_full_window(rank: Host, device: int, packets: int) -> None:
    """Let TCP streams of `rank` start with a window of `packets`, because no packet is lost on emulated links."""
    metrics = {"attrs": [("RTAX_INITCWND", packets), ("RTAX_INITRWND", packets)]}
    route = {"dst": f"{SUBNET}.0.0/16", "oif": device, "scope": 253, "proto": "kernel"}
    rank.netlink.route("replace", **route, metrics=metrics)


@dataclass(frozen=True)
class End:
    """One end of a link of an emulated network."""

    host: Host
    device: int
    rate: float
    """Maximum send rate of this end of a link, in bytes/s; 0 for no limit."""
    frame: int
    """Size in bytes of the largest frame that this end of a link sends."""
    delay_s: float = 0.0
    """Additional delay of each frame that this end of a link sends, in seconds."""

    @property
    def burst(self) -> int:
        """Return the size of the link's token bucket in bytes: one frame plus the bytes that `rate` allows in `WAKE_S`.

        A message of `n` bytes takes `(n - burst) / rate` and the latency.  A larger bucket would let short messages
        pass without delay, and a smaller bucket would lower the rate.
        """
        return round(self.frame + self.rate * WAKE_S)

    def limit_rate(self) -> None:
        """Limit the send rate of this link end to `rate` by a token bucket on its interface, and add its delay."""
        settings = {"rate": round(self.rate), "burst": self.burst, "limit": QUEUE_BYTES}
        self.host.netlink.tc("add", "tbf", self.device, handle="1:", **settings)
        if self.delay_s:
            delay = {"delay": round(self.delay_s * 1e6), "limit": QUEUE_BYTES // MIN_MTU}
            try:
                self.host.netlink.tc("add", "netem", self.device, parent="1:1", handle="2:", **delay)
            except NetlinkError as error:
                text = f"delay_s = {self.delay_s:g} needs a kernel with netem (CONFIG_NET_SCH_NETEM): {error}"
                raise OSError(text) from None

    def remove_limit(self) -> None:
        """Remove the token bucket and the delay from the network interface of this link end."""
        self.host.netlink.tc("del", index=self.device, root=True)


def address(network: EmulatedNetwork, rank: int) -> str:
    """Return the IPv4 address of a rank.  The last two numbers are its node, and its local rank plus 1."""
    return f"{SUBNET}.{network.node_of(rank)}.{rank % network.ranks_per_node + 1}"


class Links:
    """Ranks, switches and links of an emulated network.  The links have no rate limits until `End.limit_rate`."""

    def __init__(self, network: EmulatedNetwork):
        self.network = network
        packet, segment = mtu_bytes(network), segment_bytes(network)
        frame, rank_frame = packet + ETHERNET_BYTES, segment + ETHERNET_BYTES
        window = window_bytes(network)
        core = Host(window)
        core.become_switch()
        self.nodes: list[Host] = []
        self.ranks: list[Host] = []
        self.sent: dict[str, list[End]] = {"rank": [], "node": []}
        """Link ends that limit the send rate of every rank (key `rank`) and of every node (key `node`)."""
        self.received: dict[str, list[End]] = {"rank": [], "node": []}
        """Link ends that limit the receive rate of every rank (key `rank`) and of every node (key `node`)."""
        for number in range(network.nodes):
            node = Host(window)
            node.become_switch()
            self.nodes.append(node)
            port, uplink = core.join(f"port{number}", node, UPLINK, mtu=packet)
            self.sent["node"].append(End(node, uplink, network.between, frame, network.delay_s))
            self.received["node"].append(End(core, port, network.between, frame))
            for local_rank in range(network.ranks_per_node):
                rank = Host(window)
                sizes = {"mtu": packet, "gso_max_size": segment}
                port, own = node.join(f"port{local_rank}", rank, RANK_INTERFACE, **sizes)
                rank.netlink.addr("add", index=own, address=address(network, len(self.ranks)), prefixlen=16)
                _start_with_full_window(rank, own, window // packet)
                self.sent["rank"].append(End(rank, own, network.within, rank_frame))
                self.received["rank"].append(End(node, port, network.within, rank_frame))
                self.ranks.append(rank)

    def ends(self) -> Iterator[End]:
        """Yield all link ends of the emulated network whose configuration limits their send rate."""
        for side in (self.sent, self.received):
            for ends in side.values():
                yield from (end for end in ends if end.rate)
