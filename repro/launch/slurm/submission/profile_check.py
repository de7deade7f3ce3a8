"""Checks of a site profile against its SLURM cluster, for errors of `repro submit` and for `repro doctor --profile`."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from repro.config import ConfigError
from repro.config.words import count_noun
from repro.launch.doctor import LIMITED, NO, YES, Check
from repro.launch.doctor.machine import check_profile_binding
from repro.launch.slurm.profile import CaseClass, Profile
from repro.launch.slurm.scheduler import (
    Partition,
    Scheduler,
    SchedulerError,
    check_partition,
    format_time_limit,
    parse_time_limit,
    run_slurm_command,
)
from repro.launch.slurm.submission import job_array, probe
from repro.launch.slurm.submission.job_array import ArrayShape, JobArray
from repro.launch.slurm.submission.submission_plan import SubmissionPlan

SLURM_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol")


def require_shared_folder(
    site: Profile, path: Path, *, option: str = "--results", noun: str = "folder"
) -> None:
    """Raise `ConfigError` if `path`, the value of `option`, is not in the profile's shared folder."""
    if not site.storage.shared:
        return
    shared = Path(site.storage.shared).expanduser()
    if not path.resolve().is_relative_to(shared.resolve()):
        right = f"a {noun} in {shared}, the folder storage.shared of {site.file}"
        raise ConfigError(option, str(path), right)


def require_writable_folder(site: Profile, results: Path) -> None:
    """Raise `ConfigError` if the shared folder is missing or the folder `results` is not writable."""
    place = Path(site.storage.shared).expanduser() if site.storage.shared else results
    try:
        if site.storage.shared and not place.is_dir():
            raise FileNotFoundError(2, os.strerror(2), str(place))
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results):
            pass
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
        expected = f"a folder that can be written on this host and on the nodes ({reason})"
        raise ConfigError("shared", str(place), expected, file=site.file, where="storage") from None


def require_partition_limits(planned: SubmissionPlan, scheduler: Scheduler) -> None:
    """Raise `ConfigError` if a partition is too small for a job array, `SchedulerError` if SLURM does not answer."""
    partitions = scheduler.partitions()
    for array in planned.arrays:
        shape, site = array.shape, planned.profile
        partition = check_partition(partitions, shape.partition, file=site.file, where="slurm")
        name = array.bundles[0].experiments[0].name
        require_node_resources(site, partition)
        if shape.time_min > partition.limit_min:
            limit = format_time_limit(partition.limit_min)
            expected = f"at most {limit}, the time limit of partition {partition.name}"
            raise _refusal(site, "time_limit", format_time_limit(shape.time_min), expected)
        if shape.nodes > partition.nodes:
            expected = (
                f"at most {partition.nodes}, the number of nodes in partition {partition.name}; {name} has"
                f" {shape.world} ranks, {shape.tasks_per_node} per node: omit this case by --only, or name another"
                " partition"
            )
            raise _refusal(site, "nodes", shape.nodes, expected)


def require_node_resources(site: Profile, partition: Partition) -> None:
    """Raise `ConfigError` if the partition is down or its nodes lack the GPUs or cores that the profile requests."""
    slurm = site.slurm
    if not partition.available:
        raise _refusal(site, "partition", partition.name, "a partition that is up")
    if slurm.gpus_per_node > partition.gpus and slurm.gpu_request != "none":
        expected = f"at most {partition.gpus}, the number of GPUs in a node of partition {partition.name}"
        raise _refusal(site, "gpus_per_node", slurm.gpus_per_node, expected)
    wanted = slurm.gpu_type.lower()
    known = [kind.lower() for kind in partition.gpu_types]
    if wanted and slurm.gpu_request != "none" and wanted not in known:
        types = ", ".join(partition.gpu_types) or "none"
        expected = f"one of {types}, the GPU types of partition {partition.name}"
        raise _refusal(site, "gpu_type", slurm.gpu_type, expected)
    cores = slurm.cpus_per_task * site.ranks_per_node
    if cores > partition.cores:
        expected = (
            f"at most {partition.cores // site.ranks_per_node}: a node of partition {partition.name} has"
            f" {partition.cores} cores for {site.ranks_per_node} ranks"
        )
        raise _refusal(site, "cpus_per_task", slurm.cpus_per_task, expected)


