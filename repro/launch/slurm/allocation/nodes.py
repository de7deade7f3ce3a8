"""What the nodes of an allocation are, by their own word, and whether that is what the profile's system is."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from repro.config import ConfigError
from repro.config.system import System
from repro.launch.failures import WRONG_HARDWARE
from repro.launch.slurm.allocation import topology
from repro.util.files import write_json

_FAMILY = re.compile(r"\b(?:Tesla |NVIDIA |GeForce |Quadro )*((?:RTX |GTX )?[A-Z]{1,2}\d{1,4}[A-Z]?)\b")
_FORM = re.compile(r"\b(SXM\d?|PCIe?|NVL|HGX)\b", re.IGNORECASE)
_MEMORY_SLACK = 0.08
"""Part by which a card's memory may differ from its system file's: drivers and ECC take some."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What one task says of itself and its node.  Bytes, MHz."""

    node: str
    """As SLURM calls it."""
    node_index: int
    """Place of the node in the allocation (`SLURM_NODEID`)."""
    local: int
    """Place of the task on its node (`SLURM_LOCALID`)."""
    task: int
    """`SLURM_PROCID`."""
    tasks: int
    """`SLURM_NTASKS`."""
    pid: int = 0
    cores: int = 0
    """That the task may use."""
    memory_bytes: int = 0
    """Of the node."""
    gpus: list[dict[str, Any]] = field(default_factory=list)
    """That the task may use: `uuid` and what `repro.measure.provenance.gpus` says of each."""
    processor: str = ""
    switches: str = ""
    """Above the node, from the top (`.topology.switches`)."""
    links: dict[str, Any] = field(default_factory=dict)
    """Between the GPUs of the node (`.topology.gpu_links`)."""


def report(environment: dict[str, str], *, gpus: bool) -> NodeReport:
    """What this task sees.  `environment` is SLURM's; GPUs are looked at only if `gpus`."""
    import psutil

    from repro.measure.provenance import cpu
    from repro.util.resources import usable_cores

    return NodeReport(
        node=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        node_index=int(environment.get("SLURM_NODEID", "0")),
        local=int(environment.get("SLURM_LOCALID", "0")),
        task=int(environment.get("SLURM_PROCID", "0")),
        tasks=int(environment.get("SLURM_NTASKS", "1")),
        pid=os.getpid(),
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=visible_gpus(environment.get("CUDA_VISIBLE_DEVICES")) if gpus else [],
        processor=str(cpu()["model"]),
        switches=topology.switches(environment),
        links=topology.gpu_links() if gpus else {},
    )


def visible_gpus(visible: str | None) -> list[dict[str, Any]]:
    """The GPUs that a rank of this task will see, asked of the driver; `visible` is CUDA_VISIBLE_DEVICES.

    NVML does not heed that variable, CUDA does: an index counts in the driver's order, a UUID may be cut short.
    """
    from repro.measure.provenance import gpus, nvml

    with nvml() as n:
        if n is None:
            return []
        uuids = [
            _text(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(i))) for i in range(n.nvmlDeviceGetCount())
        ]
    found = [{"uuid": uuid, **gpu} for uuid, gpu in zip(uuids, gpus(), strict=True)]
    if visible is None:
        return found
    seen = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        if entry.isdigit():
            match = found[int(entry)] if int(entry) < len(found) else None
        else:
            match = next((gpu for gpu in found if gpu["uuid"].startswith(entry)), None)
        if match is None:  # CUDA stops at the first entry that it does not know
            break
        seen.append(match)
    return seen


