"""The first task of an allocation: it gathers the agents, runs the bundle with them, and alone writes records."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from repro import systems
from repro.config import ConfigError
from repro.launch.failures import LOST_NODE
from repro.launch.plan import Task
from repro.launch.recorder import Recorder
from repro.launch.runner import Runner, rank_target
from repro.launch.slurm import agent, channel, nodes, profile
from repro.launch.slurm.bundle import BundleFile
from repro.launch.slurm.cluster import ClusterLauncher
from repro.launch.slurm.crew import Crew, welcome
from repro.launch.slurm.nodes import Report
from repro.launch.slurm.profile import Profile
from repro.launch.slurm.stop import Stop
from repro.launch.slurm.work import Work
from repro.results.store import Store

SHARED = 0o022
PRIVATE = 0o077
FILES = 16384


def job_of(environment: dict[str, str]) -> str:
    """`12_3`, or `12` outside a job array."""
    array, index = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environment.get("SLURM_JOB_ID", "0")


def channel_of(folder: Path, environment: dict[str, str]) -> Path:
    """The file through which the agents of this start of the job find its controller."""
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    return channel.file_of(folder, job_of(environment), restarts)


def control(folder: Path, index: int, stop: Stop, environment: dict[str, str]) -> BundleFile:
    """Run bundle `index` of the submission in `folder` until it is done or `stop`.

    Returns how the bundle stands.  Raises `DiskFull` and `ConfigError`.
    """
    site = profile.load(folder / "profile.toml")
    umask = PRIVATE if site.private else SHARED
    os.umask(umask)
    stop.delay_s = site.slurm.signal_delay_s
    work = Work.load(folder)
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    state = BundleFile(folder, work.bundles[index], job_of(environment), restarts)
    tasks = state.remaining(work.bundles[index].tasks)
    try:
        with crew_of(folder, site, umask, environment) as crew, Store(folder.parents[1]) as store:
            stop.ended_elsewhere = lambda: crew.terminated
            count = int(environment.get("SLURM_NTASKS", "1"))
            complete = crew.gather(count, channel.CONNECT_S, lambda: bool(stop))
            reports = crew.reports()
            place = {"slurm": nodes.place(reports, environment)} if reports else {}
            recorder = Recorder(work.suite, store, state, place=place)
            if not complete and not stop:
                _refuse(recorder, tasks, missing_agents(reports, count))
            elif complete and (wrong := wrong_hardware(reports, site)):
                _refuse(recorder, tasks, wrong)
            elif complete:
                state.on(place["slurm"]["nodes"])
                launcher = ClusterLauncher(folder / "logs" / str(index), crew, rank_target(), stop.give_up)
                Runner(recorder, state, stop, launcher, rerun=work.rerun).run(tasks)
    except Exception as error:
        state.end(reason=f"{type(error).__name__}: {error}")
        raise
    state.end(signal=stop.signal, reason=stop.reason if state.open else "")
    return state


@contextlib.contextmanager
def crew_of(folder: Path, site: Profile, umask: int, environment: dict[str, str]) -> Iterator[Crew]:
    """The agents' connections, and the agent of this task; all of them end well unless the block raises."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:  # a connection for each of many ranks
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard) if hard > 0 else FILES, hard))
    address = address_of(site.environment.interface, environment, site.file)
    variables = site.environment.variables
    crew = Crew(address, welcome(interface=site.environment.interface, variables=variables, umask=umask))
    path = channel_of(folder, environment)
    own: subprocess.Popen[bytes] | None = None
    dismiss = False
    try:
        channel.publish(path, crew.place)
        own = agent.beside(path)
        yield crew
        dismiss = True
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        crew.close(dismiss=dismiss)
        if own is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                own.wait(agent.END_S)
            own.kill()
            own.wait()


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


def wrong_hardware(reports: list[Report], site: Profile) -> str:
    """Why these nodes are not the profile's system."""
    if site.system in systems.HERE:
        return ""
    return nodes.mismatch(reports, systems.load(site.system), site.gpus_per_node)


def missing_agents(reports: list[Report], count: int) -> str:
    """Whose agents did not come."""
    from submitit.slurm.slurm import SlurmJobEnvironment

    expected = SlurmJobEnvironment().hostnames
    silent = [name for name in expected if name not in {report.node for report in reports}]
    who = ", ".join(silent) or "of the allocation"
    came = f"{len(reports)} of {count} agents came within {channel.CONNECT_S:g} s"
    return f"{LOST_NODE}{who}: {came}"


def _refuse(recorder: Recorder, tasks: list[Task], reason: str) -> None:
    """Record that nothing was started, and why.  Raises `DiskFull`."""
    for experiment in {e.name: e for task in tasks for e in task.experiments}.values():
        recorder.outcome(experiment, 0.0, outcome="error", reason=reason)
