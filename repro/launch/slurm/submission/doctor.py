"""`repro doctor --profile`: what a profile promises, beside what the cluster has, and what to change."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from repro.config import ConfigError
from repro.config.words import counted
from repro.launch.doctor import binding
from repro.launch.doctor.check import LIMITED, NO, YES, Check
from repro.launch.slurm.site.limits import clock, minutes
from repro.launch.slurm.site.profile import CaseClass, Profile
from repro.launch.slurm.site.scheduler import Partition, Scheduler, SchedulerError, call, check_partition
from repro.launch.slurm.submission import check, probe, script
from repro.launch.slurm.submission.pack import Array, ArrayShape

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "sinfo", "scontrol")


def examine(site: Profile, results: Path, nodes: int) -> Iterator[Check]:
    """Everything that is looked at; it ends with the first thing without which nothing can be asked."""
    gpus = (
        f"{site.gpus_per_node} x {site.slurm.gpu_type or 'any'} GPU a node" if site.gpus_per_node else "gloo"
    )
    yield Check("profile", YES, f"{site.file}: {site.system}, {gpus}", "cases of this system run here")
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        yield Check(
            "SLURM", NO, f"no {', '.join(missing)} on the path", "run this on a login node", fatal=True
        )
        return
    scheduler = Scheduler()
    try:
        version = call(["sinfo", "--version"]).strip()
        partitions = scheduler.partitions()
    except SchedulerError as error:
        yield Check("SLURM", NO, str(error), "slurmctld must answer", fatal=True)
        return
    yield Check("SLURM", YES, version, "jobs can be submitted")
    yield _accounting()
    yield _folder(site, results)
    try:
        partition = check_partition(partitions, site.slurm.partition, file=site.file, where="slurm")
    except ConfigError as error:
        yield Check("partition", NO, str(error), "change slurm.partition", fatal=True)
        return
    yield _partition("partition", site, partition, site.slurm.time_limit)
    for entry in site.case:
        yield _case(site, entry, partitions)
    yield from _gpus(site, partition)
    yield from binding.of_options(site.slurm.options, site.gpus_per_node)
    accepted = _request(site)
    yield accepted
    if nodes and not accepted.fatal:
        yield from _look(site, results, nodes)


def _accounting() -> Check:
    try:
        call(["sacct", "-n", "-X", "-j", "1"])
    except SchedulerError as error:
        meaning = "how a job ended is known while slurmctld remembers it (MinJobAge), else by what it wrote"
        return Check("accounting", LIMITED, str(error), meaning)
    return Check("accounting", YES, "sacct answers", "how every job ended is known")


def _folder(site: Profile, results: Path) -> Check:
    try:
        check.folder(site, results)
        check.writable(site, results)
    except ConfigError as error:
        return Check("folder", NO, str(error), "results must be where every node sees them", fatal=True)
    shared = site.storage.shared or "storage.shared is empty: taken for shared"
    return Check("folder", YES if site.storage.shared else LIMITED, f"{results} ({shared})", "takes results")


def _partition(name: str, site: Profile, partition: Partition, time_limit: str) -> Check:
    found = f"{partition.name}: {partition.nodes} nodes, limit {clock(partition.limit_min)}"
    where = "slurm" if name == "partition" else name
    if not partition.available:
        return Check(name, NO, f"{found}, down", f"change {where}.partition", fatal=True)
    if minutes(time_limit) > partition.limit_min:
        text = f"{found}; {where}.time_limit is {time_limit}"
        return Check(name, NO, text, f"shorten {where}.time_limit", fatal=True)
    most = partition.nodes * site.ranks_per_node
    return Check(name, YES, found, f"cases of up to {most} ranks")


def _case(site: Profile, entry: CaseClass, partitions: dict[str, Partition]) -> Check:
    """What differs for some cases fits as well.  What they ask for is not needed by others: nothing is fatal."""
    name, wanted = f"case {entry.match}", entry.partition or site.slurm.partition
    try:
        partition = check_partition(partitions, wanted, file=site.file, where=name)
    except ConfigError as error:
        return Check(name, LIMITED, str(error), "these cases are refused")
    found = _partition(name, site, partition, entry.time_limit or site.slurm.time_limit)
    return replace(found, state=LIMITED, fatal=False) if found.fatal else found


def _gpus(site: Profile, partition: Partition) -> Iterator[Check]:
    if not site.gpus_per_node:
        return
    if site.slurm.gpu_request == "none":
        yield Check("GPUs", LIMITED, "not asked for (gpu_request = none)", "nodes come with all they have")
        return
    types = ", ".join(partition.gpu_types) or "no type"
    found = f"{partition.gpus} a node, {types}"
    wanted = site.slurm.gpu_type
    if site.gpus_per_node > partition.gpus:
        yield Check(
            "GPUs", NO, f"{found}; slurm.gpus_per_node is {site.gpus_per_node}", "lower it", fatal=True
        )
    elif wanted and wanted.lower() not in [kind.lower() for kind in partition.gpu_types]:
        yield Check("GPUs", NO, f"{found}; slurm.gpu_type is {wanted}", "name one of these", fatal=True)
    else:
        yield Check("GPUs", YES, found, "one rank each")


def _request(site: Profile) -> Check:
    """Whether SLURM would take a job of this profile: account, quality of service, features, memory."""
    tasks = site.ranks_per_node
    shape = ArrayShape(
        nodes=1, tasks_per_node=tasks, time_min=minutes(site.slurm.time_limit), partition=site.slurm.partition
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.sh"
        path.write_text(script.text(Array(shape=shape, bundles=()), site, "repro-doctor", Path(folder)))
        try:
            call(["sbatch", "--test-only", str(path)])
        except SchedulerError as error:
            return Check(
                "request", NO, str(error), "see account, qos, constraint, memory, options", fatal=True
            )
    return Check(
        "request", YES, f"sbatch takes a node with {tasks} ranks", "jobs of this profile are accepted"
    )


def _look(site: Profile, results: Path, nodes: int) -> Iterator[Check]:
    print(f"waiting for a job on {counted(nodes, 'node')} to look from there ...", file=sys.stderr)
    try:
        seen = probe.run(site, results, nodes)
    except SchedulerError as error:
        yield Check("nodes", NO, str(error), "see environment.setup and environment.python", fatal=True)
        return
    yield from probe.judge(site, seen)
