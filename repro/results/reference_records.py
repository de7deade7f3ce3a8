"""Reference records: packaged results of other machines, for claims without a result in the user's own store.

Each file `reference/*.jsonl` contains the records of one machine in the format of the store. `repro run` does not read
these files, so that every experiment still runs on the user's machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from repro.config.errors import ConfigError, require
from repro.results.record_parts import StepSeries
from repro.results.schema import MEASURED, ComparisonRecord, ExperimentRecord, FitRecord, Record, read_record
from repro.results.select import select
from repro.util.files import write_file

ReferenceRecord: TypeAlias = ExperimentRecord | ComparisonRecord | FitRecord
REFERENCE_DIRECTORY = Path(__file__).parent / "reference"
KEPT_PROVENANCE = ("git", "torch", "gpus")
"""Keys of a measured record's provenance that the packaged, shortened copy of the record contains unchanged."""
KEPT_PACKAGES = ("repro", "torch", "deepspeed", "megatron-core")
"""Python packages whose versions a reference record contains."""


@dataclass(frozen=True)
class ReferenceFile:
    """File of packaged reference records, all measured on one machine."""

    name: str
    device: str
    """Name of the machine's GPU or processor, such as `NVIDIA H200`."""
    date: str
    """Day on which the oldest record of this reference file was measured, as YYYY-MM-DD."""
    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        """Return device and day of the reference records as one text: `NVIDIA H200, 2026-11-26`."""
        return f"{self.device}, {self.date}"


def load_reference(directory: Path = REFERENCE_DIRECTORY) -> list[ReferenceFile]:
    """Return the files of reference records in `directory`, newest first.  Raises `ConfigError` for an invalid line."""
    found = [_read_file(path) for path in sorted(directory.glob("*.jsonl"))]
    return sorted(found, key=lambda file: file.date, reverse=True)


def _read_file(path: Path) -> ReferenceFile:
    records: list[Record] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = read_record(json.loads(line))
            _ = record.experiment if isinstance(record, ExperimentRecord | FitRecord) else None
        except (AttributeError, ValueError) as error:
            says = f"must be a record of a measurement: {error}"
            raise ConfigError(f"line {number}", says=says, file=str(path)) from None
        if getattr(record, "evidence", MEASURED) != MEASURED:
            says = "must be a measured record, since simulated records cannot be reference records"
            raise ConfigError(f"line {number}", says=says, file=str(path))
        records.append(record)
    what = "one device in the provenance of all records, since a reference file describes one machine"
    device = _single_device(records, "device", what, file=str(path))
    date = min(record.written for record in records)[:10]
    return ReferenceFile(path.name, device, date, tuple(records))


def device_of(record: Record) -> str:
    """Return the name of the GPU or processor in a record; empty without one, for example after an early failure."""
    if isinstance(record, FitRecord):
        return record.device
    gpus = record.provenance.get("gpus") or []
    return str(gpus[0]["name"]) if gpus else str((record.provenance.get("cpu") or {}).get("model") or "")


def _single_device(records: Iterable[Record], key: str, expected: str, file: str = "") -> str:
    devices = sorted({device for record in records if (device := device_of(record))})
    require(len(devices) == 1, key, ", ".join(devices), expected, file=file)
    return devices[0]


def write_reference(records: Iterable[Record], path: Path) -> int:
    """Write the measured records of a store to a file of reference records; return the number of written records.

    The file contains the newest conclusive record of each experiment, shortened. If the store has runs on GPUs, runs
    on processors are omitted. Raises `ConfigError` unless all records are of one device.
    """
    chosen = select(records)
    found: list[ExperimentRecord | FitRecord] = [*chosen.measured, *chosen.fits]
    on_gpu = [record for record in found if record.conditions.get("system") != "local"]
    chosen_runs = on_gpu or found
    labels = {record.label for record in chosen_runs}
    retained: list[ReferenceRecord] = [
        *(record for record in chosen_runs if record.conclusive),
        *(one for one in chosen.comparisons if f"{one.suite}/{one.subject.name}" in labels),
    ]
    what = "a results folder with records of one GPU or processor model; write one reference file per machine"
    _single_device(retained, "--results", what)
    lines = [json.dumps(shortened_record(record).as_dict(), separators=(",", ":")) for record in retained]
    write_file(path, "\n".join(lines) + "\n")
    return len(lines)


def shortened_record(record: ReferenceRecord) -> ReferenceRecord:
    """Return a record without the parts that claims do not read: most provenance, series, and data of other ranks."""
    origin = record.provenance
    packages = origin.get("packages") or {}
    retained: dict[str, Any] = {key: origin[key] for key in KEPT_PROVENANCE if key in origin}
    if packages:
        retained["packages"] = {name: packages[name] for name in KEPT_PACKAGES if name in packages}
    if "cpu" in origin:
        retained["cpu"] = {"model": origin["cpu"].get("model")}
    if not isinstance(record, ExperimentRecord):
        return replace(record, provenance=retained)
    series = StepSeries(loss=record.series.loss)
    memory = record.memory_by_rank[:1]
    return replace(record, provenance=retained, series=series, memory_by_rank=memory, comm_by_rank=[])
