"""`repro doctor`: what works on this machine or on a cluster, and what it enables, a line for each thing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from repro.doctor.check import Check
from repro.render.console import print_json, stdout


def machine(results: Path, compile_for: str, json: bool) -> int:
    """Examine this machine; 1 if the harness cannot run anything here, else 0.

    `compile_for`: the architectures for which all CUDA kernels are compiled.  Raises `ConfigError`.
    """
    from repro.doctor.machine import examine
    from repro.measure.provenance import gpus

    more = {"gpus": gpus()} if json else {}
    return _answer(examine(results, compile_for), json=json, undone="run here", more=more)


def cluster(profile: Path, results: Path, nodes: int, json: bool) -> int:
    """Examine what a profile promises; 1 if something keeps suites from running, else 0.

    `nodes`: also start a short job on that many nodes and look around there.  Raises `ConfigError` for a bad profile.
    """
    from repro.launch.slurm.site.profile import load
    from repro.launch.slurm.submission.doctor import examine

    hint = "" if nodes else "--nodes 1 also looks from a node: GPUs, interfaces, NCCL, the shared folder."
    checks = list(examine(load(profile), results.absolute(), nodes))
    return _answer(checks, json=json, undone="submitted", hint=hint)


def _answer(
    checks: Sequence[Check], *, json: bool, undone: str, hint: str = "", more: dict[str, Any] | None = None
) -> int:
    """Print the checks; 1 if one that fails is fatal, else 0.

    `undone`: what a fatal one keeps from being done.  `hint`: what else can be asked where none is.
    `more`: keys of the JSON document.
    """
    broken = [check.name for check in checks if check.fatal]
    if json:
        found = {"usable": not broken, "checks": [asdict(check) for check in checks], **(more or {})}
        print_json(found)
    else:
        print("\n".join(lines(checks, stdout(least=100).width)))
        if broken:
            print(f"\nNothing can be {undone} until this is mended: {', '.join(broken)}.")
        elif hint:
            print(f"\n{hint}")
    return 1 if broken else 0


def lines(checks: Sequence[Check], width: int) -> list[str]:
    """The checks as aligned lines of at most `width` characters."""
    longest = max(len(check.name) for check in checks)
    found = []
    for check in checks:
        head = f"{check.state:<8}{check.name:<{longest}}  "
        body = textwrap.wrap(f"{check.found} - {check.enables}", max(30, width - len(head))) or [""]
        found += [head + body[0], *(" " * len(head) + line for line in body[1:])]
    return found
