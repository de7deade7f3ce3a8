"""The result files of `repro gpu-day`: names, limits, how steps write them, and how `--import` reads them.

A folder has at most `MAX_FILES` files of `MAX_FILE_BYTES`, at most one folder deep. The folder is a store, so
that `repro claims --results FOLDER` reads its records.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from repro.config.errors import ConfigError
from repro.results.store import Store
from repro.util.files import read_json

MAX_FILES = 8
MAX_FILE_BYTES = 16 * 2**20
FACTS = "facts.json"
"""Machine, packages and the kit."""
STEPS = "steps.jsonl"
"""Outcome and time of each step."""
RECORDS = "records/gpu-day.jsonl"
"""Records of all steps."""
MEASUREMENTS = "measurements.jsonl"
"""Results that are not records of an experiment."""
SYSTEM = "system.toml"
"""System file of `repro calibrate`."""
PROFILES = "profiles.txt"
SNAPSHOT = "snapshot.json.gz"
"""Allocations of one step."""
LOG = "log.txt"
"""Output of the steps."""
FILES = (FACTS, STEPS, RECORDS, MEASUREMENTS, SYSTEM, PROFILES, SNAPSHOT, LOG)
LOG_SHARE_BYTES = 512 * 2**10
"""Maximum size of a step's output in the log, half of it from the beginning and half from the end."""


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of one step, a line of `STEPS`."""

    name: str
    outcome: str
    """`ok`, `failed`, `timeout`, `interrupted` or `skipped`."""
    reason: str = ""
    seconds: float = 0.0
    estimate_s: float = 0.0
    limit_s: float = 0.0
    records: int = 0
    """Records that the step added."""


def append_durably(path: Path, data: bytes) -> bool:
    """Append to a result file and wait until the data are on disk. Return whether the size limit permits it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.fstat(descriptor).st_size + len(data) > MAX_FILE_BYTES:
            return False
        os.write(descriptor, data)
        os.fsync(descriptor)
        return True
    finally:
        os.close(descriptor)


def append_measurement(path: Path, name: str, **values: Any) -> None:
    """Append one result as a JSON line to `path`."""
    append_durably(path, json.dumps({"name": name, **values}).encode() + b"\n")


class ResultWriter:
    """Copies the records and the output of steps to the result files while the steps run."""

    def __init__(self, out: Path, store: Path):
        self.out, self.store = out, store
        self._copied: dict[Path, int] = {}
        """Copied bytes of each record file."""
        self._log = out / LOG
        self._logged = 0
        """Bytes of the running step's output that are in the log."""

    def write_outcome(self, outcome: StepOutcome) -> None:
        """Append the outcome of a step."""
        append_durably(self.out / STEPS, json.dumps(asdict(outcome)).encode() + b"\n")

    def begin_step(self, name: str, command: tuple[str, ...]) -> None:
        """Begin the part of a step in the log."""
        self._logged = 0
        append_durably(self._log, f"\n===== {name}: {' '.join(command)}\n".encode())

    def copy_new_records(self) -> int:
        """Copy the complete lines that stores of steps have gained; return their number."""
        count = 0
        for path in sorted((self.store / "records").glob("*.jsonl")):
            done = self._copied.get(path, 0)
            with open(path, "rb") as file:
                file.seek(done)
                complete, newline, _ = file.read().rpartition(b"\n")
            if newline:
                self._copied[path] = done + len(complete) + 1
                lines = [line for line in complete.split(b"\n") if line.strip()]
                count += sum(append_durably(self.out / RECORDS, line + b"\n") for line in lines)
        return count

    def copy_output(self, path: Path, *, ended: bool = False) -> None:
        """Copy the first part of a step's output as it grows, and at its end the last part."""
        half = LOG_SHARE_BYTES // 2
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            file.seek(self._logged)
            if self._logged < half:
                data = file.read(half - self._logged)
                self._logged += len(data)
                append_durably(self._log, data)
            size = file.seek(0, os.SEEK_END)
            if ended and size > self._logged:
                begin = max(self._logged, size - half)
                file.seek(begin)
                cut = f"\n[{begin - self._logged} bytes left out]\n".encode() if begin > self._logged else b""
                append_durably(self._log, cut + file.read())


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, without an incomplete last line; nothing if the file is missing."""
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


@dataclass(frozen=True)
class ImportedVisit:
    """Results of one visit after their import."""

    facts: dict[str, Any]
    outcomes: list[dict[str, Any]]
    measurements: list[dict[str, Any]]
    new_records: int
    known_records: int


def import_results(folder: Path, results: Path) -> ImportedVisit:
    """Append the records of a visit that the store lacks. Raises `ConfigError` if `folder` has no results."""
    outcomes = list(read_json_lines(folder / STEPS))
    if not outcomes:
        raise ConfigError("--import", str(folder), says=f"has no {STEPS}; name the folder of --out")
    visit = Store(folder)
    with Store(results) as store:
        new = store.take_over(visit)
    return ImportedVisit(
        facts=read_json(folder / FACTS),
        outcomes=outcomes,
        measurements=list(read_json_lines(folder / MEASUREMENTS)),
        new_records=new,
        known_records=len(visit.records()) - new,
    )
