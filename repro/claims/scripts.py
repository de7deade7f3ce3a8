"""Lines that a user of `repro.parallelize` changes, counted on the pairs of scripts in `examples/`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import cache
from importlib.resources import files


@cache
def changed_lines(script: str) -> int:
    """Lines of `examples/plain/SCRIPT.py` that `examples/zero/SCRIPT.py` changes, adds or takes away.

    A line that another replaces is one, blank lines and comments are none.  Raises `ArithmeticError` for a
    script that is not there.
    """
    before, after = (_code(kind, script) for kind in ("plain", "zero"))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return sum(
        max(old_end - old, new_end - new)
        for what, old, old_end, new, new_end in matcher.get_opcodes()
        if what != "equal"
    )


def _code(kind: str, script: str) -> list[str]:
    try:
        text = files(f"repro.examples.{kind}").joinpath(f"{script}.py").read_text(encoding="utf-8")
    except (OSError, ModuleNotFoundError):
        raise ArithmeticError(f"no script {kind}/{script}.py in examples/") from None
    return [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


COUNTS: dict[str, Callable[..., int]] = {"changed_lines": changed_lines}
"""What expressions of the ledger may call by name to count what is committed here."""
