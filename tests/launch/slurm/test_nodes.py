"""Tests of node reports: their comparison with the system of the profile, and the provenance of a record."""

from __future__ import annotations

import json
import runpy
import socket
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from repro.config import systems
from repro.launch.rank.device_settings import cuda_device_index
from repro.launch.slurm.allocation import nodes
from repro.launch.slurm.allocation.nodes import NodeReport, hardware_mismatch, is_other_gpu, slurm_provenance
from repro.measure import provenance
from repro.util.processes import usable_cores

V100 = ("Tesla V100-SXM3-32GB", 34_057_748_480, "7.0")
A100 = ("NVIDIA A100-SXM4-80GB", 85_198_897_152, "8.0")


def card(name: str, memory: int, capability: str, number: int = 0) -> dict[str, Any]:
    return {"uuid": f"GPU-{number}", "name": name, "memory_bytes": memory, "compute_capability": capability}


def node(name: str, tasks: int, *gpus: dict[str, Any]) -> list[NodeReport]:
    """Return the reports of all tasks of a node, each of which sees all its GPUs."""
    return [NodeReport(node=name, local=i, task=i, gpus=list(gpus)) for i in range(tasks)]


def full_node(name: str, kind: tuple[str, int, str], tasks: int = 16) -> list[NodeReport]:
    """Return the reports of a node with a GPU for each task."""
    return node(name, tasks, *(card(*kind, number) for number in range(tasks)))


@pytest.mark.parametrize(
    ("system", "kind"),
    [
        ("dgx-a100-40gb", ("NVIDIA A100-SXM4-40GB", 42_405_855_232, "8.0")),
        ("dgx-h100", ("NVIDIA H100 80GB HBM3", 85_520_809_984, "9.0")),
        ("dgx1-v100-16gb", ("Tesla V100-SXM2-16GB", 16_944_988_160, "7.0")),
        ("dgx2", ("NVIDIA V100-SXM3-32GB", 34_057_748_480, "7.0")),
        ("lowbw-v100", ("Tesla V100-PCIE-16GB", 16_945_512_448, "7.0")),
        ("yuan", ("NVIDIA A100-SXM4-80GB", 85_198_897_152, "8.0")),
    ],
)
def test_gpu_names_of_drivers_match_systems(system: str, kind: tuple[str, int, str]) -> None:
    """On the second node, each task sees one GPU."""
    bound = [replace(report, gpus=[report.gpus[report.local]]) for report in full_node("n2", kind, 4)]
    reports = full_node("n1", kind, 4) + bound
    assert hardware_mismatch(reports, systems.load_system_file(system), 4) == ""


TWO = [card(*V100, number) for number in range(2)]
NEED = ", but system dgx2 has 16 x NVIDIA V100 SXM3 32 GB"
SHARING = node("n1", 2, TWO[0]) + node("n1", 3, *TWO, card(*V100, 2))[2:]


@pytest.mark.parametrize(
    ("reports", "found"),
    [
        (full_node("n1", V100) + full_node("n2", A100, 8), f"node n2 has 8 x {A100[0]} (85 GB){NEED}"),
        (node("n1", 1), f"node n1 has no GPU{NEED.replace('16', '1')}"),
        (node("n1", 2), f"node n1 has no GPU{NEED}"),
        (node("n1", 2, TWO[0]), f"node n1 has 1 x {V100[0]} (34 GB){NEED}"),
        (SHARING, "several of the 3 tasks on node n1 share a GPU"),
    ],
)
def test_mismatch_names_the_node_and_its_gpus(reports: list[NodeReport], found: str) -> None:
    message = hardware_mismatch(reports, systems.load_system_file("dgx2"), 16)
    assert message == f"wrong hardware: {found}; results would not be those of dgx2"


def test_every_task_needs_a_gpu() -> None:
    """Tasks see all GPUs or one GPU each. A task whose number exceeds the visible GPUs has no GPU."""
    dgx2, reports = systems.load_system_file("dgx2"), node("n1", 2, *TWO)
    assert hardware_mismatch(reports, dgx2, 16) == ""
    shifted = [replace(report, local=report.local + 1) for report in reports]
    assert hardware_mismatch(shifted, dgx2, 16) == (
        "wrong hardware: task 2 of node n1 can use only 2 GPUs; results would not be comparable; "
        "give each task one GPU or all GPUs"
    )


def test_gpu_differs_by_form_capability_and_eight_percent_of_memory() -> None:
    """Drivers reserve memory, so the tolerance is 8 % of 32 GB in both directions."""
    dgx2 = systems.load_system_file("dgx2")
    full = dgx2.device.memory_bytes.known("memory", system="dgx2")
    for factor, is_other in ((1.0, False), (0.921, False), (1.079, False), (0.919, True), (1.081, True)):
        assert is_other_gpu(card(V100[0], round(factor * full), "7.0"), dgx2) == is_other
    assert is_other_gpu(card(V100[0], V100[1], "7.2"), dgx2)
    assert is_other_gpu(card("Tesla V100-SXM2-32GB", 34_058_272_768, "7.0"), dgx2), "its clocks differ"
    assert not is_other_gpu({"name": V100[0], "memory_bytes": None}, dgx2)
    no_size = replace(dgx2.device.memory_bytes, value=None)
    unknown = replace(dgx2, device=replace(dgx2.device, memory_bytes=no_size))
    assert not is_other_gpu(card(V100[0], 10**9, "7.0"), unknown)
    assert is_other_gpu(card(A100[0], 10**9, "7.0"), unknown)


def test_cuda_device_index_of_a_local_rank() -> None:
    assert [cuda_device_index(local, 8) for local in (0, 7)] == [0, 7]
    assert cuda_device_index(5, 1) == 0
    with pytest.raises(RuntimeError, match="no GPU for local rank 4: this process sees 4 GPUs"):
        cuda_device_index(4, 4)


