"""Reference records: results of other machines that are part of this package.

Each file `reference/*.jsonl` has the records of one machine, one per line, in the format of the store. A new file in
that folder is enough: its device and its date come from its records. Reference records judge claims where the reader's
own store has no result. `repro run` does not read them, so that every experiment still runs on the reader's machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from repro.config.errors import ConfigError
from repro.results.record_parts import StepSeries
from repro.results.schema import MEASURED, ComparisonRecord, ExperimentRecord, FitRecord, Record, read_record
from repro.results.select import select
from repro.util.files import write_file

ReferenceRecord: TypeAlias = ExperimentRecord | ComparisonRecord | FitRecord
REFERENCE_DIRECTORY = Path(__file__).parent / "reference"
KEPT_PROVENANCE = ("git", "torch", "gpus")
"""Entries of the provenance that a reference record keeps unchanged."""
KEPT_PACKAGES = ("repro", "torch", "deepspeed", "megatron-core")
"""Packages whose versions a reference record keeps."""


@dataclass(frozen=True)
class ReferenceFile:
    """Records of one machine."""

    name: str
    device: str
    """Name of the machine's device: `NVIDIA H200`."""
    date: str
    """Day of the first record, as YYYY-MM-DD."""
    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        """Return device and day: `NVIDIA H200, 2026-11-26`."""
        return f"{self.device}, {self.date}"


def load_reference(directory: Path = REFERENCE_DIRECTORY) -> list[ReferenceFile]:
    """Return the files of `directory`, newest first.  Raises `ConfigError` for a line that is not a record."""
    found = [_read_file(path) for path in sorted(directory.glob("*.jsonl"))]
    return sorted(found, key=lambda file: file.date, reverse=True)


def _read_file(path: Path) -> ReferenceFile:
    records: list[Record] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = read_record(json.loads(line))
            _ = record.experiment if isinstance(record, ExperimentRecord | FitRecord) else None
        except (AttributeError, ValueError) as error:
            raise ConfigError(f"line {number}", says=f"is not a record: {error}", file=str(path)) from None
        if getattr(record, "evidence", MEASURED) != MEASURED:
            says = "is not measured, as all reference records are"
            raise ConfigError(f"line {number}", says=says, file=str(path))
        records.append(record)
    what = "the name of one device in the provenance of its records; a file has records of one machine"
    device = _single_device(records, "device", what, file=str(path))
    date = min(record.written for record in records)[:10]
    return ReferenceFile(path.name, device, date, tuple(records))


def device_of(record: Record) -> str:
    """Return the device that a record names; empty if it names none, as after a failure before the first step."""
    if isinstance(record, FitRecord):
        return record.device
    gpus = record.provenance.get("gpus") or []
    return str(gpus[0]["name"]) if gpus else str((record.provenance.get("cpu") or {}).get("model") or "")


def _single_device(records: Iterable[Record], key: str, expected: str, file: str = "") -> str:
    devices = sorted({device for record in records if (device := device_of(record))})
    if len(devices) != 1:
        raise ConfigError(key, ", ".join(devices), expected, file=file)
    return devices[0]


def write_reference(records: Iterable[Record], path: Path) -> int:
    """Write the measured records of a store as a reference file; return the number of records.

    Each experiment keeps its newest conclusive record, without traffic and memory of other ranks than the first and
    without the environment of its machine. If the store has runs on GPUs, runs on processors are left out.
    Raises `ConfigError` if the records are of several devices, or of none.
    """
    chosen = select(records)
    found: list[ExperimentRecord | FitRecord] = [*chosen.measured, *chosen.fits]
    on_gpu = [record for record in found if record.conditions.get("system") != "local"]
    chosen_runs = on_gpu or found
    labels = {record.label for record in chosen_runs}
    kept: list[ReferenceRecord] = [
        *(record for record in chosen_runs if record.conclusive),
        *(one for one in chosen.comparisons if f"{one.suite}/{one.subject.name}" in labels),
    ]
    what = "a store with records of one GPU model or of one processor; give the store of each machine with --results"
    _single_device(kept, "--results", what)
    lines = [json.dumps(shortened_record(record).as_dict(), separators=(",", ":")) for record in kept]
    write_file(path, "\n".join(lines) + "\n")
    return len(lines)


def shortened_record(record: ReferenceRecord) -> ReferenceRecord:
    """Return a record without the parts that no claim reads."""
    origin = record.provenance
    packages = origin.get("packages") or {}
    kept: dict[str, Any] = {key: origin[key] for key in KEPT_PROVENANCE if key in origin}
    if packages:
        kept["packages"] = {name: packages[name] for name in KEPT_PACKAGES if name in packages}
    if "cpu" in origin:
        kept["cpu"] = {"model": origin["cpu"].get("model")}
    if not isinstance(record, ExperimentRecord):
        return replace(record, provenance=kept)
    series = StepSeries(loss=record.series.loss)
    memory = record.memory_by_rank[:1]
    return replace(record, provenance=kept, series=series, memory_by_rank=memory, comm_by_rank=[])
