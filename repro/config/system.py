"""A system: hardware as data.  Every number stands beside its source; a number nobody published says so.

Memory in bytes, work in FLOP/s, bandwidth in bytes/s in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from repro.config.errors import ConfigError, require
from repro.config.links import LINKS, Link, check_classes
from repro.config.quantity import Quantity, check_positive, check_whole
from repro.config.timing import DeviceTime, OperatorRate, Provenance, Timing

__all__ = ["Device", "Link", "Quantity", "System"]

FLOP_PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")
ASSUMED_CONTEXT_BYTES = 1_400_000_000
"""What is taken for `context_bytes` where a system does not know it: about the median of the reports that the
other systems quote (0.84, 1.06, 1.34, 1.40, 1.54 and 1.74 GB)."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator (or, on a machine without, the processor that stands in for it)."""

    name: str
    """As its vendor calls it."""
    memory_bytes: Quantity
    """Memory of one device as programs see it, `total_memory` in torch."""
    memory_bandwidth: Quantity
    """Peak bytes/s between the device and its memory."""
    peak_flops: dict[str, Quantity] = field(default_factory=dict)
    """Dense peak FLOP/s by precision; a precision that is not listed is not there (V100: no bf16)."""
    compute_capability: str = ""
    """CUDA compute capability, `7.0`; empty where there is none."""
    time: DeviceTime = field(default_factory=DeviceTime)
    """What it reaches of these peaks."""
    operators: dict[str, OperatorRate] = field(default_factory=dict)
    """Measured seconds by operator, in calibrated files; they win over the peaks."""

    def __post_init__(self) -> None:
        check_positive("memory_bytes", self.memory_bytes)
        check_positive("memory_bandwidth", self.memory_bandwidth)
        for precision, peak in self.peak_flops.items():
            known = ", ".join(FLOP_PRECISIONS)
            require(precision in FLOP_PRECISIONS, "peak_flops", precision, f"one of {known}")
            check_positive(f"peak_flops.{precision}", peak)


@dataclass(frozen=True, kw_only=True)
class System:
    """One cluster or machine, read from `repro/config/systems`."""

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
    provenance: Provenance | None = None
    """Of a calibrated file, whose operators and collectives were measured."""
    note: str = ""
    """What a reader should know."""

    def __post_init__(self) -> None:
        check_classes(self.links)
        for key in ("devices_per_node", "nodes"):
            check_whole(key, getattr(self, key))
        check_positive("host_memory_bytes", self.host_memory_bytes)
        context, memory = self.context_bytes.value, self.device.memory_bytes.value
        require(
            context is None or memory is None or context < memory,
            "context_bytes",
            context,
            f"less than device.memory_bytes = {memory}",
        )
        measured = any(link.collectives for link in self.links.values()) or bool(self.device.operators)
        if measured and self.provenance is None:
            expected = (
                "is missing: device.operators and links.*.collectives are measured, so it must say where"
            )
            raise ConfigError("provenance", says=expected)

    @property
    def context_used(self) -> Quantity:
        """`context_bytes`, or where it is unknown `ASSUMED_CONTEXT_BYTES` with a source that says so."""
        if self.context_bytes.value is not None:
            return self.context_bytes
        source = f"assumed, the median of the other systems' reports: {self.context_bytes.source}"
        return Quantity(value=ASSUMED_CONTEXT_BYTES, source=source)

    @property
    def best_precision(self) -> str:
        """As the device computes best: fp16 before compute capability 8.0, which has no bf16; fp32 on processors."""
        if "memory" in self.links:  # its devices are processor cores
            return "fp32"
        capability = self.device.compute_capability
        return "fp16" if capability and float(capability) < 8 else "bf16"

    def context(self) -> int:
        """Bytes of each device that torch's allocator cannot have, known or assumed: `context_used`."""
        return int(self.context_used.known("context_bytes", system=self.name))

    def allocatable_bytes(self) -> int:
        """What torch's allocator can reserve on one device: its memory less the context."""
        return int(self.device.memory_bytes.known("device.memory_bytes", system=self.name)) - self.context()

    @property
    def ranks_per_core(self) -> float:
        """Ranks for each processor core that they shared while they were measured; 1 where each had its own."""
        ranks = self.devices_per_node.value
        if self.provenance is None or not self.provenance.cores or ranks is None:
            return 1.0
        return max(1.0, ranks / self.provenance.cores)

    @property
    def timing(self) -> Timing:
        """What the device reaches of its peaks, each number known or assumed."""
        return self.device.time.numbers()

    def link_inside(self) -> str:
        """Class of the links inside a node: the first of memory, nvlink and pcie that the system has."""
        for link in LINKS[:-1]:
            if link in self.links:
                return link
        raise ConfigError("links", list(self.links), f"one of {', '.join(LINKS[:-1])}", file=self.name)

    def link_per_device(self, link: str) -> float:
        """Bytes/s in one direction that one device gets when all devices of its node use `link`."""
        if link not in self.links:
            known = ", ".join(self.links) or "none"
            raise ConfigError("links", link, f"a class that the system has: {known}", file=self.name)
        bandwidth = self.links[link].bandwidth.known(f"links.{link}.bandwidth", system=self.name)
        if self.links[link].per == "device":
            return bandwidth
        return bandwidth / self.devices_per_node.known("devices_per_node", system=self.name)

    def peak(self, precision: str) -> float:
        """Dense peak FLOP/s of one device at `precision`; `ConfigError` where it has none."""
        if precision not in self.device.peak_flops:
            known = ", ".join(self.device.peak_flops) or "none known"
            raise ConfigError(
                "precision", precision, f"one that {self.device.name} has: {known}", file=self.name
            )
        return self.device.peak_flops[precision].known(f"peak_flops.{precision}", system=self.name)
