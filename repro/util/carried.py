"""Values that pass through a process which does not look at them."""

from __future__ import annotations

import pickle
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Carried(Generic[T]):
    """A value that is sent between processes as bytes, and made of them only where it is asked for.

    A plan holds the events of hundreds of traces, which workers make and workers use: to make all their objects would
    take the process in between seconds.
    """

    def __init__(self, value: T):
        self._value: T | None = value
        self._bytes = b""

    @property
    def value(self) -> T:
        """The value itself; equal to the one that was sent."""
        if self._value is None:
            self._value = pickle.loads(self._bytes)
        return cast(T, self._value)

    def __getstate__(self) -> bytes:
        return self._bytes or pickle.dumps(self._value, pickle.HIGHEST_PROTOCOL)

    def __setstate__(self, state: bytes) -> None:
        self._value, self._bytes = None, state
