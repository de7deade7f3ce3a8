"""What nodes report is held against the profile's system, and a failure gets its class."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from repro import systems
from repro.config import ConfigError, Experiment, Layout, Model
from repro.host.resources import usable_cores
from repro.launch.failures import CLASSES, failure
from repro.launch.plan import Task
from repro.launch.rank.device import cuda_index
from repro.launch.slurm.allocation import bundle, controller, nodes, rank_child, stop, topology
from repro.launch.slurm.allocation.nodes import NodeReport, differs, mismatch, place
from repro.suites import Comparison

V100 = ("Tesla V100-SXM3-32GB", 34_057_748_480, "7.0")
MODEL = Model(name="tiny", layers=2, hidden=16, heads=4, vocab=64, seq=16)


def card(name: str, memory: int, capability: str, number: int) -> dict[str, Any]:
    return {"uuid": f"GPU-{number}", "name": name, "memory_bytes": memory, "compute_capability": capability}


def node(
    name: str, index: int, kind: tuple[str, int, str], *, tasks: int = 16, bound: bool = False
) -> list[NodeReport]:
    """All tasks of a node; `bound`: each sees its own GPU only."""
    cards = [card(*kind, number) for number in range(tasks)]
    return [
        NodeReport(node=name, node_index=index, local=i, task=index * tasks + i, tasks=tasks,
               gpus=[cards[i]] if bound else cards)
        for i in range(tasks)
    ]  # fmt: skip


@pytest.mark.parametrize("bound", [True, False])
def test_the_right_nodes_are_right(bound: bool) -> None:
    reports = node("n1", 0, V100, bound=bound) + node("n2", 1, V100, bound=bound)
    assert mismatch(reports, systems.load("dgx2"), 16) == ""


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
def test_names_that_drivers_give(system: str, kind: tuple[str, int, str]) -> None:
    assert mismatch(node("n1", 0, kind, tasks=4), systems.load(system), 4) == ""


@pytest.mark.parametrize(
    "kind",
    [
        ("NVIDIA A100-SXM4-80GB", 85_198_897_152, "8.0"),
        ("Tesla V100-SXM2-32GB", 34_058_272_768, "7.0"),  # other clocks than a DGX-2's
        ("Tesla V100-SXM3-16GB", 16_944_988_160, "7.0"),
    ],
)
def test_other_cards_are_named_with_their_node(kind: tuple[str, int, str]) -> None:
    reports = node("n1", 0, V100) + node("n2", 1, kind, tasks=8)
    assert mismatch(reports, systems.load("dgx2"), 16) == (
        f"wrong hardware: node n2 has 8 x {kind[0]} ({kind[1] / 1e9:.0f} GB)"
        " where dgx2 has 16 x NVIDIA V100 SXM3 32 GB: not comparable"
    )


def test_two_tasks_never_share_a_gpu() -> None:
    shared = [replace(report, gpus=[card(*V100, 0)]) for report in node("n1", 0, V100, tasks=2)]
    assert mismatch(shared, systems.load("dgx2"), 16).startswith("wrong hardware: node n1 has 1 x Tesla V100")


def test_on_a_shared_node_a_task_has_the_gpu_of_its_place() -> None:
    """All GPUs for all tasks, or one for each; a task beyond those that it sees has none."""
    cards = [card(*V100, number) for number in range(2)]
    few = [replace(report, gpus=cards) for report in node("n1", 0, V100, tasks=2)]
    assert mismatch(few, systems.load("dgx2"), 16) == ""
    few[1] = replace(few[1], local=2)
    assert mismatch(few, systems.load("dgx2"), 16) == (
        "wrong hardware: node n1 gives task 2 2 of its GPUs: not comparable; one GPU for each task, or all for all"
    )
    bare = [replace(report, gpus=[]) for report in node("n1", 0, V100, tasks=1)]
    assert mismatch(bare, systems.load("dgx2"), 16) == (
        "wrong hardware: node n1 has no GPU where dgx2 has 1 x NVIDIA V100 SXM3 32 GB: not comparable"
    )


def test_two_tasks_without_a_gpu_want_the_whole_node() -> None:
    bare = [replace(report, gpus=[]) for report in node("n1", 0, V100, tasks=2)]
    assert mismatch(bare, systems.load("dgx2"), 16) == (
        "wrong hardware: node n1 has no GPU where dgx2 has 16 x NVIDIA V100 SXM3 32 GB: not comparable"
    )


def test_a_memory_that_nobody_published_tells_no_cards_apart() -> None:
    """The names still do."""
    system = systems.load("dgx2")
    device = replace(system.device, memory_bytes=replace(system.device.memory_bytes, value=None))
    unknown = replace(system, device=device)
    assert not differs(card(V100[0], 10**9, "7.0", 0), unknown)
    assert differs(card("NVIDIA A100-SXM4-80GB", 10**9, "7.0", 0), unknown)


def test_gpus_are_looked_at_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "visible_gpus", lambda visible: [{"uuid": visible}])
    monkeypatch.setattr(topology, "gpu_links", lambda: {"nvlinks": [2]})
    said = {"SLURMD_NODENAME": "n2", "SLURM_NODEID": "1", "SLURM_LOCALID": "3", "SLURM_PROCID": "7"}
    seen = nodes.report(said | {"SLURM_NTASKS": "8", "CUDA_VISIBLE_DEVICES": "GPU-5"}, gpus=True)
    assert (seen.node, seen.node_index, seen.local, seen.task, seen.tasks) == ("n2", 1, 3, 7, 8)
    assert (seen.gpus, seen.links) == ([{"uuid": "GPU-5"}], {"nvlinks": [2]})
    bare = nodes.report(said, gpus=False)
    assert (bare.gpus, bare.links) == ([], {})


def test_a_checkpoint_has_the_time_that_slurm_leaves_it() -> None:
    """Most of the notice before a time limit; after SIGTERM the little that any site gives."""
    noticed = stop.Stop("7")
    assert not noticed
    noticed.note(stop.REQUEUE, None)
    assert (bool(noticed), noticed.requeue, noticed.terminated) == (True, True, False)
    assert noticed.stop_s == 90 - 2 * stop.KILL_S
    noticed.delay_s = 25.0
    assert noticed.stop_s == stop.KILL_S
    noticed.delay_s = 90.0
    noticed.note(signal.SIGTERM, None)
    assert (noticed.terminated, noticed.signal) == (True, "SIGUSR2")
    assert noticed.stop_s == stop.KILL_S
    told = stop.Stop("7")
    told.terminate("n2")
    assert (told.stop_s, told.requeue, told.signal) == (stop.KILL_S, False, "SIGTERM")


def test_a_ranks_gpu() -> None:
    assert [cuda_index(local, 8) for local in (0, 7)] == [0, 7]
    assert cuda_index(5, 1) == 0
    with pytest.raises(RuntimeError, match="no GPU for local rank 4: 4 visible"):
        cuda_index(4, 4)


def test_provenance_has_no_addresses_and_groups_equal_nodes() -> None:
    environment = {
        "SLURM_ARRAY_JOB_ID": "12",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_JOB_USER": "me",
        "SECRET": "x",
    }
    said = place(node("n1", 0, V100, tasks=2) + node("n2", 1, V100, tasks=2), environment)
    assert (said["job_id"], said["array_task"], said["nodes"]) == ("12", "3", ["n1", "n2"])
    assert [kind["nodes"] for kind in said["hardware"]] == [["n1", "n2"]]
    assert "me" not in said.values()


def test_all_that_a_record_says_of_its_nodes() -> None:
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_CLUSTER_NAME": "c",
        "SLURM_JOB_PARTITION": "p",
    }
    gpu = {**card(*V100, 1), "driver": "550", "max_sm_mhz": 1597, "memory_mhz": 958, "power_limit_w": 350}
    told = {"processor": "Xeon", "cores": 6, "memory_bytes": 10**9, "links": {"nvlinks": [6]}}
    reports = [
        NodeReport(node=name, node_index=index, local=local, task=index + local, tasks=3, gpus=[gpu], **told)
        for name, index, local in (("n1", 0, 0), ("n1", 0, 1), ("n2", 1, 0))
    ]
    known = {
        key: gpu[key]
        for key in ("name", "memory_bytes", "driver", "max_sm_mhz", "memory_mhz", "power_limit_w")
    }
    what = {
        "processor": "Xeon",
        "cores_per_task": 6,
        "memory_bytes": 10**9,
        "gpus": [known],
        "links": {"nvlinks": [6]},
    }
    assert place(reports, environment) == {
        "job_id": "7",
        "array_task": "",
        "restarts": 2,
        "cluster": "c",
        "partition": "p",
        "nodes": ["n1", "n2"],
        "tasks_per_node": 2,
        "switches": {},
        "hardware": [{"nodes": ["n1"], "tasks": 2, **what}, {"nodes": ["n2"], "tasks": 1, **what}],
    }
    bare = place(reports[:1], {})
    assert [bare[key] for key in ("job_id", "restarts", "cluster", "partition", "tasks_per_node")] == [
        "",
        0,
        "",
        "",
        1,
    ]


def test_a_task_sees_the_gpus_that_cuda_would_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
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

    def seen(visible: str | None) -> list[str]:
        found = nodes.visible_gpus(visible)
        assert all(
            gpu["name"] == f"card {['GPU-aa1', 'GPU-aa2', 'GPU-b'].index(gpu['uuid'])}" for gpu in found
        )
        return [gpu["uuid"] for gpu in found]

    assert seen(None) == ["GPU-aa1", "GPU-aa2", "GPU-b"]
    assert seen("") == []
    assert seen("2, 0,") == ["GPU-b", "GPU-aa1"]
    assert seen("1,3,0") == ["GPU-aa2"], "CUDA stops at the first that it does not know"
    assert seen("GPU-aa2,GPU-b,GPU-c,0") == ["GPU-aa2", "GPU-b"]
    assert seen("GPU-a") == ["GPU-aa1"]
    monkeypatch.setattr("repro.measure.provenance.nvml", lambda: nullcontext(None))
    assert seen(None) == []


def test_a_task_of_no_slurm_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = nodes.report({}, gpus=False)
    assert (seen.node, seen.node_index, seen.local, seen.task, seen.tasks) == (
        socket.gethostname(),
        0,
        0,
        0,
        1,
    )
    assert (seen.pid, seen.memory_bytes) == (os.getpid(), psutil.virtual_memory().total)
    assert seen.cores == usable_cores()
    assert seen.processor


def test_a_cards_memory_may_differ_by_what_drivers_take() -> None:
    """Eight percent of 32 GB either way."""
    dgx2 = systems.load("dgx2")
    whole = dgx2.device.memory_bytes.known("memory", system="dgx2")
    for part, other in ((1.0, False), (0.921, False), (1.079, False), (0.919, True), (1.081, True)):
        assert differs(card(V100[0], round(part * whole), "7.0", 0), dgx2) == other
    assert differs(card(V100[0], V100[1], "7.2", 0), dgx2)
    assert not differs({"name": V100[0], "memory_bytes": None}, dgx2)


def test_switches_are_what_slurm_says() -> None:
    said = {"SLURM_TOPOLOGY_ADDR": "core.rack1.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert topology.switches(said) == "core.rack1"
    assert topology.switches({"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}) == ""
    assert topology.switches({}) == ""
    reports = [
        NodeReport(node=f"n{i}", node_index=i, local=0, task=i, tasks=3, switches=f"core.rack{1 + i // 2}")
        for i in range(3)
    ]
    assert place(reports, {})["switches"] == {"core.rack1": ["n0", "n1"], "core.rack2": ["n2"]}


def test_links_of_gpus_are_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        """Three cards: two of two NVLinks behind one switch, one that has none and hangs on the other socket."""

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
    assert topology.gpu_links() == {
        "nvlinks": [2, 2, 0],
        "pcie": {"one switch": 1, "the link between sockets": 2},
    }


@pytest.mark.parametrize(
    ("outcome", "reason", "state", "expected"),
    [
        ("ok", "", "", ""),
        ("diverged", "loss is nan at step 3", "", ""),
        ("oom", "rank 1 at step 3: MemoryError", "", "out-of-memory"),
        ("timeout", "not done after 2 s (limits.timeout_s)", "", "time-out"),
        ("hang", "no progress for 60 s (limits.hang_s): rank 1 is behind", "", "hang"),
        ("error", "rank 1 was killed by signal 9 (SIGKILL) at step 1", "", "rank-killed"),
        ("error", "rank 3 at step 1: DistBackendError: NCCL error in: x.cpp", "", "nccl"),
        ("error", "rank 2 at step 4: lost node n2: no answer from it for 15 s", "COMPLETED", "lost-node"),
        ("error", "wrong hardware: node n2 has no GPU where ...", "", "wrong-hardware"),
        ("interrupted", "stopped by SLURM (SIGUSR2): preempted (rank 0 was at start-up)", "", "preempted"),
        ("interrupted", "stopped by SLURM (SIGUSR2): time limit (rank 0 ...)", "", "time-limit"),
        ("interrupted", "stopped by SLURM (SIGTERM): preempted or at its time limit", "CANCELLED by 0", "cancelled"),
        ("interrupted", "node failure on n2", "NODE_FAIL", "node-failure"),
        ("interrupted", "stopped by SLURM (SIGUSR2): preempted (rank 0 ...)", "FAILED", "preempted"),
        ("interrupted", "stopped by SLURM (SIGUSR2): preempted (rank 0 ...)", "TIMEOUT", "time-limit"),
        ("interrupted", "stopped", "FAILED", "error"),
        ("", "", "FAILED", "error"),
        ("", "", "OUT_OF_MEMORY", "out-of-memory"),
        ("", "", "RUNNING", ""),
        ("error", "rank 0 ended with exit code 7 at step 1", "", "error"),
    ],
)  # fmt: skip
def test_classes_of_failures(outcome: str, reason: str, state: str, expected: str) -> None:
    assert failure(outcome, reason, state) == expected
    assert expected in ("", *CLASSES)


def experiment(name: str, seed: int) -> Experiment:
    return Experiment(name=name, model=MODEL, layout=Layout(dp=seed))


def test_what_ended_is_not_begun_again() -> None:
    a, b, c = (experiment(name, seed) for seed, name in enumerate("abc", 1))
    compared = Task(experiments=(a, b, c), comparison=Comparison(baseline="a", subjects=("b", "c"), rounds=2))

    def left(ended: dict[str, str], task: Task = compared) -> list[tuple[str, bool]]:
        rest = bundle._rest(task, ended)
        return [("".join(e.name for e in t.experiments), t.comparison is not None) for t in rest]

    assert left({}) == [("abc", True)]
    assert left({"b": "error"}) == [("ac", True)]
    assert left({"a": "ok", "b": "ok"}) == [("ac", True)], "a comparison needs its baseline beside it"
    assert left({"a": "oom"}) == [("bc", False)]
    assert left({"a": "ok", "b": "ok", "c": "hang"}) == []
    assert left({"a": "hang"}, Task(experiments=(a, b))) == [("b", False)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("JobState=CANCELLED PreemptTime=None EndTime=2026-11-21T10:00:00", "cancelled"),
        ("JobState=COMPLETING Reason=None PreemptTime=None EndTime=2026-11-21T10:00:00", "cancelled"),
        (
            "JobState=COMPLETING Reason=None Restarts=1 StartTime=2026-11-21T10:00:00 EndTime=Unknown",
            "node failure, or requeued by hand",
        ),
        ("JobState=COMPLETING Reason=TimeLimit PreemptTime=None EndTime=2026-11-21T10:00:00", "time limit"),
        ("JobState=COMPLETING Reason=NodeDown PreemptTime=None EndTime=2026-11-21T10:00:00", "node failure"),
        ("JobState=NODE_FAIL", "node failure"),
        ("JobState=RUNNING PreemptTime=2026-11-21T10:00:00", "preempted"),
        (
            "JobState=TIMEOUT PreemptTime=2026-11-21T10:00:00 StartTime=2026-11-21T10:00:00",
            "preempted",  # as soon as it had started
        ),
        (
            "JobState=COMPLETING Reason=None PreemptTime=2026-11-21T10:00:00 StartTime=2026-11-21T10:05:00",
            "cancelled",  # the preemption was of an earlier start
        ),
        ("JobState=RUNNING PreemptTime=None EndTime=2020-01-01T10:00:00", "time limit"),
        ("JobState=RUNNING PreemptTime=None EndTime=2120-01-01T10:00:00", "preempted"),
        ("JobState=RUNNING EndTime=Unknown", "preempted or at its time limit"),
        ("", "preempted or at its time limit"),
    ],
)
def test_what_a_signal_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: str
) -> None:
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert stop.meaning("7", 90) == expected
    noticed = stop.Stop("7")
    assert noticed.reason == ""
    noticed.note(stop.REQUEUE, None)
    assert noticed.reason == f"stopped by SLURM (SIGUSR2): {expected}"
    noticed.give_up("a node is lost")
    assert noticed.reason == f"stopped by SLURM (SIGUSR2): {expected}", "the first reason stays"


@pytest.mark.parametrize(
    ("state", "accounted", "expected"),
    [
        ("down*", "NODE_FAIL", "node failure of n2"),
        ("down*", "RUNNING", "node failure of n2"),
        ("mixed", "NODE_FAIL", "node failure"),
        ("mixed", "REQUEUED", "preempted, or requeued by hand"),
        ("mixed", "PREEMPTED", "preempted"),
        ("mixed", "RUNNING", "node failure, or requeued by hand"),
    ],
)
def test_why_a_job_is_on_its_way_back_into_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, accounted: str, expected: str
) -> None:
    answers = {
        "scontrol": "JobState=COMPLETING Reason=None Restarts=3",
        "sinfo": f"n1 mixed\nn2 {state}",
        "sacct": f"PREEMPTED\nPREEMPTED\n{accounted}",
    }
    for name, answer in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setattr(stop, "ACCOUNTED_S", 0.2)
    assert stop.meaning("7", 90, restarts=2) == expected
    assert stop.meaning("7", 90, restarts=3) == "cancelled"


def test_the_address_is_the_interfaces_or_is_asked_for() -> None:
    assert controller.address_of("lo", {}, "site.toml") == "127.0.0.1"
    assert controller.address_of("", {"SLURM_JOB_NUM_NODES": "1"}, "site.toml") == "127.0.0.1"
    with pytest.raises(
        ConfigError, match=r"site.toml: environment.interface = 'ib7': must be an interface of"
    ):
        controller.address_of("ib7", {}, "site.toml")


def test_among_several_nodes_the_address_is_one_that_this_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its name stands for, or what SLURM says; not the loopback, nor another node's."""
    ours = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]}
    entries = {
        name: [SimpleNamespace(family=socket.AF_INET, address=a) for a in own] for name, own in ours.items()
    }
    names = {"n1": "10.0.0.5", socket.gethostname(): "127.0.0.1"}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: entries)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: names[name])
    two = {"SLURM_JOB_NUM_NODES": "2"}
    assert controller.address_of("", two | {"SLURMD_NODENAME": "n1"}, "site.toml") == "10.0.0.5"
    assert (
        controller.address_of("", two | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.5"}, "site.toml") == "10.0.0.5"
    )
    with pytest.raises(ConfigError, match=r"the interface that reaches the other nodes; .* has lo, eth0"):
        controller.address_of("", two | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.6"}, "site.toml")


def test_folders_of_killed_tasks_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_child, "work_parent", lambda: tmp_path)
    dead = tmp_path / f"{rank_child.FOLDER}dead"
    dead.mkdir()
    (dead / rank_child.LOCK).touch()
    first, _ = rank_child.own_folder()
    second, _ = rank_child.own_folder()
    assert not dead.exists()
    assert first.exists()
    assert second.exists()
