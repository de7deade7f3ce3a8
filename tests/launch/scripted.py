"""A launch whose ranks have scripted exit codes and reports."""

from __future__ import annotations

from typing import Any

from repro.config import Experiment, Layout, Limits, Model, Training
from repro.launch.job import Job
from repro.launch.rank_process import Position

MODEL = Model(name="tiny", layers=2, hidden=16, heads=4, vocab=64, seq=16)
Reports = dict[int, tuple[str, str]]
"""Outcome and reason that ranks reported, by rank."""


def experiment(name: str, checkpoint_every: int = 0, **limits: Any) -> Experiment:
    return Experiment(
        name=name,
        model=MODEL,
        layout=Layout(dp=2),
        training=Training(steps=6, untimed_steps=1, checkpoint_every=checkpoint_every),
        limits=Limits(**{"hang_s": 60.0, **limits}),
    )


class Scripted:
    """A launch of one experiment without processes, whose exit codes and reports a test chooses."""

    def __init__(
        self, codes: list[int | None], reports: Reports | None = None, text: str = "", **settings: Any
    ):
        """Store exit codes by rank, reports, the standard error of every rank, and settings of the experiment."""
        self.codes, self.reports, self.text, self.killed = codes, reports or {}, text, False
        self.world = len(codes)
        self.job = Job(experiments=[experiment("a", **settings)])

    def poll(self, rank: int) -> int | None:
        return self.codes[rank]

    def position(self, rank: int) -> Position:
        return Position(0, 5, "forward", 40 + rank, "all_gather", "tp", 1.0)

    def stopped(self, rank: int) -> bool:
        return False

    def report(self, rank: int) -> dict[str, Any] | None:
        if rank not in self.reports:
            return None
        outcome, reason = self.reports[rank]
        return {"rank": rank, "outcome": outcome, "reason": reason}

    def error_text(self, rank: int) -> str:
        return self.text

    def dump_stacks(self) -> None: ...
    def ask_to_stop(self) -> None:
        """End the ranks that still run, each with the report of a stop."""
        for rank in (rank for rank, code in enumerate(self.codes) if code is None):
            self.codes[rank], self.reports[rank] = 5, ("interrupted", "stopped on request")

    def kill(self) -> None:
        self.killed = True
