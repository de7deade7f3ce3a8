"""Result files of `repro gpu-day`: names, maximum sizes, writers, and the import into a store of records.

The result folder, with its subfolder `records`, has at most `MAX_FILES` files of at most `MAX_FILE_BYTES` each. It is
also a store of records, so that `repro claims --results FOLDER` reads the records.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from repro.config.errors import require
from repro.results.store import Store
from repro.util.files import read_json

MAX_FILES = 8
MAX_FILE_BYTES = 16 * 2**20
FACTS = "facts.json"
"""JSON file that describes the machine, the installed packages and the offline installation kit (an archive)."""
STEPS = "steps.jsonl"
"""JSON lines with the outcome and the duration of each step of `repro gpu-day`."""
RECORDS = "records/gpu-day.jsonl"
"""Experiment records of all steps of `repro gpu-day`, as JSON lines."""
MEASUREMENTS = "measurements.jsonl"
"""JSON lines of measurements that are no experiment records, such as kernel profiles and plain torch modules."""
SYSTEM = "system.toml"
"""TOML file that describes the hardware of the GPU machine, with the rates that `repro calibrate` measures."""
PROFILES = "profiles.txt"
SNAPSHOT = "snapshot.json.gz"
"""Compressed JSON with the GPU memory allocations and releases of one training step."""
LOG = "log.txt"
"""Standard output and standard error of all steps of `repro gpu-day`."""
FILES = (FACTS, STEPS, RECORDS, MEASUREMENTS, SYSTEM, PROFILES, SNAPSHOT, LOG)
LOG_SHARE_BYTES = 512 * 2**10
"""Maximum bytes of one step's output in the log: half from the beginning of the output, half from its end."""


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of one step of `repro gpu-day`, written as one line of `steps.jsonl`."""

    name: str
    outcome: str
    """Result of a step of `repro gpu-day`: `ok`, `failed`, `timeout`, `interrupted` or `skipped`."""
    reason: str = ""
    seconds: float = 0.0
    estimate_s: float = 0.0
    limit_s: float = 0.0
    records: int = 0
    """Number of experiment records that a step of `repro gpu-day` added."""


def append_durably(path: Path, data: bytes) -> bool:
    """Append `data` to a file, and wait until it is on disk. Return False if the file would exceed `MAX_FILE_BYTES`."""
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
    """Append the measurement `name` with its `values` as one JSON line to the file `path`."""
    append_durably(path, json.dumps({"name": name, **values}).encode() + b"\n")


class ResultWriter:
    """Copies the records and the output of running steps to the result files of `repro gpu-day`."""

    def __init__(self, out: Path, store: Path):
        self.out, self.store = out, store
        self._copied: dict[Path, int] = {}
        """Number of bytes that are already copied to the result files, for each file of experiment records."""
        self._log = out / LOG
        self._logged = 0
        """Number of output bytes of the running `repro gpu-day` step that the log file already contains."""

    def write_outcome(self, outcome: StepOutcome) -> None:
        append_durably(self.out / STEPS, json.dumps(asdict(outcome)).encode() + b"\n")

    def begin_step(self, name: str, command: tuple[str, ...]) -> None:
        """Write the name and the command of a step of `repro gpu-day` to the log, as a heading."""
        self._logged = 0
        append_durably(self._log, f"\n===== {name}: {' '.join(command)}\n".encode())

    def copy_new_records(self) -> int:
        """Copy new experiment records of `repro gpu-day` steps to the result files; return the number of records."""
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
        """Copy the start of a `repro gpu-day` step's output to the log; once the step has `ended`, also its end."""
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
                cut = f"\n[{begin - self._logged} bytes omitted]\n".encode() if begin > self._logged else b""
                append_durably(self._log, cut + file.read())


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file of JSON lines. Invalid lines are skipped, and a missing file yields nothing."""
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


@dataclass(frozen=True)
class ImportedVisit:
    """Results of one run of `repro gpu-day`, and numbers of its records that the importing store lacked or had."""

    facts: dict[str, Any]
    outcomes: list[dict[str, Any]]
    measurements: list[dict[str, Any]]
    new_records: int
    known_records: int


def import_results(folder: Path, results: Path) -> ImportedVisit:
    """Copy new records of a `repro gpu-day` run to the folder `results`; return all results. Raises `ConfigError`."""
    outcomes = list(read_json_lines(folder / STEPS))
    says = f"the folder has no file {STEPS}; name the --out folder of a `repro gpu-day` run"
    require(outcomes, "--import", str(folder), says=says)
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
