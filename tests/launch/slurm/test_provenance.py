"""Tests of the provenance of a record: hardware, switches and links of its nodes, without addresses."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from repro.launch.slurm.allocation import nodes
from repro.launch.slurm.allocation.nodes import NodeReport, slurm_provenance
from tests.launch.slurm.reports import V100, card, node


def test_provenance_groups_equal_nodes_without_addresses() -> None:
    environment = {
        "SLURM_ARRAY_JOB_ID": "12",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_JOB_USER": "me",
        "SECRET": "x",
    }
    message = slurm_provenance(node("n1", 0, V100, tasks=2) + node("n2", 1, V100, tasks=2), environment)
    assert (message["job_id"], message["array_task"], message["nodes"]) == ("12", "3", ["n1", "n2"])
    assert [kind["nodes"] for kind in message["hardware"]] == [["n1", "n2"]]
    assert "me" not in message.values()


def test_provenance_contains_all_fields() -> None:
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_CLUSTER_NAME": "c",
        "SLURM_JOB_PARTITION": "p",
    }
    gpu = {**card(*V100, 1), "driver": "550", "max_sm_mhz": 1597, "memory_mhz": 958, "power_limit_w": 350}
    facts = {"processor": "Xeon", "cores": 6, "memory_bytes": 10**9, "links": {"nvlinks": [6]}}
    reports = [
        NodeReport(node=name, local=local, task=index + local, gpus=[gpu], **facts)
        for name, index, local in (("n1", 0, 0), ("n1", 0, 1), ("n2", 1, 0))
    ]
    gpu_facts = {
        key: gpu[key]
        for key in ("name", "memory_bytes", "driver", "max_sm_mhz", "memory_mhz", "power_limit_w")
    }
    hardware = {
        "processor": "Xeon",
        "cores_per_task": 6,
        "memory_bytes": 10**9,
        "gpus": [gpu_facts],
        "links": {"nvlinks": [6]},
    }
    assert slurm_provenance(reports, environment) == {
        "job_id": "7",
        "array_task": "",
        "restarts": 2,
        "cluster": "c",
        "partition": "p",
        "nodes": ["n1", "n2"],
        "tasks_per_node": 2,
        "switches": {},
        "hardware": [{"nodes": ["n1"], "tasks": 2, **hardware}, {"nodes": ["n2"], "tasks": 1, **hardware}],
    }
    bare = slurm_provenance(reports[:1], {})
    assert [bare[key] for key in ("job_id", "restarts", "cluster", "partition", "tasks_per_node")] == [
        "",
        0,
        "",
        "",
        1,
    ]


def test_switch_path_is_read_from_slurm_variables() -> None:
    message = {"SLURM_TOPOLOGY_ADDR": "core.rack1.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert nodes.switch_path(message) == "core.rack1"
    assert nodes.switch_path({"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}) == ""
    assert nodes.switch_path({}) == ""
    reports = [NodeReport(node=f"n{i}", local=0, task=i, switches=f"core.rack{1 + i // 2}") for i in range(3)]
    assert slurm_provenance(reports, {})["switches"] == {"core.rack1": ["n0", "n1"], "core.rack2": ["n2"]}


def test_gpu_links_are_read_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        """Three GPUs: two with two NVLinks behind one switch, and one without NVLinks on the other socket."""

        NVMLError = RuntimeError
        NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 6, 1
        NVML_TOPOLOGY_INTERNAL, NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_MULTIPLE = 0, 10, 20
        NVML_TOPOLOGY_HOSTBRIDGE, NVML_TOPOLOGY_NODE, NVML_TOPOLOGY_SYSTEM = 30, 40, 50

        def nvmlDeviceGetCount(self) -> int:
            return 3

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            return index

        def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
            if handle == 2 or link > 2:
                raise RuntimeError("not supported")
            return link < 2

        def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:
            return 10 if b < 2 else 50

    monkeypatch.setattr("repro.measure.provenance.nvml", lambda: nullcontext(Driver()))
    assert nodes.gpu_links() == {
        "nvlinks": [2, 2, 0],
        "pcie": {"one switch": 1, "the link between sockets": 2},
    }
