"""Records for tests: made up, changed, and read from a store's files without the product's reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar, cast

from repro.results import schema
from repro.results.schema import ExperimentRecord, Record

R = TypeVar("R", bound=Record)
CONDITIONS = {"model": {"name": "m"}, "layout": {}, "system": "local", "engine": "native"}


def made_up(name: str, **keys: Any) -> ExperimentRecord:
    """A record of an experiment that nobody ran; `keys` as in a line of the store."""
    plain = {"kind": "experiment", "protocol": schema.PROTOCOL, "suite": "s", "key": "k", "written": "2026"}
    plain |= {"evidence": "measured", "outcome": "ok", "reason": "", "metrics": {}, "series": {}}
    return cast(
        ExperimentRecord, schema.read_record({**plain, "experiment": CONDITIONS, "name": name, **keys})
    )


def changed(record: R, **keys: Any) -> R:
    """The record with other values; `keys` as in a line of the store."""
    return cast(R, schema.read_record({**record.as_dict(), **keys}))


def lines(results: Path) -> list[dict[str, Any]]:
    """The complete lines of a store's files in the order of their `sequence`; lines without one come first."""
    found = [
        json.loads(line)
        for path in (results / "records").glob("*.jsonl")
        for line in path.read_text().split("\n")[:-1]
    ]
    return sorted(found, key=lambda document: (document.get("sequence", 0), str(document["written"])))


def latest(results: Path, evidence: str = "measured") -> dict[str, dict[str, Any]]:
    """The newest line of each experiment's key, of one kind of evidence."""
    return {
        line["key"]: line for line in lines(results) if line.get("evidence") == evidence and "key" in line
    }
