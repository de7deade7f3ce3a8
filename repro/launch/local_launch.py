"""The local launcher: starts one process per rank on this machine, and checks which experiments the machine can run."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from repro import engines
from repro.config import Experiment
from repro.config.layout import ELEMENT_BYTES
from repro.config.sizes import RANKS_PER_CORE, SizeLimit
from repro.emulate import compute_rate, lab
from repro.emulate.network import RunningNetwork
from repro.launch import rank_process, supervise
from repro.launch.job import NETWORK_FILE, STOP_FILE, Interrupt, Job
from repro.launch.rank import program as rank_program
from repro.launch.rank_process import HeartbeatReader, Position
from repro.measure.provenance import nvml
from repro.model.counts import total_parameters
from repro.simulate.plan.closed_form import state_bytes
from repro.util import units
from repro.util.files import read_json, write_json
from repro.util.processes import memory_and_swap, usable_cores

REAP_TIMEOUT_S = 10.0
STACKS_POLL_INTERVAL_S = 0.05


def scratch_parent() -> Path:
    """Return the parent folder of short-lived files, in shared memory, so that heartbeats do not wait for a disk."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class LocalLaunch:
    """Launch of a job of local processes. Call `start` in the main thread, because ranks end with the thread."""

    def __init__(self, job: Job, logs: Path, *, target: str = rank_program.DEFAULT_TARGET):
        self.job = job
        self.world = job.world
        self.logs = logs
        self.folder = Path(tempfile.mkdtemp(prefix="repro-", dir=scratch_parent()))
        job.save(self.folder / "job.json")
        self._heartbeats = HeartbeatReader(self.folder / "heartbeat", self.world)
        self._target = target
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._network: RunningNetwork | None = None

    def start(self) -> None:
        """Start all ranks and the job's emulated network, if any.  Raises `NoNetwork` if no network can be created."""
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        if self.job.network is not None:
            network = self.job.network
            if network.flops_per_s:
                network = network.scaled(compute_rate.rank_flops_per_s(self.world))
            self._network = RunningNetwork(network)
            write_json(self.folder / NETWORK_FILE, asdict(self._network.facts))
        device = DEVICES[self.job.experiments[0].system]
        for rank in range(self.world):
            rendezvous = f"file://{self.folder}/rendezvous"
            command = rank_process.rank_command(
                self.folder, rank, device=device, rendezvous=rendezvous, target=self._target
            )
            own = rank_environment(rank, self.world, limited=bool(self.job.memory_bytes))
            if self._network is not None:
                command = self._network.facts.exec_command(rank, command)
                own |= _on_node(self._network.network.ranks_per_node, rank)
            self._ranks.append(rank_process.start_rank(command, self.logs, rank, own))

    def poll(self, rank: int) -> int | None:
        """Return the exit code of `rank`, negative if a signal ended the rank; None while the rank runs."""
        return self._ranks[rank].poll()

    def position(self, rank: int) -> Position:
        """Return the position (experiment, step, phase, collective) that `rank` last reported."""
        return self._heartbeats.position(rank)

    def stopped(self, rank: int) -> bool:
        """Return whether a signal or a debugger has stopped `rank`."""
        return rank_process.is_stopped(self._ranks[rank].pid)

    def report(self, rank: int) -> dict[str, Any] | None:
        """Return the report that `rank` wrote at its end, `{"rank", "outcome", "reason"}`; None without a report."""
        return read_json(rank_program.rank_report_path(self.folder, rank)) or None

    def results(self, index: int) -> list[dict[str, Any]] | None:
        """Return the results of all ranks for experiment `index` of the job; None unless every rank has finished it."""
        found = [read_json(rank_program.result_path(self.folder, index, rank)) for rank in range(self.world)]
        return found if all(found) else None

    def error_text(self, rank: int) -> str:
        """Return the end of the standard error of `rank`."""
        return rank_process.read_error_log(self.logs, rank)

    def dump_stacks(self) -> None:
        """Request the Python stacks of every running rank, and wait until its error log contains the stacks."""
        logs = {rank: rank_process.error_log_path(self.logs, rank) for rank in range(self.world)}
        before = {rank: rank_process.count_stacks(log) for rank, log in logs.items()}
        self._signal(rank_process.STACKS_SIGNAL)
        end = time.monotonic() + rank_process.STACKS_TIMEOUT_S
        waiting = list(logs)
        while waiting and time.monotonic() < end:
            time.sleep(STACKS_POLL_INTERVAL_S)
            can_write = [rank for rank in waiting if self.poll(rank) is None and not self.stopped(rank)]
            waiting = [rank for rank in can_write if rank_process.count_stacks(logs[rank]) == before[rank]]

    def ask_to_stop(self) -> None:
        """Request that all ranks write a checkpoint after the current step and then end."""
        (self.folder / STOP_FILE).touch()

    def kill(self) -> None:
        """Kill and reap the running ranks and their children."""
        self._signal(signal.SIGKILL)
        for process in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(REAP_TIMEOUT_S)

    def close(self, *, keep_logs: Path | None) -> None:
        """Kill the ranks, remove their files, and move the logs to the folder `keep_logs` (None: remove the logs)."""
        self.kill()
        if self._network is not None:
            self._network.close()
        self._heartbeats.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        rank_process.move_logs(self.logs, keep_logs)

    def _signal(self, number: int) -> None:
        for process in self._ranks:
            rank_process.signal_rank(process, number)