def mismatch(reports: Iterable[NodeReport], system: System, gpus_per_node: int) -> str:
    """Why runs on these nodes are none of `system`'s; empty if they are.  Starts with `WRONG_HARDWARE`."""
    nodes: dict[str, list[NodeReport]] = {}
    for entry in reports:
        nodes.setdefault(entry.node, []).append(entry)
    device = system.device
    wanted = f"{gpus_per_node} x {device.name}"
    for node, tasks in nodes.items():
        gpus = {gpu["uuid"]: gpu for task in tasks for gpu in task.gpus}
        has = _count(list(gpus.values()))
        wrong = any(differs(gpu, system) for gpu in gpus.values())
        if wrong or len(gpus) < len(tasks):
            need = wanted if wrong or len(tasks) > 1 else f"1 x {device.name}"
            return f"{WRONG_HARDWARE}node {node} has {has} where {system.name} has {need}: not comparable"
        for task in tasks:
            if len(task.gpus) > 1 and task.local >= len(task.gpus):
                return (
                    f"{WRONG_HARDWARE}node {node} gives task {task.local} {len(task.gpus)} of its GPUs:"
                    " not comparable; one GPU for each task, or all for all"
                )
        alone = [task.gpus[0]["uuid"] for task in tasks if len(task.gpus) == 1]
        if len(set(alone)) < len(alone):
            return f"{WRONG_HARDWARE}node {node} gives one GPU to several of its {len(tasks)} tasks: not comparable"
    return ""


def differs(gpu: dict[str, Any], system: System) -> bool:
    """Whether a card is not the system's: its generation, its form, or the size of its memory."""
    device = system.device
    capability = gpu.get("compute_capability")
    if capability and device.compute_capability and capability != device.compute_capability:
        return True
    name = str(gpu.get("name"))
    if _word(_FAMILY, name) != _word(_FAMILY, device.name):
        return True
    form, expected_form = _word(_FORM, name), _word(_FORM, device.name)
    if form and expected_form and form != expected_form:  # "NVIDIA H100 80GB HBM3" names none
        return True
    try:
        expected = device.memory_bytes.known("device.memory_bytes", system=system.name)
    except ConfigError:  # nobody published it
        return False
    memory = gpu.get("memory_bytes")
    return memory is not None and abs(memory - expected) > _MEMORY_SLACK * expected


def _word(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text.replace("-", " "))
    return match[1].upper().replace("PCIE", "PCI") if match else ""


def _count(gpus: list[dict[str, Any]]) -> str:
    names: dict[str, int] = {}
    for gpu in gpus:
        memory = gpu.get("memory_bytes")
        size = f" ({memory / 1e9:.0f} GB)" if memory else ""
        label = f"{gpu.get('name')}{size}"
        names[label] = names.get(label, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU"


def place(reports: list[NodeReport], environment: dict[str, str]) -> dict[str, Any]:
    """`provenance["slurm"]`: the job, its nodes and what they are; no address and no name of a person."""
    names = list(dict.fromkeys(entry.node for entry in reports))
    above = {entry.node: entry.switches for entry in reports if entry.switches}
    kinds: dict[str, dict[str, Any]] = {}
    for name in names:
        tasks = [entry for entry in reports if entry.node == name]
        gpus = {gpu["uuid"]: gpu for task in tasks for gpu in task.gpus}
        what = {
            "tasks": len(tasks),
            "processor": tasks[0].processor,
            "cores_per_task": tasks[0].cores,
            "memory_bytes": tasks[0].memory_bytes,
            "gpus": [
                {
                    key: gpu.get(key)
                    for key in ("name", "memory_bytes", "driver", "max_sm_mhz", "memory_mhz", "power_limit_w")
                }
                for gpu in gpus.values()
            ],
            "links": tasks[0].links,
        }
        kinds.setdefault(repr(what), {"nodes": [], **what})["nodes"].append(name)
    return {
        "job_id": environment.get("SLURM_ARRAY_JOB_ID") or environment.get("SLURM_JOB_ID", ""),
        "array_task": environment.get("SLURM_ARRAY_TASK_ID", ""),
        "restarts": int(environment.get("SLURM_RESTART_COUNT", "0")),
        "cluster": environment.get("SLURM_CLUSTER_NAME", ""),
        "partition": environment.get("SLURM_JOB_PARTITION", ""),
        "nodes": names,
        "tasks_per_node": max(sum(entry.node == name for entry in reports) for name in names),
        "switches": {
            path: [n for n in names if above.get(n) == path] for path in sorted(set(above.values()))
        },
        "hardware": list(kinds.values()),
    }


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def file_of(folder: Path, task: int) -> Path:
    """Where a task writes its report."""
    return folder / f"report-{task}.json"


if __name__ == "__main__":
    seen = report(dict(os.environ), gpus=True)
    write_json(file_of(Path(sys.argv[1]), seen.task), asdict(seen))
