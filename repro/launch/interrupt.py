"""Ctrl-C as a flag: it is acted on where nothing is half done."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Stopped(Exception):
    """A rank ended between two steps because its launcher asked for it; `str` says after which."""


class Interrupt:
    """While entered, SIGINT, SIGTERM and SIGHUP only set `signal`; a signal that is ignored stays so."""

    STOP_S = 300.0

    def __init__(self) -> None:
        self.signal = 0
        self.again = False
        """Whether a second signal came: somebody does not want to wait."""
        self._previous: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal != 0

    @property
    def reason(self) -> str:
        """Who stopped it; empty until somebody does."""
        return "stopped by the user" if self else ""

    @property
    def stop_s(self) -> float:
        """How long ranks that were asked to stop may take for their step and for the checkpoint."""
        return 0.0 if self.again else self.STOP_S

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            previous = signal.getsignal(number)
            if previous != signal.SIG_IGN:  # nohup
                self._previous[number] = previous
                signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.again = self.signal != 0
        self.signal = self.signal or number
