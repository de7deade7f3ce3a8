"""A time that passes only where a test says so, in the place of the module `time`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import pytest

T = TypeVar("T", bound="Clock")


def _nothing() -> None: ...


class Clock:
    """All its clocks show `now`, in seconds, which goes on in sleep or when it is set."""

    def __init__(self, now: float = 100.0, *, asleep: Callable[[], None] = _nothing) -> None:
        self.now = now
        self.asleep = asleep
        """What happens meanwhile, at the end of every sleep."""
        self.slept: list[float] = []
        """Seconds of each sleep."""

    def rules(self: T, patch: pytest.MonkeyPatch, *modules: ModuleType) -> T:
        """Itself, from now on the `time` of these modules."""
        for module in modules:
            patch.setattr(module, "time", self)
        return self

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        """Nothing is said of the processor."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        self.asleep()
