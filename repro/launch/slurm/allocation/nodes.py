"""Reports of hardware and topology of a SLURM allocation's nodes, and comparison with the expected hardware."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from repro.config import ConfigError
from repro.config.system import System
from repro.launch.failures import WRONG_HARDWARE
from repro.util.files import write_json

_FAMILY = re.compile(r"\b(?:Tesla |NVIDIA |GeForce |Quadro )*((?:RTX |GTX )?[A-Z]{1,2}\d{1,4}[A-Z]?)\b")
_FORM = re.compile(r"\b(SXM\d?|PCIe?|NVL|HGX)\b", re.IGNORECASE)
GPU_FACTS = ("name", "memory_bytes", "driver", "max_sm_mhz", "memory_mhz", "power_limit_w")
"""Keys of the properties of a GPU, such as its model name, that the provenance of a record contains."""
_MEMORY_SLACK = 0.08
"""Maximum relative deviation of a GPU's memory size from its nominal size, since driver and ECC reserve a part."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """Report of one SLURM task about its place in the job step and the hardware of its node."""

    node: str
    """Name of the node in SLURM."""
    local: int
    """Index of the task on its node (`SLURM_LOCALID`)."""
    task: int
    """Index of the task in the job step (`SLURM_PROCID`)."""
    cores: int = 0
    """Number of cores that the task may use."""
    memory_bytes: int = 0
    """Memory of the node, in bytes."""
    gpus: list[dict[str, Any]] = field(default_factory=list)
    """GPUs that the task may use: `uuid` and the fields of `repro.measure.provenance.gpus`."""
    processor: str = ""
    """Model name of the node's processor."""
    switches: str = ""
    """Network switches above the node, for example `core.rack1`; empty if SLURM does not report switches."""
    links: dict[str, Any] = field(default_factory=dict)
    """NVLink and PCIe links between the GPUs of the node, in the format of `gpu_links`."""


def report_node(environment: dict[str, str], *, gpus: bool) -> NodeReport:
    """Return this SLURM task's hardware report. `environment`: variables of the task; `gpus`: whether to list GPUs."""
    import psutil

    from repro.measure.provenance import cpu
    from repro.util.processes import usable_cores

    return NodeReport(
        node=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        local=int(environment.get("SLURM_LOCALID", "0")),
        task=int(environment.get("SLURM_PROCID", "0")),
        cores=usable_cores(),
        memory_bytes=psutil.virtual_memory().total,
        gpus=visible_gpus(environment.get("CUDA_VISIBLE_DEVICES")) if gpus else [],
        processor=str(cpu()["model"]),
        switches=switch_path(environment),
        links=gpu_links() if gpus else {},
    )


def visible_gpus(visible: str | None) -> list[dict[str, Any]]:
    """Return the GPUs that CUDA will show to this task, for the value `visible` of CUDA_VISIBLE_DEVICES.

    NVML lists all GPUs, so its list is filtered. An entry of `visible` is an index in NVML's order or a UUID prefix.
    """
    from repro.measure.provenance import gpus, nvml

    with nvml() as n:
        if n is None:
            return []
        handles = map(n.nvmlDeviceGetHandleByIndex, range(n.nvmlDeviceGetCount()))
        uuids = [_text(n.nvmlDeviceGetUUID(handle)) for handle in handles]
    found = [{"uuid": uuid, **gpu} for uuid, gpu in zip(uuids, gpus(), strict=True)]
    if visible is None:
        return found
    seen = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        if entry.isdigit():
            match = found[int(entry)] if int(entry) < len(found) else None
        else:
            match = next((gpu for gpu in found if gpu["uuid"].startswith(entry)), None)
        if match is None:  # CUDA ignores all entries of CUDA_VISIBLE_DEVICES after the first unknown entry.
            break
        seen.append(match)
    return seen


def hardware_mismatch(reports: Iterable[NodeReport], system: System, gpus_per_node: int) -> str:
    """Return how the nodes' GPUs differ from those of `system`, in text that begins with `WRONG_HARDWARE`; else ''."""
    nodes: dict[str, list[NodeReport]] = {}
    for entry in reports:
        nodes.setdefault(entry.node, []).append(entry)
    device = system.device
    wanted = f"{gpus_per_node} x {device.name}"
    for node, tasks in nodes.items():
        gpus = {gpu["uuid"]: gpu for task in tasks for gpu in task.gpus}
        has = _count(list(gpus.values()))
        wrong = any(is_other_gpu(gpu, system) for gpu in gpus.values())
        if wrong or len(gpus) < len(tasks):
            need = wanted if wrong or len(tasks) > 1 else f"1 x {device.name}"
            other = f"node {node} has {has}, but system {system.name} has {need}"
            return f"{WRONG_HARDWARE}{other}; results would not be those of {system.name}"
        for task in tasks:
            if len(task.gpus) > 1 and task.local >= len(task.gpus):
                sees = f"task {task.local} of node {node} can use only {len(task.gpus)} GPUs"
                return f"{WRONG_HARDWARE}{sees}; results would not be comparable; give each task one GPU or all GPUs"
        alone = [task.gpus[0]["uuid"] for task in tasks if len(task.gpus) == 1]
        if len(set(alone)) < len(alone):
            several = f"several of the {len(tasks)} tasks on node {node} share a GPU"
            return f"{WRONG_HARDWARE}{several}; results would not be those of {system.name}"
    return ""


