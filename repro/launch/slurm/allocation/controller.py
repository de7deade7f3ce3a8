"""The controller of a SLURM job: the process that submitit starts, which runs each launch as a job step.

submitit pickles one of two callables at submission and calls it in the job. `RunBundle` runs a bundle of a suite and
writes its records. `RunAwaitedJob` runs one launch whose result the submitting process waits for.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.config import ConfigError, systems
from repro.launch import supervise
from repro.launch.failures import LOST_NODE
from repro.launch.job import Job
from repro.launch.plan import Task
from repro.launch.recorder import Recorder
from repro.launch.runner import Launcher, Runner, rank_target
from repro.launch.slurm import profile
from repro.launch.slurm.allocation import nodes
from repro.launch.slurm.allocation.bundle import BundleProgress, SubmissionWork
from repro.launch.slurm.allocation.launch import ClusterLaunch
from repro.launch.slurm.allocation.nodes import NodeReport
from repro.launch.slurm.allocation.srun_step import Allocation
from repro.launch.slurm.allocation.stop import REQUEUE, AllocationStop
from repro.launch.slurm.profile import Profile
from repro.results.store import Store
from repro.util.files import read_json, write_json

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

JOB_FILE, ANSWER_FILE = "job.json", "answer.json"
MIN_OPEN_FILES = 16384
BOOT_TIMEOUT_S = 300.0
"""Maximum time in seconds until all nodes of an allocation have reported. Some sites boot nodes on demand."""
POLL_INTERVAL_S = 0.05
REQUEUE_SIGNAL_TIMEOUT_S = 2.0
"""Time in seconds to wait after SIGTERM for SIGUSR2, which SLURM sends at a preemption but not at `scancel`."""


def slurm_job_id(environment: dict[str, str]) -> str:
    """Return the SLURM id of this job: `12_3` in a job array, else `12`."""
    array, index = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environment.get("SLURM_JOB_ID", "0")


def run_bundle(folder: Path, index: int, stop: AllocationStop, environment: dict[str, str]) -> BundleProgress:
    """Run bundle `index` (the experiments of one SLURM job) of the submission in `folder` until the end or `stop`.

    Returns the content of the bundle's progress file.  Raises `DiskFull` and `ConfigError`.
    """
    allocation = read_allocation(folder, environment)
    site = allocation.site
    stop.delay_s = site.slurm.signal_delay_s
    work = SubmissionWork.load(folder)
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    state = BundleProgress(folder, work.bundles[index], slurm_job_id(environment), restarts)
    tasks = state.remaining(work.bundles[index].tasks)
    try:
        with Store(folder.parents[1]) as store:
            place_of_reports = folder / f"nodes-{slurm_job_id(environment)}-{restarts}"
            reports, missing = survey_nodes(allocation, place_of_reports, stop)
            place = {"slurm": nodes.slurm_provenance(reports, environment)} if reports else {}
            recorder = Recorder(work.suite, store, state, place=place)
            if missing and not stop:
                _refuse(recorder, tasks, missing)
            elif not missing and (wrong := describe_wrong_hardware(reports, site)):
                _refuse(recorder, tasks, wrong)
            elif not missing:
                state.set_nodes(place["slurm"]["nodes"])
                names = [report.node for report in reports]
                options: dict[str, Any] = {"target": rank_target(), "stop": stop}
                launch = partial(ClusterLaunch, allocation=allocation, nodes=names, **options)
                launcher = Launcher(folder / "logs" / str(index), launch)
                Runner(recorder, state, stop, launcher, rerun=work.rerun).run(tasks)
    except Exception as error:
        state.end(reason=f"{type(error).__name__}: {error}")
        raise
    state.end(signal=stop.signal, reason=stop.reason if state.open else "")
    return state


def read_allocation(folder: Path, environment: dict[str, str]) -> Allocation:
    """Return this job's allocation from its environment and the profile in `folder`.  Raises `ConfigError`.

    Sets the umask of this process and its limit on open files.
    """
    site = profile.load_profile(folder / "profile.toml")
    os.umask(site.umask)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:  # The controller needs an open file per connection to a rank's task.
        wanted = min(MIN_OPEN_FILES, hard) if hard > 0 else MIN_OPEN_FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return Allocation(
        nodes=int(environment.get("SLURM_JOB_NUM_NODES", "1")),
        per_node=int(environment.get("SLURM_NTASKS_PER_NODE", "1")),
        site=site,
        address=node_address(site.environment.interface, environment, site.file),
        umask=site.umask,
    )


def survey_nodes(allocation: Allocation, folder: Path, stop: AllocationStop) -> tuple[list[NodeReport], str]:
    """Run a SLURM task per rank that reports its node's hardware; return reports by rank, and a failure reason."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    step = allocation.step(allocation.tasks, nodes.__name__, folder)
    end = time.monotonic() + BOOT_TIMEOUT_S
    while step.code is None and not stop and time.monotonic() < end:
        time.sleep(POLL_INTERVAL_S)
    step.end(0.0)
    found = [read_json(nodes.report_path(folder, task)) for task in range(allocation.tasks)]
    reports = [NodeReport(**report) for report in found if report]
    missing = _missing(reports, allocation.tasks, step.last_error_line())
    shutil.rmtree(folder, ignore_errors=True)
    return reports, missing