def _refusal(site: Profile, key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(key, value, expected, file=site.file, where="slurm")


def examine_profile(site: Profile, results: Path, nodes: int) -> Iterator[Check]:
    """Yield checks of a site profile, and of `nodes` cluster nodes if not 0. A failed SLURM query ends the checks."""
    gpus = f"{site.slurm.gpus_per_node} x {site.slurm.gpu_type or 'any'} GPU per node"
    gpus = gpus if site.slurm.gpus_per_node else "gloo"
    yield Check("profile", YES, f"{site.file}: {site.system}, {gpus}", "experiments of this system can run")
    missing = [name for name in SLURM_COMMANDS if shutil.which(name) is None]
    if missing:
        found = f"no {', '.join(missing)} on PATH"
        yield Check("SLURM", NO, found, "run this command on a login node", fatal=True)
        return
    scheduler = Scheduler()
    try:
        version = run_slurm_command(["sinfo", "--version"]).strip()
        partitions = scheduler.partitions()
    except SchedulerError as error:
        yield Check("SLURM", NO, str(error), "slurmctld must answer", fatal=True)
        return
    yield Check("SLURM", YES, version, "jobs can be submitted")
    yield _accounting()
    yield _results_folder(site, results)
    try:
        partition = check_partition(partitions, site.slurm.partition, file=site.file, where="slurm")
    except ConfigError as error:
        yield Check("partition", NO, str(error), "change slurm.partition", fatal=True)
        return
    yield _partition("partition", site, partition, site.slurm.time_limit)
    for entry in site.case:
        yield _case(site, entry, partitions)
    yield from _gpus(site, partition)
    yield from check_profile_binding(site.slurm.options, site.slurm.gpus_per_node)
    accepted = _request(site)
    yield accepted
    if nodes and not accepted.fatal:
        yield from _probe(site, results, nodes)


def _accounting() -> Check:
    try:
        run_slurm_command(["sacct", "-n", "-X", "-j", "1"])
    except SchedulerError as error:
        meaning = "SLURM reports the end of a job for a few minutes only (MinJobAge)"
        return Check("accounting", LIMITED, str(error), meaning)
    return Check("accounting", YES, "sacct answers", "SLURM reports the end of every job")


def _results_folder(site: Profile, results: Path) -> Check:
    try:
        require_shared_folder(site, results)
        require_writable_folder(site, results)
    except ConfigError as error:
        return Check("folder", NO, str(error), "every node must be able to write results", fatal=True)
    shared = site.storage.shared or "the folder is assumed to be shared, because storage.shared is empty"
    return Check("folder", YES if site.storage.shared else LIMITED, f"{results} ({shared})", "stores results")


def _partition(name: str, site: Profile, partition: Partition, time_limit: str) -> Check:
    found = f"{partition.name}: {partition.nodes} nodes, time limit {format_time_limit(partition.limit_min)}"
    where = "slurm" if name == "partition" else name
    if not partition.available:
        return Check(name, NO, f"{found}, down", f"change {where}.partition", fatal=True)
    if parse_time_limit(time_limit) > partition.limit_min:
        text = f"{found}; {where}.time_limit is {time_limit}"
        return Check(name, NO, text, f"shorten {where}.time_limit", fatal=True)
    most = partition.nodes * site.ranks_per_node
    return Check(name, YES, found, f"cases of up to {most} ranks can run")


def _case(site: Profile, entry: CaseClass, partitions: dict[str, Partition]) -> Check:
    """Check the SLURM partition of a profile's `[[case]]` table; a failure concerns only the table's experiments."""
    name, wanted = f"case {entry.match}", entry.partition or site.slurm.partition
    try:
        partition = check_partition(partitions, wanted, file=site.file, where=name)
    except ConfigError as error:
        return Check(name, LIMITED, str(error), "experiments of this [[case]] table cannot be submitted")
    found = _partition(name, site, partition, entry.time_limit or site.slurm.time_limit)
    return replace(found, state=LIMITED, fatal=False) if found.fatal else found


def _gpus(site: Profile, partition: Partition) -> Iterator[Check]:
    if not site.slurm.gpus_per_node:
        return
    if site.slurm.gpu_request == "none":
        yield Check(
            "GPUs",
            LIMITED,
            "jobs request no GPUs, because gpu_request = none",
            "the site must allocate full nodes",
        )
        return
    types = ", ".join(partition.gpu_types) or "no type"
    found = f"{partition.gpus} per node, {types}"
    wanted = site.slurm.gpu_type
    if site.slurm.gpus_per_node > partition.gpus:
        found += f"; slurm.gpus_per_node is {site.slurm.gpus_per_node}"
        yield Check("GPUs", NO, found, "lower slurm.gpus_per_node", fatal=True)
    elif wanted and wanted.lower() not in [kind.lower() for kind in partition.gpu_types]:
        yield Check("GPUs", NO, f"{found}; slurm.gpu_type is {wanted}", "change slurm.gpu_type", fatal=True)
    else:
        yield Check("GPUs", YES, found, "each GPU runs one rank")


def _request(site: Profile) -> Check:
    """Check with `sbatch --test-only` whether SLURM accepts a job of the site profile on one node."""
    tasks, minutes = site.ranks_per_node, parse_time_limit(site.slurm.time_limit)
    shape = ArrayShape(nodes=1, tasks_per_node=tasks, time_min=minutes, partition=site.slurm.partition)
    with tempfile.TemporaryDirectory() as folder:
        path, array = Path(folder) / "probe.sh", JobArray(shape=shape, bundles=())
        path.write_text(job_array.batch_script(array, site, "repro-doctor", Path(folder)))
        try:
            run_slurm_command(["sbatch", "--test-only", str(path)])
        except SchedulerError as error:
            where = "check account, qos, constraint, memory and options of the profile"
            return Check("request", NO, str(error), where, fatal=True)
    found = f"sbatch accepts a node with {tasks} ranks"
    return Check("request", YES, found, "jobs of this profile are accepted")


def _probe(site: Profile, results: Path, nodes: int) -> Iterator[Check]:
    print(f"waiting for a job that checks {count_noun(nodes, 'node')} ...", file=sys.stderr)
    try:
        seen = probe.probe_nodes(site, results, nodes)
    except SchedulerError as error:
        yield Check("nodes", NO, str(error), "check environment.setup and environment.python", fatal=True)
        return
    yield from probe.check_nodes(site, seen)
