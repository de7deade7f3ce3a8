"""The one task that SLURM starts of a job: it runs the bundle, each launch a step, and alone writes records."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import time
from pathlib import Path

from repro.config import ConfigError, systems
from repro.launch.failures import LOST_NODE
from repro.launch.local_launch import read_json
from repro.launch.plan import Task
from repro.launch.recorder import Recorder
from repro.launch.runner import Runner, rank_target
from repro.launch.slurm.allocation import nodes
from repro.launch.slurm.allocation.bundle import BundleFile
from repro.launch.slurm.allocation.launch import ClusterLauncher
from repro.launch.slurm.allocation.nodes import NodeReport
from repro.launch.slurm.allocation.srun_step import Allocation
from repro.launch.slurm.allocation.stop import Stop
from repro.launch.slurm.allocation.work import SubmissionWork
from repro.launch.slurm.site import profile
from repro.launch.slurm.site.profile import Profile
from repro.results.store import Store

SHARED = 0o022
PRIVATE = 0o077
FILES = 16384
BOOT_S = 300.0
"""How long nodes may take until a task starts: they may boot one by one."""
LOOK_S = 0.05


def job_of(environment: dict[str, str]) -> str:
    """`12_3`, or `12` outside a job array."""
    array, index = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environment.get("SLURM_JOB_ID", "0")


def control(folder: Path, index: int, stop: Stop, environment: dict[str, str]) -> BundleFile:
    """Run bundle `index` of the submission in `folder` until it is done or `stop`.

    Returns how the bundle stands.  Raises `DiskFull` and `ConfigError`.
    """
    allocation = allocated(folder, environment)
    site = allocation.site
    stop.delay_s = site.slurm.signal_delay_s
    work = SubmissionWork.load(folder)
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    state = BundleFile(folder, work.bundles[index], job_of(environment), restarts)
    tasks = state.remaining(work.bundles[index].tasks)
    try:
        with Store(folder.parents[1]) as store:
            reports, missing = survey(allocation, folder / f"nodes-{job_of(environment)}-{restarts}", stop)
            place = {"slurm": nodes.place(reports, environment)} if reports else {}
            recorder = Recorder(work.suite, store, state, place=place)
            if missing and not stop:
                _refuse(recorder, tasks, missing)
            elif not missing and (wrong := wrong_hardware(reports, site)):
                _refuse(recorder, tasks, wrong)
            elif not missing:
                state.on(place["slurm"]["nodes"])
                names = [report.node for report in reports]
                launcher = ClusterLauncher(
                    folder / "logs" / str(index), allocation, names, rank_target(), stop
                )
                Runner(recorder, state, stop, launcher, rerun=work.rerun).run(tasks)
    except Exception as error:
        state.end(reason=f"{type(error).__name__}: {error}")
        raise
    state.end(signal=stop.signal, reason=stop.reason if state.open else "")
    return state


def allocated(folder: Path, environment: dict[str, str]) -> Allocation:
    """What SLURM gave this job, by its environment and the profile in `folder`.  Raises `ConfigError`.

    Sets this process's umask, and its limit of open files.
    """
    site = profile.load(folder / "profile.toml")
    umask = PRIVATE if site.private else SHARED
    os.umask(umask)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:  # a connection for each of many ranks
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard) if hard > 0 else FILES, hard))
    return Allocation(
        nodes=int(environment.get("SLURM_JOB_NUM_NODES", "1")),
        per_node=int(environment.get("SLURM_NTASKS_PER_NODE", "1")),
        site=site,
        address=address_of(site.environment.interface, environment, site.file),
        umask=umask,
    )


def survey(allocation: Allocation, folder: Path, stop: Stop) -> tuple[list[NodeReport], str]:
    """What every task sees of its node, in the order of ranks, and whose report is missing: empty if none is."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    step = allocation.step(allocation.tasks, nodes.__name__, folder)
    end = time.monotonic() + BOOT_S
    while step.code is None and not stop and time.monotonic() < end:
        time.sleep(LOOK_S)
    step.end(0.0)
    found = [read_json(nodes.file_of(folder, task)) for task in range(allocation.tasks)]
    reports = [NodeReport(**report) for report in found if report is not None]
    missing = "" if len(reports) == allocation.tasks else _missing(reports, allocation.tasks, step.said())
    shutil.rmtree(folder, ignore_errors=True)
    return reports, missing


def _missing(reports: list[NodeReport], tasks: int, said: str) -> str:
    """Which nodes no report came from."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    expected = SlurmJobEnvironment().hostnames
    silent = [name for name in expected if name not in {report.node for report in reports}]
    who = ", ".join(silent) or "of the allocation"
    return f"{LOST_NODE}{who}: {len(reports)} of {tasks} tasks started: {said or f'no word for {BOOT_S:g} s'}"


def address_of(interface: str, environment: dict[str, str], file: str) -> str:
    """Address at which the other nodes reach this one: the interface's, or what the node's name stands for.

    Raises `ConfigError` if the profile has to say it.
    """
    import psutil

    ours = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    if interface:
        first = interface.removeprefix("=").split(",")[0]
        # NCCL takes a name for a prefix; the interface of just that name comes first.
        names = sorted((name for name in ours if name.startswith(first)), key=lambda name: name != first)
        found = [address for name in names for address in ours[name]]
        if not found:
            expected = f"an interface of {socket.gethostname()} with an IPv4 address: {', '.join(ours)}"
            raise ConfigError("interface", interface, expected, file=file, where="environment")
        return found[0]
    if int(environment.get("SLURM_JOB_NUM_NODES", "1")) == 1:
        return "127.0.0.1"
    known = {address for own in ours.values() for address in own if not address.startswith("127.")}
    for name in (environment.get("SLURMD_NODENAME", ""), socket.gethostname()):
        with contextlib.suppress(OSError):
            if name and (address := socket.gethostbyname(name)) in known:
                return address
    launch = environment.get("SLURM_LAUNCH_NODE_IPADDR", "")
    if launch in known:
        return launch
    expected = f"the interface that reaches the other nodes; {socket.gethostname()} has {', '.join(ours)}"
    raise ConfigError("interface", "", expected, file=file, where="environment")


def wrong_hardware(reports: list[NodeReport], site: Profile) -> str:
    """Why these nodes are not the profile's system."""
    if site.system in systems.HERE:
        return ""
    return nodes.mismatch(reports, systems.load(site.system), site.gpus_per_node)


def _refuse(recorder: Recorder, tasks: list[Task], reason: str) -> None:
    """Record that nothing was started, and why.  Raises `DiskFull`."""
    for experiment in {e.name: e for task in tasks for e in task.experiments}.values():
        recorder.outcome(experiment, 0.0, outcome="error", reason=reason)
