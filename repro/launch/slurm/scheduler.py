"""Queries of SLURM: states of jobs, partitions and time limits, in a few commands for any number of jobs.

`squeue` reports waiting and running jobs, and `sacct` ended jobs. On a site without accounting, `scontrol` reports jobs
for a few minutes after their end (MinJobAge), and `Scheduler.warnings` reports this limitation.
"""

from __future__ import annotations

import getpass
import math
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from repro.config.errors import ConfigError

COMMAND_TIMEOUT_S = 30.0
WAITING = frozenset(
    ["PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"]
)
"""SLURM job states in which the job has not started."""
LIVE = WAITING | {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
"""SLURM job states in which the job has not ended."""
UNKNOWN = "UNKNOWN"
_MAX_IDS_PER_CALL = 200
"""Maximum number of job ids in one command line."""
_TIME_LIMIT = re.compile(r"(?:(?P<d>\d+)-)?(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?$")
UNLIMITED = math.inf


@dataclass(frozen=True, kw_only=True)
class JobState:
    """State of one SLURM job, or of one element of a job array."""

    state: str
    """State that SLURM reports: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, PREEMPTED, ..."""
    reason: str = ""
    """Reason that SLURM gives for the wait of a job, for example `Resources`, or for its end."""
    nodes: str = ""
    """SLURM's list of the job's nodes, for example `n[1-2]`; empty before the job starts."""
    exit_code: str = ""
    """Exit code and signal of the job, as `code:signal`; empty if SLURM did not report an exit code."""
    restarts: int = 0
    """Number of times that SLURM has requeued the job."""

    @property
    def live(self) -> bool:
        """Return whether the SLURM job has not ended."""
        return self.state in LIVE

    @property
    def waiting(self) -> bool:
        """Return whether the SLURM job waits for nodes."""
        return self.state in WAITING


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A SLURM partition and the resources of its nodes, from `sinfo`."""

    name: str
    default: bool
    available: bool
    limit_min: float
    """Maximum time limit of a job in the partition, in minutes."""
    nodes: int
    gpus: int
    """Number of GPUs of the partition's largest node."""
    gpu_types: tuple[str, ...]
    cores: int
    """Number of processor cores of the partition's smallest node."""


class SchedulerError(RuntimeError):
    """Error of a SLURM command. The message names the command and its error in one line."""


def run_slurm_command(command: list[str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    """Return a SLURM command's standard output. Raises `SchedulerError` if it is missing, fails or is too slow."""
    if shutil.which(command[0]) is None:
        raise SchedulerError(f"{command[0]}: not found: run repro on a login node of the cluster")
    try:
        silent: Any = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        done = subprocess.run(command, timeout=timeout_s, **silent)
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{command[0]}: no answer in {timeout_s:g} s: is slurmctld up?") from None
    if done.returncode:
        error = " ".join((done.stderr or done.stdout).split())[-300:]
        raise SchedulerError(f"{command[0]}: {error or f'exit code {done.returncode}'}")
    return done.stdout


class Scheduler:
    """Queries of SLURM for jobs and partitions. `warnings` lists information that the site's SLURM cannot provide."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def jobs(self, ids: Iterable[str]) -> dict[str, JobState]:
        """Return the states of the jobs in `ids`, without jobs that SLURM no longer lists.

        An id is `12`, or `12_3` for an element of a job array. Raises `SchedulerError` if `squeue` fails.
        """
        wanted = set(ids)
        if not wanted:
            return {}
        found = {key: job for key, job in self._queue().items() if key in wanted}
        rest = {key for key in wanted if key not in found or not found[key].live}
        if rest:
            found |= {key: job for key, job in self._ended(rest).items() if key in rest}
        return found

    def _queue(self) -> dict[str, JobState]:
        """Return the states of this user's jobs that `squeue` lists, by job id."""
        command = ["squeue", "-h", "-r", "-t", "all", "-u", getpass.getuser(), "-o", "%i|%T|%r|%N"]
        rows = (line.split("|") for line in run_slurm_command(command).splitlines())
        complete = (row for row in rows if len(row) == 4)
        return {
            at: JobState(state=state, reason=_clean(why), nodes=nodes) for at, state, why, nodes in complete
        }

    def _ended(self, ids: set[str]) -> dict[str, JobState]:
        try:
            return _accounted_jobs(ids)
        except SchedulerError as error:
            known = "SLURM reports the end of a job for a few minutes only; later only the job's files show its end"
            self.warnings.append(f"no accounting on this cluster ({error}): {known}")
        return _remembered_jobs(ids)

    def partitions(self) -> dict[str, Partition]:
        """Return all partitions of the cluster by name.  Raises `SchedulerError`."""
        found: dict[str, Partition] = {}
        for line in run_slurm_command(["sinfo", "-h", "-o", "%P|%a|%l|%D|%G|%c"]).splitlines():
            name, up, limit, nodes, gres, cores = line.split("|")
            clean = name.rstrip("*")
            gpus = _gpus(gres)
            old = found.get(clean)
            found[clean] = Partition(
                name=clean,
                default=name.endswith("*"),
                available=up == "up",
                limit_min=parse_time_limit(limit),
                nodes=int(nodes) + (old.nodes if old else 0),
                gpus=max(sum(gpus.values()), old.gpus if old else 0),
                gpu_types=tuple(sorted({*gpus, *(old.gpu_types if old else ())} - {""})),
                cores=min(int(cores.rstrip("+")), old.cores if old else 1 << 30),
            )
        return found

    def cancel(self, ids: list[str]) -> None:
        """Cancel jobs.  Raises `SchedulerError`."""
        for start in range(0, len(ids), _MAX_IDS_PER_CALL):
            run_slurm_command(["scancel", *ids[start : start + _MAX_IDS_PER_CALL]])


def _accounted_jobs(ids: set[str]) -> dict[str, JobState]:
    """Return the state of the last run of each job in `ids` from the accounting database (`sacct`)."""
    found: dict[str, JobState] = {}
    arrays = sorted({key.split("_")[0] for key in ids})
    for start in range(0, len(arrays), _MAX_IDS_PER_CALL):
        command = ["sacct", "-n", "-X", "-P", "-o", "JobID,State,Reason,NodeList,ExitCode"]
        part = ",".join(arrays[start : start + _MAX_IDS_PER_CALL])
        for line in run_slurm_command([*command, "-j", part]).splitlines():
            row = line.split("|")
            if len(row) != 5:
                continue
            state = row[1].split()[0] if row[1] else UNKNOWN  # The state may be "CANCELLED by USER_ID".
            job = JobState(state=state, reason=_clean(row[2]), nodes=_clean(row[3]), exit_code=row[4])
            found |= dict.fromkeys(expand(row[0]), job)
    return found


def _remembered_jobs(ids: set[str]) -> dict[str, JobState]:
    """Return the states of the jobs in `ids` that slurmctld has in memory, from `scontrol show job`."""
    found: dict[str, JobState] = {}
    for line in run_slurm_command(["scontrol", "show", "job", "-o"]).splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobId" not in fields:
            continue
        element = fields.get("ArrayTaskId")
        key = f"{fields['ArrayJobId']}_{element}" if element else fields["JobId"]
        job = JobState(
            state=fields.get("JobState", UNKNOWN),
            reason=_clean(fields.get("Reason", "")),
            nodes=_clean(fields.get("NodeList", "")),
            exit_code=fields.get("ExitCode", ""),
            restarts=int(fields.get("Restarts", "0")),
        )
        found |= {key: job for key in expand(key) if key in ids}
    return found


def expand(job_id: str) -> list[str]:
    """Return the ids of a job array's elements: `12_[0-2,5%4]` gives `12_0`, `12_1`, `12_2` and `12_5`."""
    found = re.fullmatch(r"(\d+)_\[?([\d,\-]+)(?:%\d+)?\]?", job_id)
    if found is None:
        return [job_id]
    keys = []
    for part in found.group(2).split(","):
        first, _, last = part.partition("-")
        keys += [f"{found.group(1)}_{index}" for index in range(int(first), int(last or first) + 1)]
    return keys


def check_partition(partitions: dict[str, Partition], name: str, *, file: str, where: str) -> Partition:
    """Return the partition `name`, or the default partition if `name` is ''. Raises `ConfigError` if it is missing."""
    known = ", ".join(sorted(partitions))
    name = name or next((found.name for found in partitions.values() if found.default), "")
    if name in partitions:
        return partitions[name]
    no_default = "the key is empty, and the cluster has no default partition"
    says = "the cluster has no such partition" if name else no_default
    given = [name] if name else []
    raise ConfigError("partition", *given, says=f"{says}; its partitions are {known}", file=file, where=where)


def _gpus(gres: str) -> dict[str, int]:
    """Return the GPUs per type in SLURM's text `gres`, such as `gpu:v100:8(S:0-1),nic:2`; `gpu:8` has the type ''."""
    found: dict[str, int] = {}
    for kind, count in re.findall(r"\bgpu:(?:([\w\-.]+):)?(\d+)", gres):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def _clean(text: str) -> str:
    """Return a field of SLURM's output, or an empty text for SLURM's placeholders such as `None` and `(null)`."""
    return "" if text in ("None", "None assigned", "(null)", "Unknown") else text


def parse_time_limit(text: str) -> float:
    """Return a SLURM time limit in minutes: `90` (minutes), `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM`, `D-HH:MM:SS`.

    `UNLIMITED`, `infinite` and `N/A` give infinity.  Raises `ConfigError` for other text.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "N/A"):
        return UNLIMITED
    found = _TIME_LIMIT.match(text.strip())
    if found is None:
        raise ConfigError("time_limit", text, "HH:MM:SS, D-HH:MM:SS or a number of minutes")
    days, first, second, third = (int(part) if part else None for part in found.group("d", "a", "b", "c"))
    assert first is not None
    if days is not None:
        return days * 1440 + first * 60 + (second or 0) + (third or 0) / 60
    if third is not None:
        return first * 60 + (second or 0) + third / 60
    return first + (second or 0) / 60


def format_time_limit(total_minutes: float) -> str:
    """Format a time limit in minutes as SLURM does: `HH:MM:SS`, or `D-HH:MM:SS` for one day or more."""
    if math.isinf(total_minutes):
        return "UNLIMITED"
    seconds = round(total_minutes * 60)
    days, seconds = divmod(seconds, 86400)
    text = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{days}-{text}" if days else text
