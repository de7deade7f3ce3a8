"""The machine at hand: what can be read from it, and nothing that would have to be measured or looked up."""

from __future__ import annotations

from repro.config.system import Device, Quantity, System
from repro.measure.provenance import cpu, gpus, memory

NOT_MEASURED = "the machine does not tell; it has to be measured or looked up"


def discover() -> System:
    """``local``: its GPUs if it has any, else one "device" that is the processor with the machine's memory.

    With different GPUs the first one is described and the note says so.
    """
    found = gpus()
    if found:
        kinds = sorted({str(gpu["name"]) for gpu in found})
        first = found[0]
        name, capability, size = str(first["name"]), first["compute_capability"] or "", first["memory_bytes"]
        size_source = "NVML, this machine"
        note = f"different GPUs: {', '.join(kinds)}; the first is described" if len(kinds) > 1 else ""
        count = len(found)
    else:
        state = memory()
        name, capability = cpu()["model"], ""
        size = min(state["total_bytes"], state["limit_bytes"] or state["total_bytes"])
        size_source = "operating system and cgroup limit, this machine"
        note, count = "no GPU: the processor is the device, its ranks are processes that share its memory", 1
    return System(
        name="local",
        device=Device(
            name=name,
            compute_capability=capability,
            memory_bytes=Quantity(value=size, source=size_source if size else NOT_MEASURED),
            memory_bandwidth=Quantity(value=None, source=NOT_MEASURED),
        ),
        devices_per_node=Quantity(
            value=count, source="NVML, this machine" if found else "one processor, no GPU"
        ),
        nodes=Quantity(value=1, source="this machine"),
        note=note,
    )
