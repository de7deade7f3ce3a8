"""The local machine as a `System`, from values that operating system and driver report, without measurements."""

from __future__ import annotations

from pathlib import Path

from repro.config import systems
from repro.config.system import Device, Link, Quantity, System
from repro.config.systems import LOCAL
from repro.measure.provenance import count_nvlinks, cpu, gpus, host_memory, nvml

NOT_MEASURED = "the machine does not report this value; measure it or take it from a data sheet"


def load_system(name: str | Path) -> System:
    """Return a hardware system: this machine for `name = local`, else the system of a packaged or a user's file.

    Raises:
        ConfigError: No system has this name, or the file is missing or has a wrong key or value.
    """
    return discover() if str(name) == LOCAL else systems.load_system_file(name)


def discover() -> System:
    """Return this machine as a system. Its devices are its GPUs or, without GPUs, the processor as one device.

    If the GPUs are of different types, the system describes the first GPU, and its note lists all types.
    """
    state = host_memory()
    host = Quantity(
        value=min(state["total_bytes"], state["limit_bytes"] or state["total_bytes"]),
        source="operating system and cgroup limit, this machine",
    )
    found = gpus()
    if found:
        kinds = sorted({str(gpu["name"]) for gpu in found})
        first = found[0]
        name, capability = str(first["name"]), first["compute_capability"] or ""
        size = Quantity(
            value=first["memory_bytes"],
            source="NVML, this machine" if first["memory_bytes"] else NOT_MEASURED,
        )
        context = Quantity(value=None, source="unknown: only a process that uses CUDA has a CUDA context")
        links = ("nvlink", "pcie") if has_nvlink() else ("pcie",)
        note = f"different GPUs: {', '.join(kinds)}; the system describes the first" if len(kinds) > 1 else ""
        count = Quantity(value=len(found), source="NVML, this machine")
    else:
        name, capability, size = cpu()["model"], "", host
        context = Quantity(value=0, source="a processor has no CUDA context")
        links = ("memory",)
        note = "no GPU: the processor is the only device, and the ranks are processes that share its memory"
        count = Quantity(value=1, source="one processor, no GPU")
    unknown = Quantity(value=None, source=NOT_MEASURED)
    return System(
        name="local",
        device=Device(name=name, compute_capability=capability, memory_bytes=size, memory_bandwidth=unknown),
        devices_per_node=count,
        nodes=Quantity(value=1, source="this machine"),
        context_bytes=context,
        host_memory_bytes=host,
        links={link: Link(per="node" if link == "memory" else "device", bandwidth=unknown) for link in links},
        note=note,
    )


def has_nvlink() -> bool:
    """Return whether this machine's first GPU has an active NVLink; False if the driver does not report NVLinks."""
    with nvml() as n:
        return n is not None and count_nvlinks(n, n.nvmlDeviceGetHandleByIndex(0)) > 0
