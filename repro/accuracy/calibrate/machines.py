"""What is measured: this machine, or nodes that SLURM gives; both answer alike."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

from repro.config.errors import ConfigError, require
from repro.config.sizes import at_most
from repro.config.systems import LOCAL_SYSTEMS
from repro.launch import local_capacity
from repro.launch.job import Interrupt, Job
from repro.launch.local_launch import run_once
from repro.measure.local_system import discover, load_system
from repro.util.processes import usable_cores

TARGET = "repro.accuracy.calibrate.target:run_rank"
TWIN_TARGET = "repro.accuracy.calibrate.target:run_rank_of_twin"
RANKS_ON_CORES = 2


class Machine(Protocol):
    """Where ranks run, and how many."""

    system: str
    """As an experiment names it: it decides between processor cores and GPUs."""
    ranks: int
    per_node: int
    precision: str

    def measure(self, job: Job, interrupt: Interrupt, *, quiet: bool) -> dict[str, Any]:
        """`outcome`, `reason`, `results` of the ranks, `load` before they began, and `place`, of an
        allocation what `repro.launch.slurm.allocation.nodes.slurm_provenance` says."""


class Here:
    """This machine."""

    def __init__(self, system: str, gpus: int, *, target: str = ""):
        """`gpus`: ranks; 0: every GPU, or 2 on cores.  `target`: what they do, if not all that is usual.

        Raises `ConfigError`.
        """
        self.target = target
        if system not in local_capacity.DEVICES:
            known = ", ".join(local_capacity.DEVICES)
            expected = f"one of {known}: what can be measured is the machine at hand, or with "
            raise ConfigError("--system", system, f"{expected}--profile a cluster")
        require(gpus >= 0, "--gpus", gpus, "a number of ranks, 1 or more")
        self.system, on_cpu = system, local_capacity.DEVICES[system] == "cpu"
        visible = 0 if on_cpu else local_capacity.count_cuda_devices()
        if not on_cpu and visible == 0:
            raise ConfigError("--system", system, "a machine with CUDA devices; none is visible here")
        if not on_cpu and gpus > visible:
            raise ConfigError("--gpus", gpus, f"at most the {visible} CUDA devices that are visible here")
        if on_cpu:
            at_most("--gpus", gpus, local_capacity.max_ranks())
        self.ranks = gpus or (min(RANKS_ON_CORES, usable_cores()) if on_cpu else visible)
        self.per_node = self.ranks
        self.precision = "fp32" if on_cpu else discover().best_precision

    def measure(self, job: Job, interrupt: Interrupt, *, quiet: bool) -> dict[str, Any]:
        """See `Machine`."""
        if not quiet:
            print(f"measuring with {self.ranks} ranks; let nothing else run meanwhile", file=sys.stderr)
        load = round(os.getloadavg()[0], 2)
        ending, results = run_once(job, interrupt, target=self.target or TARGET)
        return {"outcome": ending.outcome, "reason": ending.reason, "results": results, "load": load}


class Nodes:
    """Nodes of a cluster, in one job."""

    def __init__(self, system: str, profile_file: Path, nodes: int, per_node: int, output: Path):
        """`per_node`: 0: all that the profile allows.  `output`: in a folder that the nodes see.

        Raises `ConfigError`.
        """
        from repro.launch.slurm import profile
        from repro.launch.slurm.submission import profile_check

        self.site = profile.load_profile(profile_file)
        expected = f"{self.site.system}, which the nodes of {profile_file} are"
        require(system == self.site.system, "--system", system, expected)
        most = self.site.ranks_per_node
        require(nodes >= 1, "--nodes", nodes, "a number of nodes, 1 or more")
        require(
            0 <= per_node <= most, "--gpus", per_node, f"1 to {most}, the ranks of a node by {profile_file}"
        )
        self.folder = output.absolute().parent
        profile_check.require_shared_folder(self.site, self.folder, option="--output", noun="file")
        self.system, self.nodes, self.per_node = system, nodes, per_node or most
        self.ranks = nodes * self.per_node
        on_cpu = local_capacity.DEVICES.get(system) == "cpu"
        # What a site's "local-gpu" is cannot be known here; every GPU has fp16.
        self.precision = (
            "fp32" if on_cpu else "fp16" if system in LOCAL_SYSTEMS else load_system(system).best_precision
        )
        self._check_partition()

    def _check_partition(self) -> None:
        from repro.launch.slurm.scheduler import Scheduler, SchedulerError, check_partition
        from repro.launch.slurm.submission import profile_check

        file = self.site.file
        try:
            known = Scheduler().partitions()
        except SchedulerError as error:
            raise ConfigError("--profile", file, says=f"SLURM does not answer: {error}") from None
        partition = check_partition(known, self.site.slurm.partition, file=file, where="slurm")
        profile_check.require_node_resources(self.site, partition)
        expected = f"at most {partition.nodes}, what partition {partition.name} has"
        require(self.nodes <= partition.nodes, "--nodes", self.nodes, expected)

    def measure(self, job: Job, interrupt: Interrupt, *, quiet: bool) -> dict[str, Any]:
        """See `Machine`."""
        from repro.launch.slurm.scheduler import SchedulerError, parse_time_limit
        from repro.launch.slurm.submission import submit
        from repro.launch.slurm.submission.job_array import ArrayShape, JobArray

        slurm = self.site.slurm
        shape = ArrayShape(
            nodes=self.nodes,
            tasks_per_node=self.per_node,
            time_min=parse_time_limit(slurm.time_limit),
            partition=slurm.partition,
        )
        array = JobArray(shape=shape, bundles=())
        folder = Path(tempfile.mkdtemp(prefix=".repro-calibrate-", dir=self.folder))
        answer: dict[str, Any] = {"outcome": "error"}
        try:
            number = submit.submit_job(folder, job, self.site, array, "repro-calibrate", target=TARGET)
            if not quiet:
                print(f"job {number}: {self.nodes} nodes x {self.per_node} ranks", file=sys.stderr)
            answer = submit.wait_for_answer(number, folder, interrupt, quiet=quiet)
        except SchedulerError as error:
            answer |= {"reason": f"sbatch failed: {error}", "results": []}
        finally:
            if answer["outcome"] not in ("ok", "interrupted"):
                print(f"what the job wrote: {folder}", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)
        return answer


def facts(place: dict[str, Any]) -> dict[str, Any]:
    """Of an allocation, what a system file keeps: job, partition, nodes."""
    return {
        "slurm_job": place["job_id"],
        **({"slurm_partition": place["partition"]} if place["partition"] else {}),
        "slurm_nodes": ",".join(place["nodes"]),
    }
