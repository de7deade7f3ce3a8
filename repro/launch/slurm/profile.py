"""Profile of a SLURM site: a TOML file with the resources that jobs request, their environment and their storage.

The folder `slurm/` has profiles. For a missing key, such as the partition or the account, the site's default applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from repro.config.errors import ConfigError, require
from repro.config.files import build_dataclass, read_toml
from repro.config.suites import PROFILES
from repro.launch.slurm.scheduler import parse_time_limit

REQUESTS = ("gpus-per-node", "gres", "none")


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Requests to `sbatch`."""

    partition: str = ""
    """SLURM partition of the jobs; empty: the cluster's default."""
    account: str = ""
    """SLURM account that is charged; empty: the user's default."""
    qos: str = ""
    """SLURM quality of service of the jobs; empty: the site's default."""
    constraint: str = ""
    """Required features of nodes, in the syntax of `sbatch --constraint`."""
    exclude: list[str] = field(default_factory=list)
    """Names of nodes that jobs must not use."""
    gpus_per_node: int = 0
    """Number of GPUs of a node, each used by one rank; 0: ranks run on processor cores."""
    gpu_type: str = ""
    """Type of GPU to request, by its name at the site, for example `v100`; empty: any type."""
    gpu_request: str = "gpus-per-node"
    """Option that requests GPUs, `gpus-per-node` or `gres`; `none` for a site that always allocates full nodes."""
    tasks_per_node: int = 0
    """Number of ranks on a node without GPUs; 0: one rank."""
    cpus_per_task: int = 0
    """Number of processor cores of each rank; 0: the site's default."""
    memory: str = ""
    """Host memory of a job on each node, for example `64GB`; `0`: all memory of the node; empty: the site's default."""
    exclusive: bool = True
    """Whether a job has exclusive use of its nodes. Other jobs on a node would disturb the measurement."""
    time_limit: str = "01:00:00"
    """Time limit of each SLURM job: `HH:MM:SS`, `D-HH:MM:SS` or minutes."""
    array_parallelism: int = 4
    """Maximum number of elements of a job array that run at once."""
    cases_per_job: int = 1
    """Number of experiments or comparisons with equal resources that one job runs in sequence within its time limit."""
    requeues: int = 10
    """Maximum number of requeues after a job has reached its time limit. Then the job counts as failed."""
    signal_delay_s: int = 90
    """Time before the time limit at which SLURM signals a job to stop its experiment, in seconds."""
    options: dict[str, str] = field(default_factory=dict)
    """Further options of `sbatch` by name, for example `{ reservation = "bench" }`."""

    def __post_init__(self) -> None:
        right = f"one of {', '.join(REQUESTS)}"
        require(self.gpu_request in REQUESTS, "gpu_request", self.gpu_request, right)
        for key, value in self._texts():
            require(value.isprintable(), key, value, "text of one line, because it becomes one sbatch option")
        parse_time_limit(self.time_limit)
        for key in ("gpus_per_node", "tasks_per_node", "cpus_per_task", "requeues"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "0 or more")
        for key in ("array_parallelism", "cases_per_job", "signal_delay_s"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "1 or more")
        self.leave_time("time_limit", self.time_limit)

    def leave_time(self, key: str, time_limit: str) -> None:
        """Raise `ConfigError` for the key `key` unless `time_limit` is longer than `signal_delay_s`."""
        expected = (
            f"longer than signal_delay_s = {self.signal_delay_s} s, "
            "the time from the stop signal of a job to its time limit"
        )
        full_min = min(parse_time_limit(time_limit), 1e9) // 1  # sbatch gets the time limit in full minutes
        require(60 * full_min > self.signal_delay_s, key, time_limit, expected)

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yield (key, text) of every setting of the profile whose text becomes an option of `sbatch`."""
        for key in ("partition", "account", "qos", "constraint", "gpu_type", "memory"):
            yield key, getattr(self, key)
        yield from (("exclude", node) for node in self.exclude)
        for name, value in self.options.items():
            yield f"options.{name}", value
            spelled = re.fullmatch(r"[\w-]+", name)
            require(spelled is not None, "options", name, "names of options of sbatch, without --")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Environment that a SLURM job sets up before its ranks start."""

    modules: list[str] = field(default_factory=list)
    """Names of environment modules that a job loads with `module load`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that a job runs first, for example `source /shared/venv/bin/activate`."""
    python: str = ""
    """Path of the Python interpreter on the nodes; empty: the interpreter of `repro submit`."""
    container: str = ""
    """Container image of the ranks, for `srun --container-image` (pyxis); empty: none.  The controller of a job runs
    outside the container, with the Python interpreter of `repro submit`."""
    container_mounts: str = ""
    """Mounts of the ranks' container, for `srun --container-mounts`."""
    interface: str = ""
    """Network interface for gloo and NCCL's sockets, for example `ib0`; empty: gloo and NCCL choose an interface."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of every rank, for example `{ NCCL_IB_HCA = "mlx5" }`."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Folder of results on the cluster, and the permissions of its files."""

    shared: str = ""
    """Path of a shared folder, equal on all nodes, that contains `--results`.  Empty: any folder counts as shared."""
    private: bool = True
    """Whether only the user can read the files that SLURM jobs write."""


