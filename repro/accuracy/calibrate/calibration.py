"""Calibration: check the options, measure with ranks on this machine or on SLURM nodes, and write a system file."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro.accuracy.calibrate import plan
from repro.accuracy.calibrate.document import system_tables, toml_text
from repro.config.errors import ConfigError, require
from repro.config.files import check_writable
from repro.config.sizes import at_most
from repro.config.suites import load_suite
from repro.config.systems import LOCAL_SYSTEMS, parse_system, system_names
from repro.launch import local_launch
from repro.launch.job import Interrupt, Job
from repro.launch.local_launch import run_once
from repro.measure.local_system import discover, load_system
from repro.util import files
from repro.util.processes import usable_cores

TARGET = "repro.accuracy.calibrate.target:run_rank"
TWIN_TARGET = "repro.accuracy.calibrate.target:run_rank_of_twin"
DEFAULT_CORE_RANKS = 2


@dataclass(frozen=True)
class Calibrated:
    """Outcome of a calibration, and the system file if the outcome is `ok`."""

    outcome: str
    """Outcome of the calibration: `ok`, or the failure of its measurement, such as `oom` or `hang`."""
    reason: str
    signal: int
    """Number of the signal that stopped the calibration; 0 if none did."""
    seconds: float
    path: Path
    document: dict[str, Any] = field(default_factory=dict)
    """Tables of the written system file; empty unless the outcome is `ok`."""


def run_calibration(
    system: str,
    gpus: int,
    output: Path | None,
    profile: Path | None,
    nodes: int,
    quick: bool,
    suites: Sequence[Path] = (),
    *,
    quiet: bool,
) -> Calibrated:
    """Measure this machine, or nodes of a cluster with a SLURM `profile`, and write a system file.

    `gpus` is the number of ranks per node. With `suites`, the measured operators are those of the scaled-down
    experiments in these suites. Such experiments emulate a network, so the only measured communication consists of
    messages and one ring collective. With `quiet`, no progress is printed.

    Raises:
        ConfigError: An option is wrong, or two options contradict each other.
    """
    path = _checked_output(output or Path(f"{system}-calibrated.toml"))
    if profile is None and nodes:
        raise ConfigError("--nodes", nodes, says="needs --profile, the SLURM profile of the cluster")
    if profile is not None and suites:
        right = "cannot be combined with --profile: experiments on emulated networks run on this machine"
        raise ConfigError("--suite", str(suites[0]), says=right)
    machine: LocalMachine | ClusterNodes = (
        LocalMachine(system, gpus, target=TWIN_TARGET if suites else TARGET)
        if profile is None
        else ClusterNodes(system, profile, nodes or 1, gpus, path)
    )
    here = machine.system, machine.ranks
    if suites:
        experiments = plan.suite_experiments(list(map(load_suite, suites)), *here, quick)
    else:
        experiments = plan.step_experiments(*here, machine.precision, quick, per_node=machine.per_node)
    began = time.perf_counter()
    with Interrupt() as interrupt:
        answer = machine.measure(Job(experiments=experiments), interrupt, quiet=quiet)
    document: dict[str, Any] = {}
    if answer["outcome"] == "ok" and not interrupt:
        document = system_tables(
            system,
            machine.precision,
            answer["results"],
            repeats=experiments[0].training.steps,
            load=answer["load"],
            quick=quick,
            site=allocation_facts(answer["place"]) if "place" in answer else None,
        )
        parse_system(document, name=path.stem, file=str(path))
        files.replace_file(path, toml_text(document))
    seconds = round(time.perf_counter() - began, 1)
    return Calibrated(answer["outcome"], answer.get("reason", ""), interrupt.signal, seconds, path, document)


def _checked_output(path: Path) -> Path:
    """Return `path` if a system file can be written there; raise `ConfigError` otherwise, before the measurement."""
    require(path.suffix == ".toml", "--output", str(path), "a file that ends in .toml")
    expected = f"a file name other than that of the packaged system {path.stem}"
    require(path.stem not in system_names(), "--output", str(path), expected)
    check_writable("--output", path)
    return path


class LocalMachine:
    """Local machine on which a calibration runs its ranks."""

    def __init__(self, system: str, gpus: int, *, target: str):
        """Check that the machine has the devices that the options request.

        `gpus` is the number of ranks; 0: one per GPU, or 2 on a CPU. `target` names the function that each rank runs.

        Raises:
            ConfigError: The machine does not have the requested devices.
        """
        self.target = target
        if system not in local_launch.DEVICES:
            expected = f"{' or '.join(local_launch.DEVICES)}, or the system of a SLURM --profile"
            raise ConfigError("--system", system, expected)
        require(gpus >= 0, "--gpus", gpus, "1 or more ranks, or 0 for the default")
        self.system, on_cpu = system, local_launch.DEVICES[system] == "cpu"
        visible = 0 if on_cpu else local_launch.count_cuda_devices()
        if not on_cpu and visible == 0:
            raise ConfigError("--system", system, "local, since this machine has no visible CUDA device")
        if not on_cpu and gpus > visible:
            raise ConfigError("--gpus", gpus, f"at most the {visible} CUDA devices that are visible here")
        if on_cpu:
            at_most("--gpus", gpus, local_launch.max_ranks())
        self.ranks = gpus or (min(DEFAULT_CORE_RANKS, usable_cores()) if on_cpu else visible)
        self.per_node = self.ranks
        self.precision = "fp32" if on_cpu else discover().best_precision

    def measure(self, job: Job, interrupt: Interrupt, *, quiet: bool) -> dict[str, Any]:
        """Run the calibration `job`; return `outcome`, failure `reason`, rank `results`, and initial machine `load`."""
        if not quiet:
            text = f"calibration with {self.ranks} ranks; other programs would increase the measured times"
            print(text, file=sys.stderr)
        load = round(os.getloadavg()[0], 2)
        ending, results = run_once(job, interrupt, target=self.target)
        return {"outcome": ending.outcome, "reason": ending.reason, "results": results, "load": load}


class ClusterNodes:
    """Nodes of a cluster, on which one SLURM job runs the ranks of a calibration."""

    def __init__(self, system: str, profile_file: Path, nodes: int, per_node: int, output: Path):
        """Check the options against the SLURM profile and the partition.

        `per_node` is the number of ranks per node; 0: as many as the profile allows. `output` must be in a folder that
        the nodes share.

        Raises:
            ConfigError: The cluster does not have the requested nodes, or SLURM does not answer.
        """
        from repro.launch.slurm import profile
        from repro.launch.slurm.scheduler import Scheduler, SchedulerError, check_partition
        from repro.launch.slurm.submission import profile_check

        self.site = profile.load_profile(profile_file)
        expected = f"{self.site.system}, which is the system in the SLURM profile {profile_file}"
        require(system == self.site.system, "--system", system, expected)
        most = self.site.ranks_per_node
        require(nodes >= 1, "--nodes", nodes, "1 or more")
        expected = f"1 to {most}, the number of ranks per node in {profile_file}"
        require(0 <= per_node <= most, "--gpus", per_node, expected)
        self.folder = output.absolute().parent
        profile_check.require_shared_folder(self.site, self.folder, option="--output", noun="file")
        self.system, self.nodes, self.per_node = system, nodes, per_node or most
        self.ranks = nodes * self.per_node
        on_cpu = local_launch.DEVICES.get(system) == "cpu"
        # The system "local-gpu" names no GPU model, so use fp16, which every GPU supports.
        best = "fp16" if system in LOCAL_SYSTEMS else load_system(system).best_precision
        self.precision = "fp32" if on_cpu else best
        file = self.site.file
        try:
            known = Scheduler().partitions()
        except SchedulerError as error:
            raise ConfigError("--profile", file, says=f"SLURM does not answer: {error}") from None
        partition = check_partition(known, self.site.slurm.partition, file=file, where="slurm")
        profile_check.require_node_resources(self.site, partition)
        expected = f"at most {partition.nodes}, the number of nodes of partition {partition.name}"
        require(self.nodes <= partition.nodes, "--nodes", self.nodes, expected)

    def measure(self, job: Job, interrupt: Interrupt, *, quiet: bool) -> dict[str, Any]:
        """Submit the calibration `job` to SLURM; return `outcome`, failure `reason`, rank `results`, initial `load`.

        The key `place` of the returned dictionary has the number, partition and nodes of the SLURM job.
        """
        from repro.launch.slurm.scheduler import SchedulerError, parse_time_limit
        from repro.launch.slurm.submission import submit
        from repro.launch.slurm.submission.job_array import ArrayShape, JobArray

        slurm, sizes = self.site.slurm, {"nodes": self.nodes, "tasks_per_node": self.per_node}
        limit = parse_time_limit(slurm.time_limit)
        array = JobArray(shape=ArrayShape(**sizes, time_min=limit, partition=slurm.partition), bundles=())
        folder = Path(tempfile.mkdtemp(prefix=".repro-calibrate-", dir=self.folder))
        answer: dict[str, Any] = {"outcome": "error"}
        try:
            number = submit.submit_job(folder, job, self.site, array, "repro-calibrate", target=TARGET)
            if not quiet:
                print(f"SLURM job {number}: {self.nodes} nodes x {self.per_node} ranks", file=sys.stderr)
            answer = submit.wait_for_answer(number, folder, interrupt, quiet=quiet)
        except SchedulerError as error:
            answer |= {"reason": f"sbatch failed: {error}", "results": []}
        finally:
            if answer["outcome"] not in ("ok", "interrupted"):
                print(f"the files of the failed job are in {folder}", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)
        return answer


def allocation_facts(place: dict[str, Any]) -> dict[str, Any]:
    """Return job number, partition and nodes of a SLURM allocation as facts for the provenance of a system file."""
    partition = {"slurm_partition": place["partition"]} if place["partition"] else {}
    return {"slurm_job": place["job_id"], **partition, "slurm_nodes": ",".join(place["nodes"])}