def is_other_gpu(gpu: dict[str, Any], system: System) -> bool:
    """Return whether a GPU differs from the system's GPU in model name, form factor, capability or memory size."""
    device = system.device
    capability = gpu.get("compute_capability")
    if capability and device.compute_capability and capability != device.compute_capability:
        return True
    name = str(gpu.get("name"))
    if _word(_FAMILY, name) != _word(_FAMILY, device.name):
        return True
    form, expected_form = _word(_FORM, name), _word(_FORM, device.name)
    # Some GPU names, for example "NVIDIA H100 80GB HBM3", have no form factor.
    if form and expected_form and form != expected_form:
        return True
    try:
        expected = device.memory_bytes.known("device.memory_bytes", system=system.name)
    except ConfigError:  # The system's memory size is unknown, so the GPU's size cannot contradict it.
        return False
    memory = gpu.get("memory_bytes")
    return memory is not None and abs(memory - expected) > _MEMORY_SLACK * expected


def _word(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text.replace("-", " "))
    return match[1].upper().replace("PCIE", "PCI") if match else ""


def _count(gpus: list[dict[str, Any]]) -> str:
    sizes = ((gpu.get("name"), gpu.get("memory_bytes")) for gpu in gpus)
    names = Counter(f"{name} ({memory / 1e9:.0f} GB)" if memory else f"{name}" for name, memory in sizes)
    return ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU"


def slurm_provenance(reports: list[NodeReport], environment: dict[str, str]) -> dict[str, Any]:
    """Return the provenance of a SLURM job: its ids and its nodes' hardware, without addresses and user names."""
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
            "gpus": [{key: gpu.get(key) for key in GPU_FACTS} for gpu in gpus.values()],
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
        "switches": {at: [n for n in names if above.get(n) == at] for at in sorted(set(above.values()))},
        "hardware": list(kinds.values()),
    }


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def report_path(folder: Path, task: int) -> Path:
    return folder / f"report-{task}.json"


def switch_path(environment: dict[str, str]) -> str:
    """Return the network switches above this node, for example `core.rack1`; empty if SLURM does not report switches.

    SLURM sets `SLURM_TOPOLOGY_ADDR` (`core.rack1.n1`) and `SLURM_TOPOLOGY_ADDR_PATTERN` (`switch.switch.node`).
    """
    names = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if len(names) != len(kinds):
        return ""
    return ".".join(name for name, kind in zip(names, kinds, strict=True) if kind == "switch")


def gpu_links() -> dict[str, Any]:
    """Return the links between this node's GPUs; empty without an NVIDIA driver.

    `nvlinks` is the number of active NVLinks of each GPU. `pcie` counts pairs of GPUs by the closest common component.
    """
    from repro.measure.provenance import count_nvlinks, nvml

    with nvml() as n:
        if n is None:
            return {}
        levels = {
            n.NVML_TOPOLOGY_INTERNAL: "one board",
            n.NVML_TOPOLOGY_SINGLE: "one switch",
            n.NVML_TOPOLOGY_MULTIPLE: "several switches",
            n.NVML_TOPOLOGY_HOSTBRIDGE: "a host bridge",
            n.NVML_TOPOLOGY_NODE: "host bridges of one socket",
            n.NVML_TOPOLOGY_SYSTEM: "the link between sockets",
        }
        handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(n.nvmlDeviceGetCount())]
        pairs = [(a, b) for i, a in enumerate(handles) for b in handles[i + 1 :]]
        try:
            crossed = [levels.get(n.nvmlDeviceGetTopologyCommonAncestor(a, b), "unknown") for a, b in pairs]
        except n.NVMLError:
            crossed = []
        found: dict[str, Any] = {"nvlinks": [count_nvlinks(n, handle) for handle in handles]}
        return found | {"pcie": {word: crossed.count(word) for word in sorted(set(crossed))}}


if __name__ == "__main__":
    seen = report_node(dict(os.environ), gpus=True)
    write_json(report_path(Path(sys.argv[1]), seen.task), asdict(seen))