@dataclass(frozen=True, kw_only=True)
class CaseClass:
    """Settings for some experiments: a `[[case]]` table of a SLURM profile. The first table that matches counts."""

    match: str
    """Glob of the names of the experiments to which this `[[case]]` table of the profile applies."""
    nodes: int = 0
    """Minimum number of nodes over which the ranks are spread; 0: as few nodes as possible."""
    time_limit: str = ""
    """Time limit of the jobs of experiments that `match` selects; empty: `slurm.time_limit`."""
    partition: str = ""
    """SLURM partition of the jobs of experiments that `match` selects; empty: `slurm.partition`."""
    requeues: int | None = None
    """Maximum requeues of jobs of matching experiments; unset: `slurm.requeues`. Training resumes at a checkpoint."""

    def __post_init__(self) -> None:
        require(bool(self.match), "match", self.match, "a glob of experiment names")
        require(self.nodes >= 0, "nodes", self.nodes, "0 or more")
        require(self.requeues is None or self.requeues >= 0, "requeues", self.requeues, "0 or more")
        if self.time_limit:
            parse_time_limit(self.time_limit)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Profile of one SLURM site: its requests to `sbatch`, its environment and its storage."""

    system: str = "local"
    """System of the nodes, a name that `repro systems` lists; `local`: processor cores with gloo."""
    description: str = ""
    """Description of the site in one line."""
    slurm: Slurm = field(default_factory=Slurm)
    environment: Environment = field(default_factory=Environment)
    storage: Storage = field(default_factory=Storage)
    price_per_gpu_hour: float = 0.0
    """Price of one GPU-hour, in any currency; 0 if unknown."""
    case: tuple[CaseClass, ...] = ()
    file: str = ""
    """Path of the file from which the site profile was read."""

    def __post_init__(self) -> None:
        price = self.price_per_gpu_hour
        require(price >= 0, "price_per_gpu_hour", price, "0 (unknown) or more")
        for entry in self.case:
            if entry.time_limit:
                self.slurm.leave_time(f"case {entry.match}.time_limit", entry.time_limit)

    @property
    def ranks_per_node(self) -> int:
        """Return the maximum number of ranks on a node of the site."""
        return self.slurm.gpus_per_node or self.slurm.tasks_per_node or 1

    @property
    def umask(self) -> int:
        """Return the umask of the processes of a SLURM job."""
        return 0o077 if self.storage.private else 0o022

    def gpu_request(self, count: int) -> dict[str, str]:
        """Return the option of sbatch and srun that requests `count` GPUs per node; empty if no request is needed."""
        slurm = self.slurm
        if not slurm.gpus_per_node or slurm.gpu_request == "none":
            return {}
        kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        by_gres = slurm.gpu_request == "gres"
        return {slurm.gpu_request.replace("-", "_"): f"{'gpu:' * by_gres}{kind}{count}"}

    def class_of(self, name: str) -> CaseClass:
        """Return the first `[[case]]` table (job limits) that matches the experiment `name`, or an empty table."""
        found = (entry for entry in self.case if fnmatchcase(name, entry.match))
        return next(found, CaseClass(match="*"))


def load_profile(path: Path) -> Profile:
    """Return the site profile in the TOML file `path`, or the packaged profile named `path`.  Raises `ConfigError`."""
    path = PROFILES.find(path)
    return parse_profile(read_toml(path), file=str(path))


def parse_profile(data: dict[str, Any], *, file: str) -> Profile:
    """Return the site profile in the parsed TOML document `data` of `file`.  Raises `ConfigError`."""
    if "file" in data:
        raise ConfigError("file", data["file"], says="unknown key", file=file)
    profile = build_dataclass(Profile, {**data, "file": file}, file=file)
    _check_system(profile)
    return profile


def _check_system(profile: Profile) -> None:
    """Raise `ConfigError` unless the profile's system exists and its nodes have `slurm.gpus_per_node` GPUs."""
    from repro.config.systems import LOCAL_SYSTEMS, load_system_file

    gpus = profile.slurm.gpus_per_node
    if profile.system in LOCAL_SYSTEMS:
        return
    try:
        devices = load_system_file(profile.system).devices_per_node.value
    except ConfigError as error:
        raise error.within(file=profile.file) from None
    if gpus < 1 or (devices is not None and gpus > devices):
        most = f"at most {devices:.0f}, the number of GPUs in a node of {profile.system}"
        expected = f"the number of GPUs in a node of {profile.system}, 1 or more" if gpus < 1 else most
        raise ConfigError("gpus_per_node", gpus, expected, file=profile.file, where="slurm")
