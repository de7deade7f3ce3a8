"""Whether a stored line has what every reader of records relies on.

A store outlives the program that wrote it, and people merge, cut and edit files.  A line that is JSON but no whole
record is left out with its place and what it lacks, so that no reader fails in the middle of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "experiment": {
        "suite": str,
        "name": str,
        "key": str,
        "written": str,
        "evidence": str,
        "outcome": str,
        "reason": str,
        "experiment": dict,
        "metrics": dict,
        "series": dict,
    },
    "comparison": {
        "suite": str,
        "name": str,
        "written": str,
        "baseline": dict,
        "subject": dict,
        "metric": str,
        "ratio": (int, float),
        "rounds": int,
    },
}
"""Keys that every record of a kind has had since the first, and their types."""
INNER: dict[str, dict[str, tuple[str, ...]]] = {
    "experiment": {"experiment": ("model", "layout", "system", "engine")},
    "comparison": {"baseline": ("name", "key"), "subject": ("name", "key")},
}


def wrong(record: Mapping[str, Any]) -> str:
    """What is wrong with a record, in a few words; empty where nothing is.  Other kinds are not looked at."""
    kind = record.get("kind")
    if not isinstance(kind, str):
        return "kind: a kind of record, such as experiment"
    for key, expected in KEYS.get(kind, {}).items():
        if not isinstance(record.get(key), expected):
            return (
                f"{key}: {'missing' if key not in record else 'of another type'} in a record of kind {kind}"
            )
    for key, names in INNER.get(kind, {}).items():
        for name in names:
            if name not in record[key]:
                return f"{key}.{name}: missing in a record of kind {kind}"
    return ""
