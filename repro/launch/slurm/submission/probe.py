"""Inspection of cluster nodes for `repro doctor --profile`: a short job runs this module on each node."""

from __future__ import annotations

import json
import secrets
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from repro.launch.doctor import LIMITED, NO, YES, Check
from repro.launch.slurm.allocation.nodes import is_other_gpu
from repro.launch.slurm.profile import Profile
from repro.launch.slurm.scheduler import SchedulerError, run_slurm_command
from repro.launch.slurm.submission import job_array
from repro.measure.provenance import versions

PROBE_TIMEOUT_S = 300.0
"""Maximum time in seconds until the job that inspects cluster nodes has started and ended."""


def probe_nodes(site: Profile, results: Path, nodes: int) -> list[dict[str, Any]]:
    """Inspect `nodes` cluster nodes in a SLURM job, and return the results.  Raises `SchedulerError`."""
    token = secrets.token_hex(8)
    marker = results / f".probe-{token}"
    marker.write_text(token, encoding="utf-8")
    command = ["srun", "-N", str(nodes), "--ntasks-per-node=1", "--time=5", "--job-name=repro-doctor"]
    for option, value in (
        ("partition", site.slurm.partition),
        ("account", site.slurm.account),
        ("qos", site.slurm.qos),
        ("constraint", site.slurm.constraint),
        ("exclude", ",".join(site.slurm.exclude)),
        ("container-image", site.environment.container),
        ("container-mounts", site.environment.container_mounts),
        *site.slurm.options.items(),
        *site.gpu_request(site.slurm.gpus_per_node).items(),
    ):
        command += [f"--{option.replace('_', '-')}={value}"] if value else []
    python = shlex.quote(site.environment.python or sys.executable)
    lines = [*job_array.setup_lines(site), f"exec {python} -m {__name__} {shlex.quote(str(marker))}"]
    try:
        output = run_slurm_command([*command, "bash", "-c", " && ".join(lines)], timeout_s=PROBE_TIMEOUT_S)
    finally:
        marker.unlink(missing_ok=True)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if len(found) != nodes:
        raise SchedulerError(f"{len(found)} of {nodes} nodes answered")
    return found


def inspect_node(marker: Path) -> dict[str, Any]:
    """Return this node's GPUs, network interfaces, package versions, and access to the shared file `marker`."""
    import psutil

    from repro.measure.provenance import gpus

    try:
        shared = marker.read_text(encoding="utf-8") == marker.name.removeprefix(".probe-")
        answer = marker.with_name(f"{marker.name}-{socket.gethostname()}")
        answer.write_text("", encoding="utf-8")
        answer.unlink()
        folder = "" if shared else "a file of the submitting host has other content on this node"
    except OSError as error:
        folder = f"{error.strerror}: {error.filename}"
    interfaces = {
        name: next((a.address for a in addresses if a.family == socket.AF_INET), "")
        for name, addresses in psutil.net_if_addrs().items()
    }
    return {
        "host": socket.gethostname(),
        "folder": folder,
        "interfaces": interfaces,
        "gpus": gpus(),
        "versions": versions(("repro", "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")),
        "python": ".".join(map(str, sys.version_info[:3])),
    }


def check_nodes(site: Profile, seen: list[dict[str, Any]]) -> Iterator[Check]:
    """Yield the checks of cluster nodes for `repro doctor`; `seen` has the inspection result of each node."""
    hosts = ", ".join(node["host"] for node in seen)
    yield Check("nodes", YES, hosts, f"python {seen[0]['python']} and repro can be started on the nodes")
    blind = [f"{node['host']}: {node['folder']}" for node in seen if node["folder"]]
    if blind:
        yield Check("shared folder", NO, "; ".join(blind), "set storage.shared and --results", fatal=True)
    else:
        yield Check(
            "shared folder", YES, "nodes read and write files of this host", "jobs return their results"
        )
    yield _interface(site, seen)
    here = versions(("torch",)).get("torch")
    other = [f"{node['host']}: torch {node['versions'].get('torch', 'missing')}" for node in seen]
    same = all(node["versions"].get("torch") == here for node in seen)
    meaning = (
        "ranks start" if same else f"this host has torch {here}: set environment.python or environment.setup"
    )
    yield Check("torch", YES if same else LIMITED, "; ".join(other), meaning)
    if site.slurm.gpus_per_node:
        yield from _devices(site, seen)


def _interface(site: Profile, seen: list[dict[str, Any]]) -> Check:
    wanted = site.environment.interface
    known = {name: address for name, address in seen[0]["interfaces"].items() if name != "lo"}
    text = ", ".join(f"{name} {address}".strip() for name, address in known.items())
    if not wanted:
        found = f"environment.interface is empty; nodes have {text}"
        return Check("interface", LIMITED, found, "NCCL and gloo choose an interface")
    lacking = [node["host"] for node in seen if not node["interfaces"].get(wanted)]
    if lacking:
        found = f"no interface {wanted} with an address on {', '.join(lacking)}; nodes have {text}"
        return Check("interface", NO, found, "change environment.interface", fatal=True)
    return Check("interface", YES, f"{wanted} {seen[0]['interfaces'][wanted]}", "carries collectives")


def _devices(site: Profile, seen: list[dict[str, Any]]) -> Iterator[Check]:
    from repro.config.systems import LOCAL_SYSTEMS, load_system_file

    system = None if site.system in LOCAL_SYSTEMS else load_system_file(site.system)
    for node in seen:
        gpus = node["gpus"] or []
        text = f"{node['host']}: {len(gpus)} x {gpus[0]['name'] if gpus else 'none'}"
        if len(gpus) < site.slurm.gpus_per_node:
            meaning = f"slurm.gpus_per_node is {site.slurm.gpus_per_node}"
            yield Check("GPUs there", NO, text, meaning, fatal=True)
        elif system is not None and any(is_other_gpu(gpu, system) for gpu in gpus):
            meaning = (
                f"{system.name} has {system.device.name}, so no case would start: change the profile's system"
            )
            yield Check("GPUs there", NO, text, meaning, fatal=True)
        else:
            meaning = "these are the GPUs of the profile's system" if system else "usable"
            yield Check("GPUs there", YES, text, meaning)
    nccl = {v for node in seen for k, v in node["versions"].items() if "nccl" in k}
    found = ", ".join(sorted(nccl)) or "no NCCL package; torch may contain NCCL"
    yield Check("NCCL", YES if nccl else LIMITED, found, "collectives between GPUs")


if __name__ == "__main__":
    print(json.dumps(inspect_node(Path(sys.argv[1]))))