def _missing(reports: list[NodeReport], tasks: int, srun_error: str) -> str:
    """Return the cause of missing hardware reports of nodes, with the nodes' names; empty if no report is missing."""
    if len(reports) == tasks:
        return ""
    from submitit.slurm.slurm import SlurmJobEnvironment

    expected = SlurmJobEnvironment().hostnames
    silent = [name for name in expected if name not in {report.node for report in reports}]
    who = ", ".join(silent) or "of the allocation"
    reason = srun_error or f"no report within {BOOT_TIMEOUT_S:g} s"
    return f"{LOST_NODE}{who}: {len(reports)} of {tasks} SLURM tasks started: {reason}"


def node_address(interface: str, environment: dict[str, str], file: str) -> str:
    """Return the IP address at which other nodes reach this node: that of `interface`, else that of the node's name.

    Raises `ConfigError` if neither has an address of this node, so that the profile must name an interface.
    """
    import psutil

    ours = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    if interface:
        first = interface.removeprefix("=").split(",")[0]
        # NCCL matches interfaces by prefix, so an interface with exactly this name comes first.
        names = sorted((name for name in ours if name.startswith(first)), key=lambda name: name != first)
        found = [address for name in names for address in ours[name]]
        if not found:
            expected = (
                f"an interface of {socket.gethostname()} with an IPv4 address, one of {', '.join(ours)}"
            )
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
    only = f"{socket.gethostname()} has only {', '.join(ours)}"
    expected = f"the network interface that reaches other nodes; {only}"
    raise ConfigError("interface", "", expected, file=file, where="environment")


def describe_wrong_hardware(reports: list[NodeReport], site: Profile) -> str:
    """Describe how the nodes' hardware differs from the profile's system; empty if equal, or for a local system."""
    if site.system in systems.LOCAL_SYSTEMS:
        return ""
    return nodes.hardware_mismatch(reports, systems.load_system_file(site.system), site.slurm.gpus_per_node)


def _refuse(recorder: Recorder, tasks: list[Task], reason: str) -> None:
    """Record the outcome `error` with `reason` for all experiments in a SLURM job's `tasks`.  Raises `DiskFull`."""
    for experiment in {e.name: e for task in tasks for e in task.experiments}.values():
        recorder.outcome(experiment, 0.0, outcome="error", reason=reason)