def rank_environment(rank: int, world: int, *, limited: bool = False) -> dict[str, str]:
    """Return the environment of one rank: variables of this process and of `torchrun`, and its number of threads.

    With a memory limit (`limited`), glibc returns freed tensors to the kernel at once. Otherwise freed blocks of up to
    32 MB would remain in the heap and count against the limit.
    """
    cores = len(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // world)),
        # Without GLOO_SOCKET_IFNAME, gloo resolves the host's name, which fails on machines without a network.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if limited:
        defaults["MALLOC_MMAP_THRESHOLD_"] = str(256 * 1024)
    ours = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    ours["LOCAL_WORLD_SIZE"] = ours["WORLD_SIZE"]
    return {**defaults, **os.environ, **ours}


def _on_node(ranks: int, rank: int) -> dict[str, str]:
    """Return environment variables of a rank on an emulated node of `ranks` ranks; they override those of the user."""
    place = {"LOCAL_RANK": str(rank % ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **place}


def run_once(job: Job, interrupt: Interrupt, *, target: str) -> tuple[supervise.Ending, list[dict[str, Any]]]:
    """Run a job, and return the outcome of the launch and the first experiment's result on each rank.

    The list of results is empty if a rank has no result. `target`: function that each rank calls, `module:function`.
    """
    logs = Path(tempfile.mkdtemp(prefix="repro-once-"))
    launch = LocalLaunch(job, logs / "logs", target=target)
    try:
        launch.start()
        ending = supervise.watch(launch, interrupted=lambda: interrupt.reason)
        return ending, launch.results(0) or []
    finally:
        launch.close(keep_logs=None)
        shutil.rmtree(logs, ignore_errors=True)


DEVICES = {"local": "cpu", "local-gpu": "cuda"}
"""Device type (`cpu` or `cuda`) of each system on which the local launcher can start ranks."""


def missing_resource(experiment: Experiment) -> str:
    """Return the devices or software that an experiment needs and this machine lacks; empty if nothing is missing."""
    world = experiment.layout.world
    if experiment.system not in DEVICES:
        return f"{world} GPUs of system {experiment.system}"
    on_gpu, most = DEVICES[experiment.system] == "cuda", max_ranks()
    if on_gpu and world > count_cuda_devices():
        return f"{world} GPUs of system {experiment.system}, but the number of visible GPUs is {count_cuda_devices()}"
    if not on_gpu and world > most.value:
        return f"{world} processes (one per rank), but this machine runs at most {most.value} ({most.why})"
    if lacking := engines.missing_library(experiment.engine):
        return lacking
    return lab.missing_requirement() if experiment.network is not None else ""


def max_ranks() -> SizeLimit:
    """Return the maximum number of ranks that may run on this machine's processor cores."""
    cores = usable_cores()
    return SizeLimit(RANKS_PER_CORE.value * cores, f"{RANKS_PER_CORE.value} a core: {RANKS_PER_CORE.why}")


def count_cuda_devices() -> int:
    """Return the number of CUDA devices that a rank can use, by CUDA_VISIBLE_DEVICES or NVML, without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    with nvml() as n:
        return int(n.nvmlDeviceGetCount()) if n else 0


def memory_shortage(experiment: Experiment) -> str:
    """Return a message if an experiment exceeds this machine's memory, with a size that fits; empty if it may fit.

    The estimate is a lower bound, so every rejected experiment would run out of memory.
    """
    model, layout = experiment.model, experiment.layout
    limit = experiment.limits.memory_bytes * layout.world or math.inf
    free, parameters = memory_and_swap(), total_parameters(model)
    states = min(layout.copies * sum(state_bytes(parameters, layout).values()), limit)
    # Even with recomputation, the inputs of all transformer layers are stored until the backward pass.
    tokens = layout.dp * layout.micro_batch * experiment.seq
    inputs = min(model.layers * tokens * model.hidden * ELEMENT_BYTES[layout.precision], limit)
    if states > free:
        return (
            f"{units.size(states)} of memory for model states alone, and {units.size(free)} are free here; "
            f"model = {model.name!r} has {parameters:,} parameters, and at most "
            f"{int(parameters * free / states):,} fit in this layout"
        )
    if states + inputs > free:
        fits = int(layout.micro_batch * (free - states) / inputs)
        return (
            f"{units.size(states + inputs)} of memory for model states and the blocks' inputs alone, and "
            f"{units.size(free)} are free here; layout.micro_batch = {layout.micro_batch}, "
            f"and at most {fits} fit"
        )
    return ""
