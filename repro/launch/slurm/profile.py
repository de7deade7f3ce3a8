"""Profile of a site: the requests to its SLURM for the needs of a suite, as a TOML file.  `slurm/` has ready profiles.

Only the given keys become requests: an empty partition, account or constraint leaves the choice to the site.
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
    """Partition; empty: the site's default."""
    account: str = ""
    """Account that pays."""
    qos: str = ""
    """Quality of service."""
    constraint: str = ""
    """Features that nodes must have, as `sbatch --constraint` writes them."""
    exclude: list[str] = field(default_factory=list)
    """Excluded nodes."""
    gpus_per_node: int = 0
    """GPUs of a node, one rank each; 0: processor cores only."""
    gpu_type: str = ""
    """Name of the GPU type at the site, `v100`; empty: any."""
    gpu_request: str = "gpus-per-node"
    """Option for GPUs at the site, `gpus-per-node` or `gres`; `none`: it allocates full nodes."""
    tasks_per_node: int = 0
    """Ranks of a node without GPUs; 0: as many as there are GPUs, or 1."""
    cpus_per_task: int = 0
    """Cores of a rank; 0: the site's default."""
    memory: str = ""
    """Host memory of a node (`0`: all, `64GB`); empty: the site's default."""
    exclusive: bool = True
    """Whether jobs get full nodes: other jobs on a node would be measured too."""
    time_limit: str = "01:00:00"
    """Time limit of one job: `HH:MM:SS`, `D-HH:MM:SS` or minutes."""
    array_parallelism: int = 4
    """Elements of one job array that may run at once."""
    cases_per_job: int = 1
    """Cases of one shape that run one after another in one allocation; its time limit is for all of them."""
    requeues: int = 10
    """Number of requeues of a job that reaches its time limit before the job counts as failed."""
    signal_delay_s: int = 90
    """Time between SLURM's warning signal and the time limit, in seconds, for the running case to stop."""
    options: dict[str, str] = field(default_factory=dict)
    """Further options of `sbatch`: `{ reservation = "bench" }`."""

    def __post_init__(self) -> None:
        right = f"one of {', '.join(REQUESTS)}"
        require(self.gpu_request in REQUESTS, "gpu_request", self.gpu_request, right)
        for key, value in self._texts():
            require(value.isprintable(), key, value, "text of one line, as it becomes a line of the script")
        parse_time_limit(self.time_limit)
        for key in ("gpus_per_node", "tasks_per_node", "cpus_per_task", "requeues"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "0 or more")
        for key in ("array_parallelism", "cases_per_job", "signal_delay_s"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "1 or more")
        self.leave_time("time_limit", self.time_limit)

    def leave_time(self, key: str, time_limit: str) -> None:
        """Raise `ConfigError` if a job of `time_limit`, named `key`, would get its stop signal at its start."""
        delay = f"signal_delay_s = {self.signal_delay_s} s"
        expected = f"longer than {delay}, the time from the stop signal to the end"
        full_min = min(parse_time_limit(time_limit), 1e9) // 1  # as in the request to sbatch
        require(60 * full_min > self.signal_delay_s, key, time_limit, expected)

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Yield the texts that become options of `sbatch`, with their keys."""
        for key in ("partition", "account", "qos", "constraint", "gpu_type", "memory"):
            yield key, getattr(self, key)
        yield from (("exclude", node) for node in self.exclude)
        for name, value in self.options.items():
            yield f"options.{name}", value
            spelled = re.fullmatch(r"[\w-]+", name)
            require(spelled is not None, "options", name, "names of options of sbatch, without --")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Environment that a job sets up before its ranks start."""

    modules: list[str] = field(default_factory=list)
    """Modules for `module load`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines, for example `source /shared/venv/bin/activate`."""
    python: str = ""
    """Interpreter on the nodes; empty: that of the submitting process."""
    container: str = ""
    """Image for `srun --container-image` (pyxis); empty: none.  The ranks run inside; the job's controller runs
    outside, with the interpreter of the submitting process."""
    container_mounts: str = ""
    """Value of `srun --container-mounts`."""
    interface: str = ""
    """Network interface of collectives (`ib0`), for NCCL's sockets and for gloo; empty: their own choice."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of every rank: `{ NCCL_IB_HCA = "mlx5" }`."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Storage of results."""

    shared: str = ""
    """Folder that every node has under this path; results must be below it.  Empty: the working folder is shared."""
    private: bool = True
    """Whether only the user can read the written files."""


