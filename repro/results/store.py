"""The store of results: append-only files of JSON lines under `root/records`, one file per writing process.

A record is on disk when `Store.append` returns: one `write` to a file that no other process writes, then `fsync`. After
`kill -9` the file has at worst one incomplete last line, which readers skip and report. On a full disk, the writer
truncates the incomplete line. It then frees a small reserve file for one more record that reports the full disk.

Records are ordered by a hybrid logical clock (Kulkarni et al. 2014, Logical Physical Clocks): a record's `sequence` is
the time in microseconds, or 1 more than the highest sequence in the store if the clock is behind that.
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
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from repro.config.errors import ConfigError
from repro.results.schema import ExperimentRecord, FitRecord, NotARecord, Record, read_record
from repro.util.files import sync_folder

RecordT = TypeVar("RecordT", bound=Record)
RESERVE_BYTES = 256 * 1024
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_PRINTED_REMARKS = 10
"""Maximum number of printed notes about invalid lines of a store."""
CLOCK_TOLERANCE_S = 60
"""Minimum delay of the clock behind the newest record, in seconds, for which a note is printed."""


class Store:
    """Store of the records of all runs below `root`. Reading creates no file; the first append creates the files."""

    def __init__(self, root: Path = Path("results")):
        self.root = root
        self.folder = root / "records"
        self._file: int | None = None
        self.path: Path | None = None
        """File to which this process appends its records; None before the first append."""
        self._reserve: int | None = None
        self._good = 0
        self._owner = 0
        self._read: dict[str, _Reading] = {}
        self._has_noted_clock = False

    def prepare(self) -> None:
        """Create this process's record file and its reserve file (disk space for one last record)."""
        self._open()

    def append(self, record: RecordT) -> RecordT:
        """Write one record (finite numbers only) as the newest of the store, wait until it is on disk, and return it.

        Raises:
            OSError: The write failed, and nothing of the record remains. After `ENOSPC` the reserve is free, so that
                one short record still fits.
        """
        record = replace(record, sequence=self._next_sequence())
        self._write(json.dumps(record.as_dict(), allow_nan=False, separators=(",", ":")).encode() + b"\n")
        return record

    def _next_sequence(self) -> int:
        """Return the `sequence` of the next record; print a note once if the clock is behind the newest record."""
        for path in self._files():
            # An unreadable file of another process must not prevent this process from writing its record.
            with contextlib.suppress(OSError):
                self._catch_up(path)
        now, newest = time.time_ns() // 1000, self.newest
        behind_s = (newest - now) // 10**6
        if behind_s >= CLOCK_TOLERANCE_S and not self._has_noted_clock:
            self._has_noted_clock = True
            hours, minutes = divmod(round(behind_s / 60), 60)
            print(
                f"note: the clock is {hours} h {minutes} min behind the newest record in {self.folder}; "
                "new records still count as newer than all others",
                file=sys.stderr,
                flush=True,
            )
        return max(now, newest + 1)

    @property
    def newest(self) -> int:
        """Return the sort key of the newest record that was read, in microseconds since the epoch; 0 without one."""
        return max((reading.newest for reading in self._read.values()), default=0)

    def _write(self, line: bytes) -> None:
        descriptor = self._open()
        try:
            written = os.write(descriptor, line)
            if written != len(line):  # on a full disk, os.write may write only a part of the record's line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._good)
            if error.errno in DISK_FULL:
                self._free_reserve()
            raise
        self._good += len(line)

    def records(self) -> list[Record]:
        """Return all records of the store, oldest first. Each call reads only lines added after the previous call."""
        for path in self._files():
            self._catch_up(path)
        return _oldest_first(record for reading in self._read.values() for record in reading.records.values())

    def _catch_up(self, path: Path) -> None:
        self._read.setdefault(path.name, _Reading(path)).catch_up()

    @property
    def skipped(self) -> list[str]:
        """Return a remark (file, line, reason) for each invalid line that `records` skipped."""
        return [remark for reading in self._read.values() for remark in reading.remarks()]

    def readable(self) -> tuple[list[Record], list[str]]:
        """Return the records whose experiments this version can read, oldest first, and a remark per unreadable one."""
        self.records()
        found, remarks = [], self.skipped
        for reading in self._read.values():
            for line, record in reading.records.items():
                try:
                    _ = record.experiment if isinstance(record, ExperimentRecord | FitRecord) else None
                    found.append(record)
                except ConfigError as error:
                    remarks.append(f"{reading.path}:{line}: {error}; skipped")
        return _oldest_first(found), remarks

    def take_over(self, other: Store) -> int:
        """Append, unchanged, all records of another store that this store lacks; return the number of these records."""
        known = {document.get("id") for document, _ in self._lines()}
        lacking = [line for document, line in other._lines() if document.get("id") not in known]
        for line in lacking:
            self._write(line)
        return len(lacking)

    def _lines(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        for path in self._files():
            for line in path.read_bytes().splitlines(keepends=True):
                document = _document(line)
                if document is not None and line.endswith(b"\n"):
                    yield document, line

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.jsonl"))

    def close(self) -> None:
        """Close the record file of this process and remove its reserve file."""
        if self._owner == os.getpid():
            self._free_reserve()
            if self._file is not None:
                os.close(self._file)
        self._file = self._reserve = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        if self._file is not None and self._owner == os.getpid():
            return self._file
        self.folder.mkdir(parents=True, exist_ok=True)
        _clear_abandoned(self.folder)
        stem = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{socket.gethostname()}-{os.getpid()}"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for attempt in range(1000):
            path = self.folder / (f"{stem}.jsonl" if attempt == 0 else f"{stem}-{attempt}.jsonl")
            try:
                self._file = os.open(path, flags, 0o644)
                break
            except FileExistsError:
                continue
        else:
            raise FileExistsError(errno.EEXIST, "all names for a new record file exist", str(self.folder))
        self.path, self._owner, self._good = path, os.getpid(), 0
        self._reserve = _take_reserve(path.with_suffix(".reserve"))
        sync_folder(self.folder)
        return self._file

    def _free_reserve(self) -> None:
        if self._reserve is None or self.path is None:
            return
        with contextlib.suppress(OSError):
            os.ftruncate(self._reserve, 0)
            os.unlink(self.path.with_suffix(".reserve"))
        os.close(self._reserve)
        self._reserve = None


def read_records(root: Path) -> list[Record]:
    """Return the readable records below `root`, oldest first; print remarks on other lines to standard error."""
    records, remarks = Store(root).readable()
    print_remarks(remarks)
    return records


def _oldest_first(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.order)


def print_remarks(remarks: list[str]) -> None:
    """Print the first `MAX_PRINTED_REMARKS` remarks on invalid lines to standard error."""
    for remark in remarks[:MAX_PRINTED_REMARKS]:
        print(f"note: {remark}", file=sys.stderr)


class _Reading:
    """Records of one file that have been read so far; `catch_up` reads lines that were appended since."""

    def __init__(self, path: Path):
        self.path = path
        self.records: dict[int, Record] = {}
        """Readable records of a store file by line number."""
        self.newest = 0
        """Sort key (`order`) of the newest record in the file; 0 without a record."""
        self._bad: dict[int, str] = {}
        """Reason why a line of the file is not a record, by line number."""
        self._offset = 0
        self._line = 0
        self._rest = False

    def catch_up(self) -> None:
        with open(self.path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete, newline, rest = data.rpartition(b"\n")
        self._rest = bool(rest)
        for line in complete.split(b"\n") if newline else ():
            self._line += 1
            if not line.strip():
                continue
            document = _document(line)
            if document is None:
                self._bad[self._line] = "not a record, skipped"
                continue
            try:
                self.records[self._line] = record = read_record(document)
                self.newest = max(self.newest, record.order)
            except NotARecord as error:
                self._bad[self._line] = f"{error}; skipped"
        self._offset += len(complete) + len(newline)

    def remarks(self) -> list[str]:
        remarks = [f"{self.path}:{line}: {why}" for line, why in self._bad.items()]
        if self._rest:
            remarks.append(f"{self.path}:{self._line + 1}: incomplete record of a stopped process, skipped")
        return remarks


def _refuse(constant: str) -> None:
    """Reject NaN and infinity, which Python reads but JSON does not have."""
    raise ValueError(constant)


def _document(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if the line is anything else."""
    try:
        document = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):  # the JSON parser recurses once per bracket of a corrupt line
        return None
    return document if isinstance(document, dict) else None


def _take_reserve(path: Path) -> int | None:
    """Create and lock a reserve file that occupies disk space, and return its descriptor; None on a full disk."""
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
    """Remove the reserve files of killed processes, whose locks the operating system has released."""
    for path in folder.glob("*.reserve"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
