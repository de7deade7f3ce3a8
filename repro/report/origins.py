"""Where records come from: machines, versions and source, in a few words each."""

from __future__ import annotations

from collections.abc import Iterable

from repro.results.record_parts import Provenance
from repro.results.schema import Record
from repro.util import units


class Machines:
    """Where records come from: one entry per machine, source state and set of versions, numbered from 1."""

    def __init__(self, records: Iterable[Record]):
        groups: dict[tuple[str, ...], list[Record]] = {}
        for record in records:
            groups.setdefault(_origin(record), []).append(record)
        entries = []
        for origin, members in groups.items():
            written = sorted(record.written[:19].replace("T", " ") for record in members)
            newest = max(members, key=lambda record: record.order)
            provenance = newest.provenance
            found = {
                "records": len(members),
                "first": written[0],
                "last": written[-1],
                "provenance": provenance,
            }
            entries.append((newest.order, origin, {**where(provenance), **found}))
        entries.sort(key=lambda entry: entry[0], reverse=True)
        self.entries = [{"number": number, **entry} for number, (_, _, entry) in enumerate(entries, 1)]
        """Newest first."""
        self._numbers = {origin: number for number, (_, origin, _) in enumerate(entries, 1)}

    def number(self, record: Record) -> int:
        """Of the entry that describes where `record` comes from."""
        return self._numbers[_origin(record)]


def _origin(record: Record) -> tuple[str, ...]:
    return tuple(where(record.provenance).values())


def where(provenance: Provenance) -> dict[str, str]:
    """A record's machine, versions and source, each in a few words; `unknown` where it does not say."""
    cpu, packages = provenance.get("cpu") or {}, provenance.get("packages") or {}
    memory, gpus = provenance.get("memory") or {}, provenance.get("gpus") or []
    names = [str(gpu.get("name")) for gpu in gpus]
    kinds = [f"{names.count(name)} x {name}" for name in sorted(set(names))]
    return {
        "host": str(provenance.get("host", "unknown")),
        "cpu": f"{cpu.get('model', 'unknown')}, {cpu.get('usable_cores', '?')} cores",
        "memory": units.size(memory.get("total_bytes")),
        "gpus": ", ".join(kinds) or "none",
        "torch": str(packages.get("torch", "unknown")),
        "python": str((provenance.get("python") or {}).get("version", "unknown")),
        "commit": _commit(provenance),
    }


def _commit(provenance: Provenance) -> str:
    """`3300ebc0a1b2`, with the hash of the uncommitted difference where there is one."""
    git = provenance.get("git") or {}
    if not git.get("commit"):
        return "not a checkout" if not git else f"no commit, tree {git.get('diff')}"
    return git["commit"][:12] + (f" + changes {git['diff']}" if git.get("dirty") else "")
