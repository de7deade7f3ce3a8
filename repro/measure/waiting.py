"""When a stage of a pipeline waits, seen from outside of any engine: around every wait of the process for a message.

Schedules written in Python (Megatron-core's, `torch.distributed.pipelining`, ours) wait for what they sent, receive or
reduce by `torch.distributed.Work.wait`.  Where stages are the only parallelism, whatever a rank waits for comes from
another stage, so that this is the idle time of 2104.04473 sec. 2.2, and an engine is not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from repro.config.enums import Phase


class StageWaits:
    """Use as a context manager around a step, and give it to the step as its observer.

    It hands phases on to `mark`: those that the engine reports, but `idle`, which it marks around each wait itself.
    """

    def __init__(self, mark: Callable[[Phase], None]):
        self._mark, self._phase = mark, Phase.FORWARD

    def __call__(self, phase: Phase) -> None:
        """The engine says that a phase begins."""
        if phase != Phase.IDLE:
            self._phase = phase
            self._mark(phase)

    def __enter__(self) -> StageWaits:
        self._wait = dist.Work.wait

        def wait(work: dist.Work, *arguments: Any, **named: Any) -> bool:
            self._mark(Phase.IDLE)
            try:
                return self._wait(work, *arguments, **named)
            finally:
                self._mark(self._phase)

        dist.Work.wait = wait  # type: ignore[method-assign, assignment]
        self(Phase.FORWARD)  # what comes before the first pass or wait is work too
        return self

    def __exit__(self, *_: object) -> None:
        dist.Work.wait = self._wait  # type: ignore[method-assign]
