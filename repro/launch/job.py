"""A job: one launch of `world` processes that runs experiments of equal world, and the requests to stop it."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from repro.config import EmulatedNetwork, Experiment, from_dict
from repro.util.files import write_json

STOP_FILE = "stop"
"""File in the folder of rank 0 that requests a checkpoint after the current step, and the end."""

STOP_TIMEOUT_S = 300.0
"""Timeout of stopping ranks for their step and checkpoint, in seconds."""
NETWORK_FILE = "network.json"
"""File in the launch folder with the `repro.emulate.network.NetworkFacts` of the emulated network, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Input of every rank, which the launcher writes as one JSON file."""

    experiments: list[Experiment]
    """Experiments of equal world, system, network and memory limit."""
    rounds: int = 1
    """Compared experiments divide their timed steps into this many rounds and take turns: A B A B ..."""
    compare: bool = False
    """Whether the experiments are compared; otherwise they only share the start of the processes."""
    apart: bool = False
    """Whether each turn of a comparison builds and frees its experiment."""
    checkpoints: str = ""
    """Folder of the checkpoints of all experiments of the store; empty without a store."""
    profiles: str = ""
    """Folder of the profiles of all experiments; empty without profiles."""
    folder: str = ""
    """Folder of the launch on this machine. A file `stop` in it requests a checkpoint and the end."""
    task: dict[str, Any] = field(default_factory=dict)
    """Parameters of a target other than `run_rank`."""
    as_rank: int = -1
    """Rank of the layout that a single process represents, with collectives without data; -1 for all ranks."""

    def __post_init__(self) -> None:
        assert self.experiments, "a job without experiments"
        assert self.rounds >= 1
        shared = {(e.layout.world, e.system, e.limits.memory_bytes, e.network) for e in self.experiments}
        assert len(shared) == 1

    @property
    def world(self) -> int:
        """Return the number of processes."""
        return 1 if self.as_rank >= 0 else self.experiments[0].layout.world

    @property
    def network(self) -> EmulatedNetwork | None:
        """Return the emulated network between the ranks; None for the machine's own network."""
        return self.experiments[0].network

    @property
    def memory_bytes(self) -> int:
        """Return the limit on each rank's data memory in bytes; 0 means none."""
        return self.experiments[0].limits.memory_bytes

    def save(self, path: Path) -> None:
        """Write the job as JSON for `load`."""
        experiments = [experiment.as_dict() for experiment in self.experiments]
        write_json(path, {**vars(self), "experiments": experiments})

    @staticmethod
    def load(path: Path) -> Job:
        """Read a job that `save` wrote."""
        document = json.loads(path.read_text(encoding="utf-8"))
        return Job(**{**document, "experiments": [from_dict(data) for data in document["experiments"]]})


class Stopped(Exception):
    """Raised by a rank that ended between two steps at the request of its launcher; `str` names the last step."""


class Interrupt:
    """While entered, SIGINT, SIGTERM and SIGHUP only set `signal`; a signal that is ignored stays so."""

    def __init__(self) -> None:
        self.signal = 0
        self.again = False
        """Whether a second signal requested an immediate end."""
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal != 0

    @property
    def reason(self) -> str:
        """Return the reason of the stop; empty before a signal."""
        return "stopped by the user" if self else ""

    @property
    def stop_s(self) -> float:
        """Return the timeout of stopping ranks for their step and checkpoint, in seconds."""
        return 0.0 if self.again else STOP_TIMEOUT_S

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            previous = signal.getsignal(number)
            if previous != signal.SIG_IGN:  # nohup
                self._previous[number] = previous
                signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.again = self.signal != 0
        self.signal = self.signal or number