@dataclass(frozen=True)
class RunBundle:
    """Callable that submitit pickles and calls in a SLURM job, to run one bundle of experiments of a submission."""

    submission: str
    """Path of the submission's folder in the store."""
    bundle: int
    """Index of this job's bundle of experiments in the list of bundles in the submission's `work.json`."""

    def __call__(self) -> dict[str, Any]:
        """Run the bundle and return the number of experiments by outcome.

        During the run, SIGTERM and SIGUSR2 only set a flag, upon which the running experiment ends. Then this method
        calls submitit's own handler of SIGUSR2, which requeues the job.
        """
        environment = dict(os.environ)
        stop = AllocationStop(slurm_job_id(environment), int(environment.get("SLURM_RESTART_COUNT", "0")))
        previous = {number: signal.signal(number, stop.note) for number in (REQUEUE, signal.SIGTERM)}
        try:
            state = run_bundle(Path(self.submission), self.bundle, stop, environment)
            if state.open and stop.terminated and not stop.requeue:
                _wait_for_requeue_signal(stop)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if state.open and stop.requeue:
            if callable(requeue := previous[REQUEUE]):
                # submitit's handler ends this process, or raises after the maximum number of requeues.
                requeue(REQUEUE, None)
            sys.exit(128 + REQUEUE)
        if state.open and stop:
            sys.exit(128 + signal.SIGTERM)
        return state.count_outcomes()

    def checkpoint(self) -> DelayedSubmission:
        """Return the callable that submitit runs in the requeued job. It skips experiments that have already ended."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(RunBundle(self.submission, self.bundle))


def _wait_for_requeue_signal(stop: AllocationStop) -> None:
    """Wait up to `REQUEUE_SIGNAL_TIMEOUT_S` for the SIGUSR2 that follows SIGTERM at a preemption."""
    end = time.monotonic() + REQUEUE_SIGNAL_TIMEOUT_S
    while time.monotonic() < end and not stop.requeue:
        time.sleep(POLL_INTERVAL_S)


@dataclass(frozen=True)
class RunAwaitedJob:
    """Callable that submitit pickles and calls in a SLURM job, to run one launch and write its results to a file."""

    folder: str
    """Shared folder with the input `job.json`, the SLURM profile, and `answer.json`, to which the job writes."""
    target: str
    """Function that each rank calls, as `module:function`."""

    def __call__(self) -> str:
        """Run the launch, write results to `answer.json`, and return the outcome. Signals do not requeue the job."""
        environment, folder = dict(os.environ), Path(self.folder)
        stop = AllocationStop(slurm_job_id(environment))
        for number in (REQUEUE, signal.SIGTERM):
            signal.signal(number, stop.note)
        answer = _run_awaited_job(folder, self.target, stop, environment)
        write_json(folder / ANSWER_FILE, answer)
        return str(answer["outcome"])


def _run_awaited_job(
    folder: Path, target: str, stop: AllocationStop, environment: dict[str, str]
) -> dict[str, Any]:
    """Run one launch; return its outcome, reason, nodes and rank results, and this node's load before the launch."""
    answer: dict[str, Any] = {"outcome": "error", "load": round(os.getloadavg()[0], 2), "results": []}
    allocation = read_allocation(folder, environment)
    reports, missing = survey_nodes(allocation, folder / "nodes", stop)
    if missing:
        return answer | {"reason": stop.reason or missing}
    answer["place"] = nodes.slurm_provenance(reports, environment)
    if wrong := describe_wrong_hardware(reports, allocation.site):
        return answer | {"reason": wrong}
    names = [report.node for report in reports]
    job, logs = Job.load(folder / JOB_FILE), folder / "ranks"
    launch = ClusterLaunch(job, logs, allocation, names, target=target, stop=stop)
    try:
        launch.start()
        ending = supervise.watch(launch, interrupted=lambda: stop.reason)
        answer |= {"outcome": ending.outcome, "reason": ending.reason, "results": launch.results(0) or []}
    finally:
        launch.close(keep_logs=None if answer["outcome"] == "ok" else logs)
    return answer
