"""Tests of node reports and of their comparison with the system of the profile."""

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
from repro.launch.slurm.allocation.nodes import hardware_mismatch, is_other_gpu
from repro.measure import provenance
from repro.util.processes import usable_cores
from tests.launch.slurm.reports import V100, card, node


@pytest.mark.parametrize("bound", [True, False])
def test_nodes_of_the_profile_system_match(bound: bool) -> None:
    reports = node("n1", 0, V100, bound=bound) + node("n2", 1, V100, bound=bound)
    assert hardware_mismatch(reports, systems.load_system_file("dgx2"), 16) == ""


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
    assert hardware_mismatch(node("n1", 0, kind, tasks=4), systems.load_system_file(system), 4) == ""


@pytest.mark.parametrize(
    "kind",
    [
        ("NVIDIA A100-SXM4-80GB", 85_198_897_152, "8.0"),
        ("Tesla V100-SXM2-32GB", 34_058_272_768, "7.0"),  # the clocks differ from a DGX-2
        ("Tesla V100-SXM3-16GB", 16_944_988_160, "7.0"),
    ],
)
def test_mismatch_names_the_node_and_its_gpus(kind: tuple[str, int, str]) -> None:
    reports = node("n1", 0, V100) + node("n2", 1, kind, tasks=8)
    assert hardware_mismatch(reports, systems.load_system_file("dgx2"), 16) == (
        f"wrong hardware: node n2 has 8 x {kind[0]} ({kind[1] / 1e9:.0f} GB)"
        ", but dgx2 has 16 x NVIDIA V100 SXM3 32 GB: not comparable"
    )


def test_tasks_that_share_a_gpu_do_not_match() -> None:
    shared = [replace(report, gpus=[card(*V100, 0)]) for report in node("n1", 0, V100, tasks=2)]
    assert hardware_mismatch(shared, systems.load_system_file("dgx2"), 16).startswith(
        "wrong hardware: node n1 has 1 x Tesla V100"
    )


def test_task_on_a_shared_node_needs_a_gpu() -> None:
    """Tasks see all GPUs or one GPU each. A task whose number exceeds the visible GPUs has no GPU."""
    cards = [card(*V100, number) for number in range(2)]
    few = [replace(report, gpus=cards) for report in node("n1", 0, V100, tasks=2)]
    assert hardware_mismatch(few, systems.load_system_file("dgx2"), 16) == ""
    few[1] = replace(few[1], local=2)
    assert hardware_mismatch(few, systems.load_system_file("dgx2"), 16) == (
        "wrong hardware: task 2 of node n1 can use only 2 GPUs: not comparable; give each task one GPU or all GPUs"
    )
    bare = [replace(report, gpus=[]) for report in node("n1", 0, V100, tasks=1)]
    assert hardware_mismatch(bare, systems.load_system_file("dgx2"), 16) == (
        "wrong hardware: node n1 has no GPU, but dgx2 has 1 x NVIDIA V100 SXM3 32 GB: not comparable"
    )


def test_two_tasks_without_gpus_expect_a_full_node() -> None:
    bare = [replace(report, gpus=[]) for report in node("n1", 0, V100, tasks=2)]
    assert hardware_mismatch(bare, systems.load_system_file("dgx2"), 16) == (
        "wrong hardware: node n1 has no GPU, but dgx2 has 16 x NVIDIA V100 SXM3 32 GB: not comparable"
    )


def test_unknown_memory_of_a_system_is_not_compared() -> None:
    """The names of the GPUs are still compared."""
    system = systems.load_system_file("dgx2")
    device = replace(system.device, memory_bytes=replace(system.device.memory_bytes, value=None))
    unknown = replace(system, device=device)
    assert not is_other_gpu(card(V100[0], 10**9, "7.0", 0), unknown)
    assert is_other_gpu(card("NVIDIA A100-SXM4-80GB", 10**9, "7.0", 0), unknown)


