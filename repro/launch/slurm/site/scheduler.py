"""What SLURM says: jobs, partitions and nodes, asked in a few calls however many jobs there are.

`squeue` knows what waits and runs, `sacct` what has ended.  Where a site has no accounting, `scontrol`
still knows jobs for a few minutes after their end (MinJobAge); later their end is unknown, which is said.
"""

from __future__ import annotations

import getpass
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from repro.config.errors import ConfigError
from repro.launch.slurm.site.limits import minutes

TIMEOUT_S = 30.0
WAITING = frozenset(
    (
        *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"),
        *("SPECIAL_EXIT", "RESV_DEL_HOLD"),
    )
)
"""States of a job that waits for nodes."""
LIVE = WAITING | {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
"""States of a job that may still run."""
UNKNOWN = "UNKNOWN"
_CALLS = 200
"""Job ids in one call: a command line has an end."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """One job, or one element of an array."""

    state: str
    """SLURM's word: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, PREEMPTED, ..."""
    reason: str = ""
    """Why it waits (`Resources`), or what ended it, as far as SLURM says."""
    nodes: str = ""
    """`n[1-2]`; empty before it runs."""
    exit_code: str = ""
    """`code:signal`."""
    restarts: int = 0
    """How often it was requeued."""

    @property
    def live(self) -> bool:
        """Whether it may still do something."""
        return self.state in LIVE

    @property
    def waiting(self) -> bool:
        """Whether it waits for nodes."""
        return self.state in WAITING


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One line of `sinfo`."""

    name: str
    default: bool
    available: bool
    limit_min: float
    """Longest job in minutes."""
    nodes: int
    gpus: int
    """Most GPUs of one of its nodes."""
    gpu_types: tuple[str, ...]
    cores: int
    """Fewest cores of one of its nodes."""


class SchedulerError(RuntimeError):
    """SLURM did not answer; `str` says what was asked and what it said, in one line."""


def call(command: list[str], timeout_s: float = TIMEOUT_S) -> str:
    """Standard output of a command.  Raises `SchedulerError` if it is missing, fails or does not end."""
    if shutil.which(command[0]) is None:
        raise SchedulerError(f"{command[0]}: not found: is this a login node of the cluster?")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{command[0]}: no answer in {timeout_s:g} s: is slurmctld up?") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-300:]
        raise SchedulerError(f"{command[0]}: {said or f'exit code {done.returncode}'}")
    return done.stdout


class Scheduler:
    """Asks SLURM; `warnings` collects what a site cannot tell."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def jobs(self, ids: Iterable[str]) -> dict[str, JobState]:
        """States of jobs by id, `12` or `12_3` for an array's element; absent: nobody knows it any more.

        Raises `SchedulerError` if not even the queue can be read.
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
        """What waits or runs of this user."""
        command = ["squeue", "-h", "-r", "-t", "all", "-u", getpass.getuser(), "-o", "%i|%T|%r|%N"]
        rows = (line.split("|") for line in call(command).splitlines())
        return {
            row[0]: JobState(state=row[1], reason=_said(row[2]), nodes=row[3])
            for row in rows
            if len(row) == 4
        }

    def _ended(self, ids: set[str]) -> dict[str, JobState]:
        try:
            return _accounted(ids)
        except SchedulerError as error:
            self.warnings.append(
                f"no accounting on this cluster ({error}): how a job ended is known for a few minutes only,"
                " and by what it wrote itself"
            )
        return _remembered(ids)

    def partitions(self) -> dict[str, Partition]:
        """All partitions by name.  Raises `SchedulerError`."""
        found: dict[str, Partition] = {}
        for line in call(["sinfo", "-h", "-o", "%P|%a|%l|%D|%G|%c"]).splitlines():
            name, up, limit, nodes, gres, cores = line.split("|")
            clean = name.rstrip("*")
            gpus = _gpus(gres)
            old = found.get(clean)
            found[clean] = Partition(
                name=clean,
                default=name.endswith("*"),
                available=up == "up",
                limit_min=minutes(limit),
                nodes=int(nodes) + (old.nodes if old else 0),
                gpus=max(sum(gpus.values()), old.gpus if old else 0),
                gpu_types=tuple(sorted({*gpus, *(old.gpu_types if old else ())} - {""})),
                cores=min(int(cores.rstrip("+")), old.cores if old else 1 << 30),
            )
        return found

    def cancel(self, ids: list[str]) -> None:
        """End jobs.  Raises `SchedulerError`."""
        for start in range(0, len(ids), _CALLS):
            call(["scancel", *ids[start : start + _CALLS]])


def _accounted(ids: set[str]) -> dict[str, JobState]:
    """From the accounting database: the last run of each job."""
    found: dict[str, JobState] = {}
    arrays = sorted({key.split("_")[0] for key in ids})
    for start in range(0, len(arrays), _CALLS):
        command = ["sacct", "-n", "-X", "-P", "-o", "JobID,State,Reason,NodeList,ExitCode"]
        for line in call([*command, "-j", ",".join(arrays[start : start + _CALLS])]).splitlines():
            row = line.split("|")
            if len(row) != 5:
                continue
            # "CANCELLED by 1000"
            state = row[1].split()[0] if row[1] else UNKNOWN
            job = JobState(state=state, reason=_said(row[2]), nodes=_nodes(row[3]), exit_code=row[4])
            found |= dict.fromkeys(expand(row[0]), job)
    return found


def _remembered(ids: set[str]) -> dict[str, JobState]:
    """From the controller's memory, as long as that reaches."""
    found: dict[str, JobState] = {}
    for line in call(["scontrol", "show", "job", "-o"]).splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobId" not in fields:
            continue
        element = fields.get("ArrayTaskId")
        key = f"{fields['ArrayJobId']}_{element}" if element else fields["JobId"]
        job = JobState(
            state=fields.get("JobState", UNKNOWN),
            reason=_said(fields.get("Reason", "")),
            nodes=_nodes(fields.get("NodeList", "")),
            exit_code=fields.get("ExitCode", ""),
            restarts=int(fields.get("Restarts", "0")),
        )
        found |= {key: job for key in expand(key) if key in ids}
    return found


def expand(job_id: str) -> list[str]:
    """The elements that SLURM writes as one: `12_[0-2,5%4]` is `12_0 12_1 12_2 12_5`."""
    found = re.fullmatch(r"(\d+)_\[?([\d,\-]+)(?:%\d+)?\]?", job_id)
    if found is None:
        return [job_id]
    keys = []
    for part in found.group(2).split(","):
        first, _, last = part.partition("-")
        keys += [f"{found.group(1)}_{index}" for index in range(int(first), int(last or first) + 1)]
    return keys


def check_partition(partitions: dict[str, Partition], name: str, *, file: str, where: str) -> Partition:
    """The partition called `name`, or the default one for an empty name.  Raises `ConfigError`."""
    known = ", ".join(sorted(partitions))
    if name:
        if name not in partitions:
            raise ConfigError(
                "partition", name, says=f"no such partition here; known are {known}", file=file, where=where
            )
        return partitions[name]
    for partition in partitions.values():
        if partition.default:
            return partition
    expected = f"is empty, and the cluster has no default; known are {known}"
    raise ConfigError("partition", says=expected, file=file, where=where)


def _gpus(gres: str) -> dict[str, int]:
    """GPUs of a node by type, from `gpu:v100:8(S:0-1),nic:2`; `gpu:8` has the type ''."""
    found: dict[str, int] = {}
    for kind, count in re.findall(r"\bgpu:(?:([\w\-.]+):)?(\d+)", gres):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def _said(text: str) -> str:
    return "" if text in ("None", "(null)", "Unknown") else text


def _nodes(text: str) -> str:
    return "" if text in ("None assigned", "(null)") else text
