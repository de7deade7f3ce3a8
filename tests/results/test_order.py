"""Tests of the order of records: the last appended record is the newest, for any clocks of the writers."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.report.views import Machines
from repro.results.store import CLOCK_TOLERANCE_S, Store
from tests.records import lines, made_up

NOON = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)
DAY, HOUR = timedelta(days=1), timedelta(hours=1)


def microseconds(moment: datetime) -> int:
    return round(moment.timestamp()) * 10**6 + moment.microsecond


def append(store: Store, moment: datetime, name: str = "a", outcome: str = "ok", **keys: object) -> None:
    """Append a record while the clock shows `moment`."""
    keys |= {"id": f"{name} {outcome} {moment}", "written": moment.isoformat(), "outcome": outcome}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: microseconds(moment) * 1000)
        store.append(made_up(name, **keys))


def write_old_lines(root: Path, *moments: datetime) -> None:
    """Write records of a version without `sequence`."""
    (root / "records").mkdir(parents=True)
    with open(root / "records" / "00.jsonl", "w") as file:
        for number, moment in enumerate(moments):
            record = made_up("a", id=f"old {number}", written=moment.isoformat())
            file.write(json.dumps(record.as_dict()) + "\n")


def test_written_time_of_a_record_is_the_clock_time(tmp_path: Path) -> None:
    moments = NOON, NOON - DAY, NOON + HOUR
    with Store(tmp_path) as store:
        for moment in moments:
            append(store, moment)
    assert [document["written"] for document in lines(tmp_path)] == [moment.isoformat() for moment in moments]
    noon, last = microseconds(NOON), microseconds(NOON + HOUR)
    assert [document["sequence"] for document in lines(tmp_path)] == [noon, noon + 1, last]


def test_machines_are_listed_by_their_last_appended_record(tmp_path: Path) -> None:
    """The list shows clock times. A file that cannot be read changes nothing, and an undated record is the oldest."""
    with Store(tmp_path) as store:
        append(store, NOON, provenance={"host": "first"})
        (store.folder / "00.jsonl").mkdir()
        append(store, NOON - DAY, provenance={"host": "second"})
        (store.folder / "00.jsonl").rmdir()
        undated = made_up("undated", written="yesterday", provenance={"host": "none"})
        (store.folder / "other.jsonl").write_text(json.dumps(undated.as_dict()) + "\n")
        records = store.records()
    assert [record.name for record in records] == ["undated", "a", "a"]
    entries = Machines(records[1:]).entries
    assert [entry["last"] for entry in entries] == ["2026-05-31 12:00:00", "2026-06-01 12:00:00"]
    assert [entry["host"] for entry in entries] == ["second", "first"]


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 10**6), max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**6)), max_size=8),
)
def test_records_are_in_the_order_of_their_appends(
    tmp_path_factory: pytest.TempPathFactory, old: list[int], appends: list[tuple[int, int]]
) -> None:
    """Three writers have arbitrary clocks, and the store may contain records without `sequence`."""
    root = tmp_path_factory.mktemp("order")
    write_old_lines(root, *(NOON + timedelta(seconds=second) for second in old))
    writers = [Store(root) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for number, (writer, second) in enumerate(appends):
            append(writers[writer], NOON + timedelta(seconds=second), str(number))
    for writer in writers:
        writer.close()
    records = Store(root).records()
    of_old, of_new = records[: len(old)], records[len(old) :]
    assert [record.id for record in of_old] == [
        f"old {number}" for number in sorted(range(len(old)), key=old.__getitem__)
    ]
    assert [record.name for record in of_new] == [str(number) for number in range(len(appends))]
    orders = [record.order for record in of_new]
    assert orders == sorted(set(orders))


def test_all_formats_of_a_time_have_the_same_order() -> None:
    for written in ("2026-06-01T12:00:00Z", "2026-06-01T14:00:00+02:00", "2026-06-01T12:00:00"):
        assert made_up("a", written=written).order == microseconds(NOON)


def test_merged_stores_order_records_by_their_times(tmp_path: Path) -> None:
    with Store(tmp_path / "mine") as mine, Store(tmp_path / "theirs") as theirs:
        append(mine, NOON, "mine 1")
        append(mine, NOON + 2 * HOUR, "mine 2")
        append(theirs, NOON + HOUR, "theirs", "error")
        append(theirs, NOON + HOUR - DAY, "theirs", "ok")
        assert mine.take_over(theirs) == 2
        assert [record.name for record in mine.records()] == ["mine 1", "theirs", "theirs", "mine 2"]
        assert [record.id.split()[1] for record in mine.records()[1:3]] == ["error", "ok"]
        append(mine, NOON, "after")
        assert mine.records()[-1].name == "after"
    assert len({document["sequence"] for document in lines(tmp_path / "mine")}) == 5


def test_a_late_clock_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store(tmp_path) as store:
        append(store, NOON)
        append(store, NOON - timedelta(seconds=CLOCK_TOLERANCE_S - 1))
        assert capsys.readouterr().err == "", "clocks of several machines differ by seconds"
        append(store, NOON - DAY - timedelta(minutes=5))
        append(store, NOON - DAY)
    assert capsys.readouterr().err == (
        f"note: the clock is 24 h 5 min behind the newest record in {tmp_path}/records; "
        "new records still count as newer than all others\n"
    )
    with Store(tmp_path) as store:
        append(store, NOON - timedelta(seconds=CLOCK_TOLERANCE_S))
    assert "the clock is 0 h 1 min behind" in capsys.readouterr().err
