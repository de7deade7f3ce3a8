"""The store: append-only JSON lines, one file per writer, under `root/records`.

A record is on disk when `Store.append` returns: one `write` to a file that only this process
writes, then `fsync`.  `kill -9` at any moment leaves at worst one torn last line, which readers skip and
report.  When the disk is full, the half-written line is cut off again and a small file that was kept in
reserve makes room for one more record, the one that says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from repro.host.files import sync_folder
from repro.results.shape import wrong

SCHEMA = 1
"""Version of the record's layout."""
RESERVE_BYTES = 256 * 1024
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
MEASURED, SIMULATED = "measured", "simulated"
"""Kinds of evidence that a record can be."""
CONCLUSIVE = ("ok", "oom", "diverged")
"""Outcomes that a further run would only repeat."""
MOST_REMARKS = 10
"""Lines that are no records, named one by one."""


class Store:
    """Records of all runs below `root`.  Opening and reading create nothing; the first append does."""

    def __init__(self, root: Path = Path("results")):
        self.root = root
        self.folder = root / "records"
        self._file: int | None = None
        self._path: Path | None = None
        self._reserve: int | None = None
        self._good = 0
        self._owner = 0
        self._read: dict[str, _Reading] = {}

    def prepare(self) -> None:
        """Create this writer's file and its reserve now, while there is room."""
        self._open()

    def append(self, record: dict[str, Any]) -> None:
        """Write one record (finite numbers only) and wait until it is on disk.

        Raises `OSError`: nothing of the record is left then.  After `ENOSPC` the reserve is free, so that
        one short record still fits.
        """
        line = json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        descriptor = self._open()
        try:
            written = os.write(descriptor, line)
            if written != len(line):  # a full disk takes what fits
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            os.fsync(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._good)
            if error.errno in DISK_FULL:
                self._free_reserve()
            raise
        self._good += len(line)

    def records(self) -> list[dict[str, Any]]:
        """Every complete record, oldest first.  Files are read on from where the last call stopped."""
        found: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob("*.jsonl")):
            reading = self._read.setdefault(path.name, _Reading(path))
            reading.catch_up()
            found += reading.records
        return sorted(found, key=lambda record: str(record.get("written", "")))

    def sound(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The records that a report can read, oldest first, and a remark (file, line, why) for every other line."""
        records = [record for record in self.records() if not wrong(record)]
        incomplete = [
            f"{reading.path}:{line}: {wrong(record)}; skipped"
            for reading in self._read.values()
            for line, record in zip(reading.lines, reading.records, strict=True)
            if wrong(record)
        ]
        return records, [*self.torn, *incomplete]

    @property
    def torn(self) -> list[str]:
        """One remark for each line that the last `records` had to skip."""
        return [remark for reading in self._read.values() for remark in reading.remarks()]

    def latest(self, evidence: str = MEASURED) -> dict[str, dict[str, Any]]:
        """The newest experiment record of every key, of one kind of evidence: both may know the same key."""
        return {
            record["key"]: record
            for record in self.records()
            if record.get("kind") == "experiment" and record.get("evidence", MEASURED) == evidence
        }

    def comparisons(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The newest comparison record of every (baseline key, subject key)."""
        return {
            (record["baseline"]["key"], record["subject"]["key"]): record
            for record in self.records()
            if record.get("kind") == "comparison"
        }

    @property
    def path(self) -> Path | None:
        """The file that this store appends to; None before the first append."""
        return self._path

    def close(self) -> None:
        """Close this writer's file and remove its reserve."""
        if self._owner == os.getpid():
            self._free_reserve()
            if self._file is not None:
                os.close(self._file)
        self._file = self._reserve = None

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> int:
        if self._file is not None and self._owner == os.getpid():
            return self._file
        self.folder.mkdir(parents=True, exist_ok=True)
        _clear_abandoned(self.folder)
        stem = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{socket.gethostname()}-{os.getpid()}"
        for attempt in range(1000):
            path = self.folder / (f"{stem}.jsonl" if attempt == 0 else f"{stem}-{attempt}.jsonl")
            try:
                self._file = os.open(
                    path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644
                )
                break
            except FileExistsError:
                continue
        else:
            raise FileExistsError(errno.EEXIST, "no free name for a record file", str(self.folder))
        self._path, self._owner, self._good = path, os.getpid(), 0
        self._reserve = _take_reserve(path.with_suffix(".reserve"))
        sync_folder(self.folder)
        return self._file

    def _free_reserve(self) -> None:
        if self._reserve is None or self._path is None:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._reserve, 0)
            os.unlink(self._path.with_suffix(".reserve"))
        os.close(self._reserve)
        self._reserve = None


def read(root: Path) -> list[dict[str, Any]]:
    """The sound records below `root`, oldest first; the other lines are named on standard error."""
    records, remarks = Store(root).sound()
    say(remarks)
    return records


def say(remarks: list[str]) -> None:
    """Name the first lines that are no records on standard error."""
    for remark in remarks[:MOST_REMARKS]:
        print(f"note: {remark}", file=sys.stderr)


class _Reading:
    """What was read of one file so far; files only grow."""

    def __init__(self, path: Path):
        self.path = path
        self.records: list[dict[str, Any]] = []
        self.lines: list[int] = []
        """The line of each record."""
        self._offset = 0
        self._line = 0
        self._bad: list[int] = []
        self._rest = False

    def catch_up(self) -> None:
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete, newline, rest = data.rpartition(b"\n")
        self._rest = bool(rest)
        for line in complete.split(b"\n") if newline else ():
            self._line += 1
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # a line of brackets is as deep as it is long
                record = None
            if isinstance(record, dict):
                self.records.append(record)
                self.lines.append(self._line)
            else:
                self._bad.append(self._line)
        self._offset += len(complete) + len(newline)

    def remarks(self) -> list[str]:
        remarks = [f"{self.path}:{line}: not a record, skipped" for line in self._bad]
        if self._rest:
            remarks.append(f"{self.path}:{self._line + 1}: torn record (its writer was stopped), skipped")
        return remarks


def _take_reserve(path: Path) -> int | None:
    """A file of real blocks, locked while its writer lives; None where the disk has no room for it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)
        return None
    return descriptor


def _clear_abandoned(folder: Path) -> None:
    """Remove reserves whose writers were killed: their locks died with them."""
    for path in folder.glob("*.reserve"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
