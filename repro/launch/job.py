"""The job, which is the input of a launch of processes that run experiments, and the requests to stop a launch."""

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
"""Name of a file in rank 0's launch folder that requests a checkpoint after the current step, and the ranks' end."""
STOP_TIMEOUT_S = 300.0
"""Time in which ranks must end the current step and write a checkpoint after a stop request, in seconds."""
NETWORK_FILE = "network.json"
"""Name of the file in the launch folder that describes the emulated network between the ranks."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Input of every rank of a launch, which the launcher writes as one JSON file."""

    experiments: list[Experiment]
    """Experiments that the launch runs; number of ranks, system, emulated network and memory limit are equal."""
    rounds: int = 1
    """Number of rounds of a comparison. In each round, every experiment runs a part of its timed steps: A B A B ..."""
    compare: bool = False
    """Whether experiments run in turns for a comparison. If False, the experiments run one after another."""
    apart: bool = False
    """Whether a comparison has one experiment in memory at a time: each turn initialises one and then frees it."""
    checkpoints: str = ""
    """Parent folder of the checkpoints of all experiments; empty if no checkpoints are written."""
    profiles: str = ""
    """Parent folder of the profiles of all experiments; empty if no profiles are written."""
    folder: str = ""
    """Folder with the short-lived files of the launch on this machine, for example a stop request."""
    task: dict[str, Any] = field(default_factory=dict)
    """Parameters of the function that each rank calls, if the function is not `run_rank`."""
    as_rank: int = -1
    """Rank of a larger layout that the only process runs, with collectives that carry no data; -1: all ranks run."""

    def __post_init__(self) -> None:
        assert self.experiments, "a job without experiments"
        assert self.rounds >= 1
        shared = {(e.layout.world, e.system, e.limits.memory_bytes, e.network) for e in self.experiments}
        assert len(shared) == 1

    @property
    def world(self) -> int:
        return 1 if self.as_rank >= 0 else self.experiments[0].layout.world

    @property
    def network(self) -> EmulatedNetwork | None:
        """Return the emulated network between the ranks; None for the machine's own network."""
        return self.experiments[0].network

    @property
    def memory_bytes(self) -> int:
        """Return the limit on each rank's data memory in bytes; 0 means no limit."""
        return self.experiments[0].limits.memory_bytes

    def save(self, path: Path) -> None:
        experiments = [experiment.as_dict() for experiment in self.experiments]
        write_json(path, {**vars(self), "experiments": experiments})

    @staticmethod
    def load(path: Path) -> Job:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Job(**{**document, "experiments": [from_dict(data) for data in document["experiments"]]})


class Stopped(Exception):
    """Exception that ends a rank between two training steps at the launcher's request; it names the last step."""


class Interrupt:
    """Context in which SIGINT, SIGTERM and SIGHUP only set `signal`; a signal that was ignored remains ignored."""

    def __init__(self) -> None:
        self.signal = 0
        self.again = False
        """Whether a second signal (such as a second Ctrl-C) requests the end of the run without a checkpoint."""
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal != 0

    @property
    def reason(self) -> str:
        """Return the cause of a run's interruption, for the run's records; empty if no signal has arrived."""
        return "stopped by the user" if self else ""

    @property
    def stop_s(self) -> float:
        """Return the seconds in which ranks must end their step and write a checkpoint; 0 after a second signal."""
        return 0.0 if self.again else STOP_TIMEOUT_S

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            previous = signal.getsignal(number)
            if previous != signal.SIG_IGN:  # A process under `nohup` ignores SIGHUP.
                self._previous[number] = previous
                signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.again = self.signal != 0
        self.signal = self.signal or number
