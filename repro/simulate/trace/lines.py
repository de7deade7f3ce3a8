"""The line of our code that is running, by the frames of the stack: who asked for an operator, or for memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FrameType


def innermost(packages: tuple[str, ...], but: tuple[str, ...] = ()) -> Callable[[], str]:
    """What says `repro/model/gpt.py:12`, the innermost line that runs in one of the packages; `?` if none does.

    but: modules whose lines are passed over, since they only hand on what others ask for.
    """

    @cache
    def file(module: str) -> str:
        if module in but or not any(f"{module}.".startswith(f"{package}.") for package in packages):
            return ""
        found = module.replace("repro.kernels", "kernels")  # where a reader finds it
        return f"{found.replace('.', '/')}.py"

    def line() -> str:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if found := file(frame.f_globals.get("__name__", "")):
                return f"{found}:{frame.f_lineno}"
            frame = frame.f_back
        return "?"

    return line
