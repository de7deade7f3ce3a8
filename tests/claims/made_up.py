"""Records that nobody ran, to test the judge with."""

from __future__ import annotations

from typing import Any

from repro.config import PROTOCOL


def record(
    name: str, *, written: str = "2026-01-01T00:00:00Z", outcome: str = "ok", **metrics: float
) -> dict[str, Any]:
    """What the store holds for one experiment of suite s."""
    suite, _, name = name.rpartition("/")
    return {
        "protocol": PROTOCOL,
        "written": written,
        "kind": "experiment",
        "suite": suite or "s",
        "name": name,
        "evidence": "measured",
        "outcome": outcome,
        "reason": "" if outcome == "ok" else "rank 1 ran out of memory",
        "metrics": metrics,
    }
