"""Tests of the store: it loses no record with kill -9, torn lines, concurrent writers or a full disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.results.schema import ExperimentRecord
from repro.results.store import Store
from tests.launch.runs import fill, small_disk, synced
from tests.records import lines, made_up

numbers = st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | st.integers() | numbers | st.text()
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
contents = st.fixed_dictionaries(
    {"name": st.text(), "reason": st.text(), "metrics": st.dictionaries(st.text(), numbers, max_size=5)},
    optional={
        "provenance": st.dictionaries(st.text(), values, max_size=5),
        "series": st.fixed_dictionaries({}, optional={"loss": st.lists(st.none() | numbers)}),
    },
)


def record(name: str, key: str = "k", **more: Any) -> ExperimentRecord:
    return made_up(name, **{"key": key, "written": f"{time.time():020.6f}", **more})


@given(st.lists(contents, max_size=5))
def test_stored_records_equal_the_appended_records(
    tmp_path_factory: pytest.TempPathFactory, contents: list[dict[str, Any]]
) -> None:
    root = tmp_path_factory.mktemp("store")
    records = [record(**content) for content in contents]
    with Store(root) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # saves the time of the disk
        for entry in records:
            store.append(entry)
        stored = store.records()
    assert [replace(entry, sequence=None) for entry in stored] == records
    assert Store(root).records() == stored
    assert Store(root).skipped == []
    assert lines(root) == [entry.as_dict() for entry in stored]


def test_append_writes_synchronized_lines_beside_a_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fsync` covers the bytes of the file and, once, its folder. The reserve exists until the store is closed."""
    seen = synced(monkeypatch)
    root = tmp_path / "results"
    with Store(root) as store:
        assert store.records() == []
        assert not root.exists()
        for count in (1, 2):
            store.append(record("a"))
            assert store.path is not None
            assert seen[str(store.path)] == store.path.stat().st_size
            assert len(store.path.read_bytes().splitlines()) == count
        assert str(store.folder) in seen
        (reserve,) = store.folder.glob("*.reserve")
        assert reserve.stat().st_size == 2**18
        assert reserve.stat().st_blocks * 512 >= 2**18, "a sparse file reserves no space"
        with pytest.raises(ValueError, match="JSON"):
            store.append(record("a", metrics={"loss.last": float("nan")}))
        store.append(record("a"))
        assert len(store.records()) == 3
    assert not reserve.exists()


def test_torn_and_invalid_lines_are_skipped_and_reported(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append(record("a"))
        path = store.path
    assert path is not None
    with open(path, "ab") as file:
        file.write(b'\0\0\0\n[1, 2]\n{"name": "half')
    store = Store(tmp_path)
    assert [entry.name for entry in store.records()] == ["a"]
    assert [remark.removeprefix(f"{path}:").partition(":")[0] for remark in store.skipped] == ["2", "3", "4"]


def test_a_completed_line_is_read_by_the_next_call(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    line = json.dumps(record("a").as_dict()) + "\n"
    path = folder / "w.jsonl"
    path.write_text(line + line[:10])
    store = Store(tmp_path)
    assert len(store.records()) == 1
    with open(path, "a") as file:
        file.write(line[10:])
    assert len(store.records()) == 2
    assert store.skipped == []


def _write(root: Path, who: int, count: int) -> None:
    with Store(root) as store:
        for number in range(count):
            store.append(record(f"{who}-{number}", reason="x" * 5000))


def test_concurrent_writers_lose_no_record(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(tmp_path, who, 25)) for who in range(4)]
    for writer in writers:
        writer.start()
    store = Store(tmp_path)
    while any(writer.is_alive() for writer in writers):
        store.records()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    names = [entry.name for entry in store.records()]
    assert sorted(names) == sorted(f"{who}-{number}" for who in range(4) for number in range(25))
    assert store.skipped == []


def test_kill_9_loses_no_acknowledged_record(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_write, args=(tmp_path, 0, 1_000_000))
    writer.start()
    store = Store(tmp_path)
    while len(store.records()) < 10:
        time.sleep(0.01)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    names = [entry.name for entry in Store(tmp_path).records()]
    assert names == [f"0-{number}" for number in range(len(names))]
    assert len(names) >= 10
    # The next writer removes the reserve file of the killed writer.
    assert list(store.folder.glob("*.reserve"))
    with Store(tmp_path) as successor:
        successor.append(record("after"))
        assert len(list(store.folder.glob("*.reserve"))) == 1


def test_full_disk_keeps_records_and_space_for_an_outcome(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk, Store(disk) as store:
        store.append(record("first"))
        fill(disk)
        with pytest.raises(OSError, match="No space"):
            store.append(record("big", reason="y" * 100_000))
        store.append(record("last", outcome="error", reason="disk full"))
        reader = Store(disk)
        assert [entry.name for entry in reader.records()] == ["first", "last"]
        assert reader.skipped == []


def test_a_partially_written_line_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`os.write` writes only half of the line."""
    real = os.write
    with Store(tmp_path) as store:
        store.append(record("a"))
        monkeypatch.setattr(os, "write", lambda descriptor, line: real(descriptor, line[: len(line) // 2]))
        with pytest.raises(OSError, match="No space"):
            store.append(record("b"))
        monkeypatch.undo()
        assert not list(store.folder.glob("*.reserve"))
        store.append(record("c"))
        assert [entry.name for entry in Store(tmp_path).records()] == ["a", "c"]
        assert Store(tmp_path).skipped == []


def test_writers_of_one_process_have_separate_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *now: "now")
    with Store(tmp_path) as one, Store(tmp_path) as two, Store(tmp_path) as three:
        for number, store in enumerate((one, two, three)):
            store.append(record(str(number)))
        files = [store.path for store in (one, two, three)]
    assert [path.stem.rpartition("-")[2] for path in files if path] == [str(os.getpid()), "1", "2"]
    assert len(lines(tmp_path)) == 3
