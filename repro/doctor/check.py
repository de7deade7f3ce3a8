"""What `repro doctor` answers, of a machine or of a SLURM profile: a line for each thing that was looked for."""

from __future__ import annotations

import json as json_module
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

YES, LIMITED, NO = "yes", "limited", "no"


@dataclass(frozen=True)
class Check:
    """One line: what was looked for, whether it is here, and what that means."""

    name: str
    state: str
    """`yes`, `limited` or `no`."""
    found: str
    """What was found, or what is missing and how to get it."""
    enables: str
    """What works with it, or what stays undone without it."""
    fatal: bool = False
    """Nothing can be run while this is so."""


def answer(
    checks: Sequence[Check],
    *,
    json: bool,
    undone: str,
    hint: str = "",
    document: dict[str, Any] | None = None,
) -> int:
    """Print the checks; 1 if one that fails is fatal, else 0.

    `undone`: what a fatal one keeps from being done.  `hint`: what else can be asked where none is.
    `document`: more keys of the JSON document.
    """
    broken = [check.name for check in checks if check.fatal]
    if json:
        found = {"usable": not broken, "checks": [asdict(check) for check in checks], **(document or {})}
        print(json_module.dumps(found, indent=2))
    else:
        print("\n".join(render(checks, shutil.get_terminal_size((100, 24)).columns)))
        if broken:
            print(f"\nNothing can be {undone} until this is mended: {', '.join(broken)}.")
        elif hint:
            print(f"\n{hint}")
    return 1 if broken else 0


def render(checks: Sequence[Check], width: int) -> list[str]:
    """The checks as aligned lines of at most `width` characters."""
    name_width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        head = f"{check.state:<8}{check.name:<{name_width}}  "
        body = textwrap.wrap(f"{check.found} - {check.enables}", max(30, width - len(head))) or [""]
        lines += [head + body[0], *(" " * len(head) + line for line in body[1:])]
    return lines