@dataclass(frozen=True, kw_only=True)
class CaseClass:
    """Settings for some cases: `[[case]]` tables, of which the first match counts."""

    match: str
    """Glob of experiment names."""
    nodes: int = 0
    """Nodes over which the ranks are spread; 0: the fewest that fit."""
    time_limit: str = ""
    """Replacement of `slurm.time_limit`; empty: none."""
    partition: str = ""
    """Replacement of `slurm.partition`; empty: none."""
    requeues: int | None = None
    """Replacement of `slurm.requeues`; None: none.  A training of weeks resumes from its checkpoint each time."""

    def __post_init__(self) -> None:
        require(bool(self.match), "match", self.match, "a glob of names of experiments")
        require(self.nodes >= 0, "nodes", self.nodes, "0 or more")
        require(self.requeues is None or self.requeues >= 0, "requeues", self.requeues, "0 or more")
        if self.time_limit:
            parse_time_limit(self.time_limit)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Profile of one site."""

    system: str = "local"
    """System of the nodes, a name of `repro systems`; `local`: processor cores, gloo."""
    description: str = ""
    """One line for people."""
    slurm: Slurm = field(default_factory=Slurm)
    environment: Environment = field(default_factory=Environment)
    storage: Storage = field(default_factory=Storage)
    price_per_gpu_hour: float = 0.0
    """Price of a GPU for an hour, in any currency; 0 if unknown."""
    case: tuple[CaseClass, ...] = ()
    file: str = ""
    """File of the profile."""

    def __post_init__(self) -> None:
        price = self.price_per_gpu_hour
        require(price >= 0, "price_per_gpu_hour", price, "0 (not known) or more")
        for entry in self.case:
            if entry.time_limit:
                self.slurm.leave_time(f"case {entry.match}.time_limit", entry.time_limit)

    @property
    def ranks_per_node(self) -> int:
        """Return the maximum number of ranks of a node."""
        return self.slurm.gpus_per_node or self.slurm.tasks_per_node or 1

    @property
    def umask(self) -> int:
        """Return the file mode mask of a job's processes."""
        return 0o077 if self.storage.private else 0o022

    def gpu_request(self, count: int) -> dict[str, str]:
        """Return the option of sbatch and srun for `count` GPUs of a node; empty if the site has no such option."""
        slurm = self.slurm
        if not slurm.gpus_per_node or slurm.gpu_request == "none":
            return {}
        kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        by_gres = slurm.gpu_request == "gres"
        return {slurm.gpu_request.replace("-", "_"): f"{'gpu:' * by_gres}{kind}{count}"}

    def class_of(self, name: str) -> CaseClass:
        """Return the settings for the experiment called `name`."""
        found = (entry for entry in self.case if fnmatchcase(name, entry.match))
        return next(found, CaseClass(match="*"))


def load_profile(path: Path) -> Profile:
    """Return the profile in a `.toml` file, or the packaged profile of this name.  Raises `ConfigError`."""
    path = PROFILES.find(path)
    return parse_profile(read_toml(path), file=str(path))


def parse_profile(data: dict[str, Any], *, file: str) -> Profile:
    """Return the profile in the tables of a file.  Raises `ConfigError`."""
    if "file" in data:
        raise ConfigError("file", data["file"], says="unknown key", file=file)
    profile = build_dataclass(Profile, {**data, "file": file}, file=file)
    _check_system(profile)
    return profile


def _check_system(profile: Profile) -> None:
    """Raise `ConfigError` unless the system exists and its nodes have the GPUs of the profile."""
    from repro.config.systems import LOCAL_SYSTEMS, load_system_file

    gpus = profile.slurm.gpus_per_node
    if profile.system in LOCAL_SYSTEMS:
        return
    try:
        devices = load_system_file(profile.system).devices_per_node.value
    except ConfigError as error:
        raise error.within(file=profile.file) from None
    if gpus < 1 or (devices is not None and gpus > devices):
        most = f"at most {devices:.0f}, what a node of {profile.system} has"
        expected = f"the GPUs of a node of {profile.system}, 1 or more" if gpus < 1 else most
        raise ConfigError("gpus_per_node", gpus, expected, file=profile.file, where="slurm")
