"""A replacement of the module `time` whose time passes only in `sleep` or when a test sets it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import pytest

T = TypeVar("T", bound="Clock")


class Clock:
    """Clocks that all show `now`, in seconds. `sleep` adds to `now`."""

    def __init__(self, now: float = 100.0, *, asleep: Callable[[], object] = lambda: None) -> None:
        self.now = now
        self.asleep = asleep
        """Function to call at the end of every sleep."""
        self.slept: list[float] = []
        """Duration of each sleep, in seconds."""

    def rules(self: T, patch: pytest.MonkeyPatch, *modules: ModuleType) -> T:
        """Replace `time` in these modules by this clock, and return the clock."""
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
        """Return 0; the clock has no CPU time."""
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        self.asleep()
