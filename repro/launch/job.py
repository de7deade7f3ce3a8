"""A job: one launch of `world` processes that runs one or more experiments of that world."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro.config import EmulatedNetwork, Experiment, from_dict
from repro.util.files import write_json

STOP = "stop"
"""A file of this name in the folder of rank 0 asks the ranks to write a checkpoint after their step, and to end."""

NETWORK = "network.json"
"""In the launch's folder: `repro.emulate.network.Facts` of the network that the ranks are on, if they are on one."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the launcher hands to every rank, as one JSON file."""

    experiments: list[Experiment]
    """All of equal world, system, network and memory limit (the launcher checks that before it starts anything)."""
    rounds: int = 1
    """Compared experiments divide their timed steps into this many rounds and take turns: A B A B ..."""
    compare: bool = False
    """Whether the experiments are compared; otherwise they only share the start of the processes."""
    apart: bool = False
    """Whether each turn of a comparison builds its experiment anew and frees it."""
    checkpoints: str = ""
    """Folder of the checkpoints of all experiments of the store; empty where nothing is stored."""
    folder: str = ""
    """The launch's own on this machine, as a rank is told; a file `stop` in it asks for a checkpoint and an end."""
    task: dict[str, Any] = field(default_factory=dict)
    """What a target needs that does something else with an experiment than run it."""
    as_rank: int = -1
    """With 0 or more: one process is this rank of the layout, and its messages carry nothing."""

    def __post_init__(self) -> None:
        assert self.experiments, "a job without experiments"
        assert self.rounds >= 1
        assert (
            len({(e.layout.world, e.system, e.limits.memory_bytes, e.network) for e in self.experiments}) == 1
        )

    @property
    def world(self) -> int:
        """Number of processes."""
        return 1 if self.as_rank >= 0 else self.experiments[0].layout.world

    @property
    def network(self) -> EmulatedNetwork | None:
        """What joins the ranks; None: the machine's own."""
        return self.experiments[0].network

    @property
    def memory_bytes(self) -> int:
        """Limit on each rank's data memory in bytes; 0 means none."""
        return self.experiments[0].limits.memory_bytes

    def save(self, path: Path) -> None:
        """Write the job as JSON; `load` is the way back."""
        document = {
            "rounds": self.rounds,
            "compare": self.compare,
            "apart": self.apart,
            "as_rank": self.as_rank,
            "checkpoints": self.checkpoints,
            "task": self.task,
            "experiments": [experiment.as_dict() for experiment in self.experiments],
        }
        write_json(path, document)

    @staticmethod
    def load(path: Path) -> Job:
        """The job that `save` wrote."""
        document = json.loads(path.read_text(encoding="utf-8"))
        return Job(
            experiments=[from_dict(data) for data in document["experiments"]],
            rounds=document["rounds"],
            compare=document["compare"],
            apart=document["apart"],
            as_rank=document["as_rank"],
            checkpoints=document["checkpoints"],
            task=document["task"],
        )
