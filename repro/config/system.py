"""Hardware of a cluster or machine. Every number has a source; an unpublished number is marked as unknown.

Memory is in bytes, compute in FLOP/s, and bandwidth in bytes/s in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from repro.config.errors import ConfigError, require
from repro.config.links import LINKS, Link
from repro.config.quantity import UNSAID, Quantity, check_positive, check_whole
from repro.config.timing import DeviceTime, OperatorRate, Provenance, Timing

__all__ = ["Device", "Link", "Quantity", "System"]

FLOP_PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16")
ASSUMED_CONTEXT_BYTES = 1_400_000_000
"""Assumed device memory outside torch's allocator (`context_bytes`) for systems with an unknown value, in bytes: about
the median of the values that sources report (0.84, 1.06, 1.34, 1.40, 1.54 and 1.74 GB)."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or the processor of a machine without accelerators."""

    name: str
    """Product name of the device."""
    memory_bytes: Quantity
    """Memory of one device that programs can use, in bytes, as torch's `total_memory`."""
    memory_bandwidth: Quantity
    """Peak bandwidth between the device and its memory, in bytes/s."""
    peak_flops: dict[str, Quantity] = field(default_factory=dict)
    """Dense peak FLOP/s of the device by precision; precisions without an entry are unsupported (V100: bf16)."""
    compute_capability: str = ""
    """CUDA compute capability, such as `7.0`; empty without CUDA."""
    time: DeviceTime = field(default_factory=DeviceTime)
    """Fractions of peak FLOP/s and peak bandwidth that the device reaches, and fixed costs of its operators."""
    operators: dict[str, OperatorRate] = field(default_factory=dict)
    """Measured rates by operator, in calibrated system files; they take precedence over fractions of the peaks."""
    # `repr=False` keeps power and price out of the system's digest in simulation records, since they change no result.
    power_w: Quantity = field(default=UNSAID, repr=False)
    """Maximum electric power of a device with its share of the node, in W."""
    price_per_hour: Quantity = field(default=UNSAID, repr=False)
    """Price of a device for one hour, in US dollars."""

    def __post_init__(self) -> None:
        for key in ("memory_bytes", "memory_bandwidth", "power_w", "price_per_hour"):
            check_positive(key, getattr(self, key))
        # A range of power or price would mark predicted step times as uncertain, although they depend on neither.
        for key in ("power_w", "price_per_hour"):
            low, value, high = getattr(self, key).ends or (0, 0, 0)
            require(low == high, key, f"{value:g} ({low:g} to {high:g})", "one number without a range")
        for precision, peak in self.peak_flops.items():
            known = ", ".join(FLOP_PRECISIONS)
            require(precision in FLOP_PRECISIONS, "peak_flops", precision, f"one of {known}")
            check_positive(f"peak_flops.{precision}", peak)


@dataclass(frozen=True, kw_only=True)
class System:
    """Hardware of one cluster or machine, as a system file in `repro/config/systems` describes it."""

    name: str
    """Name of the system file without `.toml`."""
    device: Device
    """Accelerator of the nodes, or their processor if they have none (table `[device]` of the file)."""
    devices_per_node: Quantity
    """Number of devices of each node."""
    nodes: Quantity
    """Number of nodes of the largest published run on this system; a simulation may use more."""
    context_bytes: Quantity
    """Device memory outside torch's allocator, in bytes: CUDA context, libraries and NCCL's buffers."""
    host_memory_bytes: Quantity
    """Host memory of one node, which its devices share (for P_a+cpu)."""
    links: dict[str, Link] = field(default_factory=dict)
    """Links between devices by class: nvlink, pcie, inter-node."""
    provenance: Provenance | None = None
    """Machine, date and software of the measurements in a calibrated file; None in other files."""
    note: str = ""
    """Remark on the system that `repro systems` shows."""

    def __post_init__(self) -> None:
        for key in ("devices_per_node", "nodes"):
            check_whole(key, getattr(self, key))
        check_positive("host_memory_bytes", self.host_memory_bytes)
        context, memory = self.context_bytes.value, self.device.memory_bytes.value
        right = f"less than device.memory_bytes = {memory}"
        require(context is None or memory is None or context < memory, "context_bytes", context, right)
        measured = any(link.collectives for link in self.links.values()) or bool(self.device.operators)
        if measured and self.provenance is None:
            expected = (
                "is missing: measured device.operators and links.*.collectives need a [provenance] table"
            )
            raise ConfigError("provenance", says=expected)

    @property
    def context_used(self) -> Quantity:
        """Return the device memory outside torch's allocator; if unknown, an assumed value, marked as assumed."""
        if self.context_bytes.value is not None:
            return self.context_bytes
        source = f"assumed, the median reported for other systems: {self.context_bytes.source}"
        return Quantity(value=ASSUMED_CONTEXT_BYTES, source=source)

    @property
    def best_precision(self) -> str:
        """Return the fastest precision: bf16; fp16 before compute capability 8.0 (no bf16); fp32 on processors."""
        if "memory" in self.links:  # CPU ranks, which alone communicate through shared memory
            return "fp32"
        capability = self.device.compute_capability
        return "fp16" if capability and float(capability) < 8 else "bf16"

    def context(self) -> int:
        """Return the known or assumed bytes of device memory outside torch's allocator (`context_used`)."""
        return int(self.context_used.known("context_bytes", system=self.name))

    def allocatable_bytes(self) -> int:
        """Return the bytes that torch's allocator can reserve on one device: device memory minus the context."""
        return int(self.device.memory_bytes.known("device.memory_bytes", system=self.name)) - self.context()

    @property
    def ranks_per_core(self) -> float:
        """Return the ranks per processor core in the calibration of the system; 1 if each rank had its own core."""
        ranks = self.devices_per_node.value
        if self.provenance is None or not self.provenance.cores or ranks is None:
            return 1.0
        return max(1.0, ranks / self.provenance.cores)

    @property
    def timing(self) -> Timing:
        """Return the device's numbers for the time model, with assumed values for unknown ones."""
        return self.device.time.numbers()

    def link_inside(self) -> str:
        """Return the class of the links inside a node: the first of memory, nvlink and pcie that the system has."""
        for link in LINKS[:-1]:
            if link in self.links:
                return link
        raise ConfigError("links", list(self.links), f"one of {', '.join(LINKS[:-1])}", file=self.name)

    def link_per_device(self, link: str) -> float:
        """Return the bandwidth of one device in one direction, in bytes/s, when all devices of its node use `link`."""
        if link not in self.links:
            known = ", ".join(self.links) or "none"
            raise ConfigError("links", link, f"a link class of this system: {known}", file=self.name)
        bandwidth = self.links[link].bandwidth.known(f"links.{link}.bandwidth", system=self.name)
        if self.links[link].per == "device":
            return bandwidth
        return bandwidth / self.devices_per_node.known("devices_per_node", system=self.name)

    def peak(self, precision: str) -> float:
        """Return the dense peak FLOP/s of one device at `precision`; raise `ConfigError` if the device lacks it."""
        if precision not in self.device.peak_flops:
            known = ", ".join(self.device.peak_flops) or "none known"
            right = f"a precision that {self.device.name} supports: {known}"
            raise ConfigError("precision", precision, right, file=self.name)
        return self.device.peak_flops[precision].known(f"peak_flops.{precision}", system=self.name)