def fake_driver(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Imitate NVML with three GPUs, whose handles are their indices."""
    driver = MagicMock(nvmlDeviceGetHandleByIndex=lambda index: index, **functions)
    driver.nvmlDeviceGetCount.return_value = 3
    monkeypatch.setattr(provenance, "nvml", lambda: nullcontext(driver))


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ["GPU-aa1", "GPU-aa2", "GPU-b"]),
        ("", []),
        ("2, 0,", ["GPU-b", "GPU-aa1"]),
        ("1,3,0", ["GPU-aa2"]),  # CUDA stops at the first unknown index
        ("GPU-aa2,GPU-b,GPU-c,0", ["GPU-aa2", "GPU-b"]),
        ("GPU-a", ["GPU-aa1"]),
    ],
)
def test_visible_gpus_follow_cuda_visible_devices(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, found: list[str]
) -> None:
    uuids: list[Any] = [b"GPU-aa1", "GPU-aa2", "GPU-b"]
    names = {"GPU-aa1": "x", "GPU-aa2": "y", "GPU-b": "z"}
    fake_driver(monkeypatch, nvmlDeviceGetUUID=lambda handle: uuids[handle])
    monkeypatch.setattr(provenance, "gpus", lambda: [{"name": name} for name in names.values()])
    assert nodes.visible_gpus(visible) == [{"uuid": uuid, "name": names[uuid]} for uuid in found]
    monkeypatch.setattr(provenance, "nvml", lambda: nullcontext(None))
    assert nodes.visible_gpus(visible) == []


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_node_program_reports_place_gpus_and_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two GPUs with two NVLinks are behind one switch, and one without NVLinks is on the other socket."""

    def is_active(handle: int, link: int) -> int:
        if handle == 2 or link > 2:
            raise RuntimeError("not supported")
        return link < 2

    fake_driver(
        monkeypatch,
        NVMLError=RuntimeError,
        NVML_NVLINK_MAX_LINKS=6,
        NVML_FEATURE_ENABLED=1,
        NVML_TOPOLOGY_SINGLE=10,
        NVML_TOPOLOGY_SYSTEM=50,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetNvLinkState=is_active,
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: 10 if b < 2 else 50,
    )
    monkeypatch.setattr(provenance, "gpus", lambda: [{"name": name} for name in "xyz"])
    slurm = {"SLURMD_NODENAME": "n2", "SLURM_LOCALID": "3", "SLURM_PROCID": "7"}
    for key, value in {**slurm, "CUDA_VISIBLE_DEVICES": "GPU-2"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "argv", ["nodes", str(tmp_path)])
    runpy.run_module(nodes.__name__, run_name="__main__")
    report = NodeReport(**json.loads(nodes.report_path(tmp_path, 7).read_text()))
    assert (report.node, report.local, report.task) == ("n2", 3, 7)
    assert report.gpus == [{"uuid": "GPU-2", "name": "z"}]
    assert report.links == {"nvlinks": [2, 2, 0], "pcie": {"one switch": 1, "the link between sockets": 2}}
    bare = nodes.report_node({}, gpus=False)
    assert (bare.node, bare.local, bare.task) == (socket.gethostname(), 0, 0)
    assert (bare.gpus, bare.links, bare.cores) == ([], {}, usable_cores())
    assert bare.memory_bytes == psutil.virtual_memory().total
    assert bare.processor


def test_provenance_contains_all_fields_without_user_names() -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_CLUSTER_NAME": "c"}
    environment |= {"SLURM_JOB_PARTITION": "p", "SLURM_JOB_USER": "me", "SECRET": "x"}
    gpu_facts = {"name": V100[0], "memory_bytes": V100[1], "driver": "550"}
    gpu_facts |= {"max_sm_mhz": 1597, "memory_mhz": 958, "power_limit_w": 350}
    gpu = card(*V100) | gpu_facts
    facts: dict[str, Any] = {"processor": "Xeon", "memory_bytes": 10**9, "links": {"nvlinks": [6]}}
    reports = [
        replace(report, cores=6, **facts)
        for report in node("n1", 2, gpu) + node("n2", 1, gpu) + node("n3", 1, gpu)
    ]
    hardware = facts | {"cores_per_task": 6, "gpus": [gpu_facts]}
    kinds = [{"nodes": ["n1"], "tasks": 2, **hardware}, {"nodes": ["n2", "n3"], "tasks": 1, **hardware}]
    expected = {"job_id": "7", "array_task": "", "restarts": 2, "cluster": "c", "partition": "p"}
    expected |= {"nodes": ["n1", "n2", "n3"], "tasks_per_node": 2, "switches": {}, "hardware": kinds}
    assert slurm_provenance(reports, environment) == expected
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    assert slurm_provenance(reports, environment | array) == expected | {"job_id": "12", "array_task": "3"}
    unknown = {"job_id": "", "restarts": 0, "cluster": "", "partition": ""}
    assert slurm_provenance(reports, {}) == expected | unknown


def test_switch_path_is_read_from_slurm_variables() -> None:
    slurm = {"SLURM_TOPOLOGY_ADDR": "core.rack1.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert nodes.switch_path(slurm) == "core.rack1"
    assert nodes.switch_path({"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}) == ""
    assert nodes.switch_path({}) == ""
    reports = [NodeReport(node=f"n{i}", local=0, task=i, switches=f"core.rack{1 + i // 2}") for i in range(3)]
    assert slurm_provenance(reports, {})["switches"] == {"core.rack1": ["n0", "n1"], "core.rack2": ["n2"]}
