"""What is wrong with a profile on this cluster, found before anything is submitted: one line each."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from repro.config import ConfigError
from repro.launch.slurm.site.limits import clock
from repro.launch.slurm.site.profile import Profile
from repro.launch.slurm.site.scheduler import Partition, Scheduler, check_partition
from repro.launch.slurm.submission.intent import Intent


def folder(site: Profile, results: Path) -> None:
    """Results are below the folder that all nodes see.  Raises `ConfigError`."""
    if not site.storage.shared:
        return
    shared = Path(site.storage.shared).expanduser()
    if not results.resolve().is_relative_to(shared.resolve()):
        expected = f"a folder below {shared}, the shared folder of {site.file}"
        raise ConfigError("--results", str(results), expected)


def writable(site: Profile, results: Path) -> None:
    """The shared folder exists and takes files.  Raises `ConfigError`."""
    place = Path(site.storage.shared).expanduser() if site.storage.shared else results
    try:
        if site.storage.shared and not place.is_dir():
            raise FileNotFoundError(2, os.strerror(2), str(place))
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results):
            pass
    except OSError as error:
        expected = f"a folder that can be written here and on the nodes ({error.strerror}: {error.filename})"
        raise ConfigError("shared", str(place), expected, file=site.file, where="storage") from None


def cluster(intent: Intent, scheduler: Scheduler) -> None:
    """Every array fits its partition.  Raises `ConfigError`, or `SchedulerError` if SLURM is silent."""
    partitions = scheduler.partitions()
    for array in intent.arrays:
        shape = array.shape
        partition = check_partition(partitions, shape.partition, file=intent.profile.file, where="slurm")
        name = array.bundles[0].experiments[0].name
        fits(intent.profile, partition)
        if shape.time_min > partition.limit_min:
            expected = f"at most {clock(partition.limit_min)}, the limit of partition {partition.name}"
            _refuse(intent, "time_limit", clock(shape.time_min), expected)
        if shape.nodes > partition.nodes:
            expected = (
                f"at most {partition.nodes} nodes in partition {partition.name}; {name} has {shape.world} ranks,"
                f" {shape.tasks_per_node} on a node: leave it out with --only, or name another partition"
            )
            _refuse(intent, "nodes", shape.nodes, expected)


def fits(site: Profile, partition: Partition) -> None:
    """The partition is up and its nodes have what the profile asks of each.  Raises `ConfigError`."""
    slurm = site.slurm
    if not partition.available:
        raise ConfigError(
            "partition", partition.name, "a partition that is up", file=site.file, where="slurm"
        )
    if slurm.gpus_per_node > partition.gpus and slurm.gpu_request != "none":
        expected = f"at most {partition.gpus}, what a node of partition {partition.name} has"
        raise ConfigError("gpus_per_node", slurm.gpus_per_node, expected, file=site.file, where="slurm")
    wanted = slurm.gpu_type.lower()
    known = [kind.lower() for kind in partition.gpu_types]
    if wanted and slurm.gpu_request != "none" and wanted not in known:
        expected = (
            f"one of {', '.join(partition.gpu_types) or 'none'}, the types of partition {partition.name}"
        )
        raise ConfigError("gpu_type", slurm.gpu_type, expected, file=site.file, where="slurm")
    cores = slurm.cpus_per_task * site.ranks_per_node
    if cores > partition.cores:
        expected = (
            f"at most {partition.cores // site.ranks_per_node}: a node of partition {partition.name} has"
            f" {partition.cores} cores for {site.ranks_per_node} ranks"
        )
        raise ConfigError("cpus_per_task", slurm.cpus_per_task, expected, file=site.file, where="slurm")


def _refuse(intent: Intent, key: str, value: object, expected: str) -> None:
    raise ConfigError(key, value, expected, file=intent.profile.file, where="slurm")
