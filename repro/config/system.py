"""A system: hardware as data.  Every number stands beside its source; a number nobody published says so.

Memory in bytes, work in FLOP/s, bandwidth in bytes/s in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from repro.config.errors import ConfigError, require

LINKS = ("memory", "nvlink", "pcie", "inter-node")
"""Classes of links, from the inside of a node outwards.  ``memory`` joins processes that share one processor
as their device; nvlink and pcie join the devices of a node, which use the first of them that they have."""
PER = ("device", "node")
FLOP_PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")
ASSUMED_CONTEXT_BYTES = 1_400_000_000
"""What is taken for ``context_bytes`` where a system does not know it: the median of the reports that the
other systems quote (0.84, 1.06, 1.40, 1.54 and 1.74 GB)."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number and where it comes from."""

    value: float | None
    """None where it is not known; files write ``"unknown"``."""
    source: str
    """Who published it ("second-hand", "derived", "unconfirmed" where that is so), or why it is unknown."""

    def __post_init__(self) -> None:
        require(self.value is None or self.value >= 0, "value", self.value, '0 or more, or "unknown"')
        require(
            bool(self.source.strip()),
            "source",
            self.source,
            "where the number comes from, or why it is unknown",
        )

    def known(self, key: str, *, system: str = "") -> float:
        """The number; ``ConfigError`` that names ``key`` and the reason if it is unknown."""
        if self.value is None:
            raise ConfigError(key, "unknown", f"needed here, but {self.source}", file=system)
        return self.value


def _positive(key: str, quantity: Quantity) -> None:
    require(quantity.value != 0, key, quantity.value, 'more than 0, or "unknown"')


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator (or, on a machine without, the processor that stands in for it)."""

    name: str
    """As its vendor calls it."""
    memory_bytes: Quantity
    """Memory of one device as programs see it, ``total_memory`` in torch."""
    memory_bandwidth: Quantity
    """Peak bytes/s between the device and its memory."""
    peak_flops: dict[str, Quantity] = field(default_factory=dict)
    """Dense peak FLOP/s by precision; a precision that is not listed is not there (V100: no bf16)."""
    compute_capability: str = ""
    """CUDA compute capability, ``7.0``; empty where there is none."""

    def __post_init__(self) -> None:
        _positive("memory_bytes", self.memory_bytes)
        _positive("memory_bandwidth", self.memory_bandwidth)
        for precision, peak in self.peak_flops.items():
            known = ", ".join(FLOP_PRECISIONS)
            require(precision in FLOP_PRECISIONS, "peak_flops", precision, f"precisions among {known}")
            _positive(f"peak_flops.{precision}", peak)


@dataclass(frozen=True, kw_only=True)
class Link:
    """One class of links."""

    per: str
    """``device``: every device has this bandwidth; ``node``: a node's devices share it."""
    bandwidth: Quantity
    """Peak bytes/s in one direction."""

    def __post_init__(self) -> None:
        require(self.per in PER, "per", self.per, f"one of {', '.join(PER)}")
        _positive("bandwidth", self.bandwidth)


@dataclass(frozen=True, kw_only=True)
class System:
    """One cluster or machine, read from ``repro/systems/files``."""

    name: str
    """The file's name without its ending."""
    device: Device
    devices_per_node: Quantity
    nodes: Quantity
    """Nodes of the largest published run on it; a simulation may take more."""
    context_bytes: Quantity
    """Memory of each device that torch's allocator cannot see: CUDA context, libraries, NCCL's buffers."""
    host_memory_bytes: Quantity
    """Host memory of one node, which its devices share (for P_a+cpu)."""
    links: dict[str, Link] = field(default_factory=dict)
    """By class: nvlink, pcie, inter-node."""
    note: str = ""
    """What a reader should know."""

    def __post_init__(self) -> None:
        for link in self.links:
            require(link in LINKS, "links", link, f"classes among {', '.join(LINKS)}")
        for key in ("devices_per_node", "nodes"):
            value = getattr(self, key).value
            require(value is None or value == int(value), key, value, 'a whole number, or "unknown"')
        for key in ("devices_per_node", "nodes", "host_memory_bytes"):
            _positive(key, getattr(self, key))
        context, memory = self.context_bytes.value, self.device.memory_bytes.value
        require(
            context is None or memory is None or context < memory,
            "context_bytes",
            context,
            f"less than device.memory_bytes = {memory}",
        )

    @property
    def context_used(self) -> Quantity:
        """``context_bytes``, or where it is unknown :data:`ASSUMED_CONTEXT_BYTES` with a source that says so."""
        if self.context_bytes.value is not None:
            return self.context_bytes
        source = f"assumed, the median of the other systems' reports: {self.context_bytes.source}"
        return Quantity(value=ASSUMED_CONTEXT_BYTES, source=source)

    def context(self) -> int:
        """Bytes of each device that torch's allocator cannot have, known or assumed: :attr:`context_used`."""
        return int(self.context_used.known("context_bytes", system=self.name))

    def allocatable_bytes(self) -> int:
        """What torch's allocator can reserve on one device: its memory less the context."""
        return int(self.device.memory_bytes.known("device.memory_bytes", system=self.name)) - self.context()

    def link_inside(self) -> str:
        """Class of the links inside a node: the first of memory, nvlink and pcie that the system has."""
        for link in LINKS[:-1]:
            if link in self.links:
                return link
        raise ConfigError("links", list(self.links), f"one of {', '.join(LINKS[:-1])}", file=self.name)

    def link_per_device(self, link: str) -> float:
        """Bytes/s in one direction that one device gets when all devices of its node use ``link``."""
        if link not in self.links:
            known = ", ".join(self.links) or "none"
            raise ConfigError("links", link, f"a class that the system has: {known}", file=self.name)
        bandwidth = self.links[link].bandwidth.known(f"links.{link}.bandwidth", system=self.name)
        if self.links[link].per == "device":
            return bandwidth
        return bandwidth / self.devices_per_node.known("devices_per_node", system=self.name)

    def peak(self, precision: str) -> float:
        """Dense peak FLOP/s of one device at ``precision``; ``ConfigError`` where it has none."""
        if precision not in self.device.peak_flops:
            known = ", ".join(self.device.peak_flops) or "none known"
            raise ConfigError(
                "precision", precision, f"one that {self.device.name} has: {known}", file=self.name
            )
        return self.device.peak_flops[precision].known(f"peak_flops.{precision}", system=self.name)
