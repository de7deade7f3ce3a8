"""Which kernels ran, of all ranks: what a record says, and what a person must be told."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from repro.results.found import KernelsRan, RankResult


def of_ranks(results: Sequence[RankResult]) -> KernelsRan:
    """What all ranks say together; nothing of records older than this."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for name, hows in result.kernels.items():
            found[name].update(hows)
    return {name: dict(hows) for name, hows in sorted(found.items())}


def fallbacks(ran: KernelsRan) -> dict[str, list[str]]:
    """Why torch's operators ran where CUDA kernels should have -> which."""
    found: dict[str, list[str]] = {}
    for name, hows in ran.items():
        for how in hows:
            if how != "cuda" and name != "every operator":
                found.setdefault(how.removeprefix("torch: "), []).append(name)
    return found