def test_node_report_contains_gpus_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "visible_gpus", lambda visible: [{"uuid": visible}])
    monkeypatch.setattr(nodes, "gpu_links", lambda: {"nvlinks": [2]})
    message = {"SLURMD_NODENAME": "n2", "SLURM_LOCALID": "3", "SLURM_PROCID": "7"}
    report = nodes.report_node(message | {"CUDA_VISIBLE_DEVICES": "GPU-5"}, gpus=True)
    assert (report.node, report.local, report.task) == ("n2", 3, 7)
    assert (report.gpus, report.links) == ([{"uuid": "GPU-5"}], {"nvlinks": [2]})
    bare = nodes.report_node(message, gpus=False)
    assert (bare.gpus, bare.links) == ([], {})


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_node_program_writes_gpu_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = MagicMock()
    driver.nvmlDeviceGetCount.return_value = 0
    monkeypatch.setattr(provenance, "nvml", lambda: nullcontext(driver))
    monkeypatch.setenv("SLURM_PROCID", "7")
    monkeypatch.setattr(sys, "argv", ["nodes", str(tmp_path)])
    runpy.run_module(nodes.__name__, run_name="__main__")
    assert json.loads(nodes.report_path(tmp_path, 7).read_text())["links"] == {"nvlinks": [], "pcie": {}}


def test_cuda_device_index_of_a_local_rank() -> None:
    assert [cuda_device_index(local, 8) for local in (0, 7)] == [0, 7]
    assert cuda_device_index(5, 1) == 0
    with pytest.raises(RuntimeError, match="no GPU for local rank 4: this process sees 4 GPUs"):
        cuda_device_index(4, 4)


def test_visible_gpus_follow_cuda_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids: list[Any] = [b"GPU-aa1", "GPU-aa2", "GPU-b"]

    class Driver:
        def nvmlDeviceGetCount(self) -> int:
            return len(uuids)

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            return index

        def nvmlDeviceGetUUID(self, handle: int) -> Any:
            return uuids[handle]

    monkeypatch.setattr("repro.measure.provenance.nvml", lambda: nullcontext(Driver()))
    monkeypatch.setattr("repro.measure.provenance.gpus", lambda: [{"name": f"card {i}"} for i in range(3)])

    def visible_uuids(visible: str | None) -> list[str]:
        found = nodes.visible_gpus(visible)
        assert all(
            gpu["name"] == f"card {['GPU-aa1', 'GPU-aa2', 'GPU-b'].index(gpu['uuid'])}" for gpu in found
        )
        return [gpu["uuid"] for gpu in found]

    assert visible_uuids(None) == ["GPU-aa1", "GPU-aa2", "GPU-b"]
    assert visible_uuids("") == []
    assert visible_uuids("2, 0,") == ["GPU-b", "GPU-aa1"]
    assert visible_uuids("1,3,0") == ["GPU-aa2"], "CUDA stops at the first unknown index"
    assert visible_uuids("GPU-aa2,GPU-b,GPU-c,0") == ["GPU-aa2", "GPU-b"]
    assert visible_uuids("GPU-a") == ["GPU-aa1"]
    monkeypatch.setattr("repro.measure.provenance.nvml", lambda: nullcontext(None))
    assert visible_uuids(None) == []


def test_report_without_slurm_has_task_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    report = nodes.report_node({}, gpus=False)
    assert (report.node, report.local, report.task) == (socket.gethostname(), 0, 0)
    assert report.memory_bytes == psutil.virtual_memory().total
    assert report.cores == usable_cores()
    assert report.processor


def test_gpu_memory_may_differ_by_eight_percent() -> None:
    """Drivers reserve memory, so the tolerance is 8 % of 32 GB in both directions."""
    dgx2 = systems.load_system_file("dgx2")
    full = dgx2.device.memory_bytes.known("memory", system="dgx2")
    for factor, is_other in ((1.0, False), (0.921, False), (1.079, False), (0.919, True), (1.081, True)):
        assert is_other_gpu(card(V100[0], round(factor * full), "7.0", 0), dgx2) == is_other
    assert is_other_gpu(card(V100[0], V100[1], "7.2", 0), dgx2)
    assert not is_other_gpu({"name": V100[0], "memory_bytes": None}, dgx2)
