"""What `repro simulate`, `fit` and `plan` are asked alike, and what it comes to: a layout, a limit of memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from repro.config.errors import ConfigError, require
from repro.config.layout import Layout
from repro.config.sizes import RANKS, at_most
from repro.config.system import System

SHOWN = 12
"""Layouts of a plan that are printed where nobody says how many; `--json` has all."""


@dataclass(frozen=True)
class Asked:
    """A question as it was typed.  What is wrong in it is a `ConfigError` about the key."""

    system: str
    gpus: int
    layout: dict[str, Any]
    """Keys of the layout that were given."""
    seq: int = 0
    """Tokens of a sample; 0: the model's longest."""
    memory_limit: str = ""
    expandable: bool = False


_SIZE = re.compile(r"\s*(\d+\.?\d*(?:e\+?\d+)?)\s*(?:([kmgt])(i?)b|b)?\s*", re.IGNORECASE)


def memory_bytes(text: str) -> int | None:
    """Bytes in `32GB` (1e9), `32GiB` (2**30), `16e9`; None where nothing is given."""
    if not text:
        return None
    found = _SIZE.fullmatch(text)
    number = float(found[1]) if found else 0.0
    if found is None or not 0 < number < 1e18:
        what = "a size in bytes: 32GB (1e9 each), 32GiB (2**30 each) or 16e9"
        raise ConfigError("memory_limit", text, what)
    power = "kmgt".index(found[2].lower()) + 1 if found[2] else 0
    return int(number * (1024 if found[3] else 1000) ** power)


def limit_of(system: System, given: int | None) -> int:
    """Bytes of a device's memory: as `given`, or the system's.  `ConfigError` where neither is known."""
    if given is None:
        known = system.device.memory_bytes
        if known.value is None:
            what = f"is needed, since the memory of {system.name} is not known ({known.source})"
            raise ConfigError("memory_limit", says=what)
        given = int(known.value)
    require(
        given > system.context(),
        "memory_limit",
        given,
        f"more than the {system.context()} bytes of {system.name} that no allocator can have (CUDA, NCCL)",
    )
    return given


def replicas(gpus: int, tp: int, pp: int, cp: int = 1) -> int:
    """The data-parallel degree of `gpus` devices."""
    for key, degree in (("gpus", gpus), ("tp", tp), ("cp", cp), ("pp", pp)):
        require(degree >= 1, key, degree, "a whole number of at least 1")
        at_most(key, degree, RANKS)
    one, times = tp * cp * pp, f"{tp} x {pp}" if cp == 1 else f"{tp} x {cp} x {pp}"
    names = "tp x pp" if cp == 1 else "tp x cp x pp"
    require(gpus % one == 0, "gpus", gpus, f"a multiple of {names} = {times} = {one}")
    return gpus // one


def complete(given: dict[str, Any], gpus: int, system: System) -> Layout:
    """The layout that is meant: dp from the GPUs, precision from the device, schedule from the chunks.

    Without a global batch it is the smallest that fills the pipeline: micro_batch x dp x pp.
    """
    keys = with_defaults(given, system)
    keys["dp"] = replicas(gpus, keys.get("tp", 1), keys.get("pp", 1), keys.get("cp", 1))
    if not keys.get("global_batch"):
        keys["global_batch"] = keys.get("micro_batch", 1) * keys["dp"] * keys.get("pp", 1)
    return Layout(**keys)


def with_defaults(given: dict[str, Any], system: System) -> dict[str, Any]:
    """`given` and what follows from it and from the device."""
    keys = {"precision": system.best_precision, **given}
    if keys.get("chunks", 1) > 1:
        keys.setdefault("schedule", "interleaved")
    return keys
