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
from repro.results import schema
from repro.results.select import by_key, select
from repro.results.store import CLOCK_TOLERANCE_S, Store
from tests.records import lines, made_up

NOON = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)
DAY, HOUR = timedelta(days=1), timedelta(hours=1)


def microseconds(moment: datetime) -> int:
    return round(moment.timestamp()) * 10**6 + moment.microsecond


def append(store: Store, moment: datetime, name: str = "a", outcome: str = "ok") -> None:
    """Append a record while the clock shows `moment`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: microseconds(moment) * 1000)
        store.append(
            made_up(name, id=f"{name} {outcome} {moment}", written=moment.isoformat(), outcome=outcome)
        )


def write_old_lines(root: Path, *moments: datetime) -> None:
    """Write records of a version without `sequence`."""
    (root / "records").mkdir(parents=True)
    with open(root / "records" / "00.jsonl", "w") as file:
        for number, moment in enumerate(moments):
            record = made_up("a", id=f"old {number}", written=moment.isoformat())
            file.write(json.dumps(record.as_dict()) + "\n")


def test_last_record_is_newest_after_a_clock_step_back(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        append(store, NOON, outcome="error")
    with Store(tmp_path) as store:
        append(store, NOON - DAY)
    records = Store(tmp_path).records()
    assert [record.id.split()[1] for record in records] == ["error", "ok"]
    assert by_key(reversed(records))["k"].outcome == "ok"
    assert [record.outcome for record in select(reversed(records)).measured] == ["ok"]
    assert [entry["last"] for entry in Machines(records).entries] == ["2026-06-01 12:00:00"], "clock time"
    with Store(tmp_path) as store:
        append(store, NOON - DAY + HOUR, outcome="hang")
    assert by_key(Store(tmp_path).records())["k"].outcome == "hang"


def test_written_time_of_a_record_is_the_clock_time(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        append(store, NOON)
        append(store, NOON - DAY)
        append(store, NOON + HOUR)
    assert [document["written"] for document in lines(tmp_path)] == [
        moment.isoformat() for moment in (NOON, NOON - DAY, NOON + HOUR)
    ]
    noon = microseconds(NOON)
    assert [document["sequence"] for document in lines(tmp_path)] == [
        noon,
        noon + 1,
        microseconds(NOON + HOUR),
    ]


def test_machines_are_listed_by_their_last_appended_record(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        for host, moment in (("first", NOON), ("second", NOON - DAY)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(time, "time_ns", lambda moment=moment: microseconds(moment) * 1000)
                store.append(made_up("a", written=moment.isoformat(), provenance={"host": host}))
    assert [entry["host"] for entry in Machines(Store(tmp_path).records()).entries] == ["second", "first"]


def test_alternating_writers_see_the_records_of_each_other(tmp_path: Path) -> None:
    """One clock is a day behind the other."""
    with Store(tmp_path) as ahead, Store(tmp_path) as behind:
        for number in range(3):
            append(ahead, NOON + number * HOUR, f"ahead {number}")
            append(behind, NOON - DAY + number * HOUR, f"behind {number}")
        expected = [f"{who} {number}" for number in range(3) for who in ("ahead", "behind")]
        for store in (ahead, behind, Store(tmp_path)):
            assert [record.name for record in store.records()] == expected


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
    write_old_lines(root, *(NOON + timedelta(seconds=second) for second in sorted(old)))
    writers = [Store(root) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for number, (writer, second) in enumerate(appends):
            append(writers[writer], NOON + timedelta(seconds=second), str(number))
    for writer in writers:
        writer.close()
    records = Store(root).records()
    expected = [f"old {number}" for number in range(len(old))]
    assert [record.id for record in records[: len(old)]] == expected
    assert [record.name for record in records[len(old) :]] == [str(number) for number in range(len(appends))]
    orders = [record.order for record in records[len(old) :]]
    assert orders == sorted(set(orders))


def test_records_without_sequence_are_ordered_by_their_time(tmp_path: Path) -> None:
    write_old_lines(tmp_path, NOON + HOUR, NOON, NOON + DAY)
    with Store(tmp_path) as store:
        assert [record.id for record in store.records()] == ["old 1", "old 0", "old 2"]
        assert all("sequence" not in record.as_dict() for record in store.records())
        append(store, NOON, "new")
        assert [record.id for record in store.records()][:3] == ["old 1", "old 0", "old 2"]
        assert store.records()[-1].name == "new"


@pytest.mark.parametrize(
    "written", ["2026-06-01T12:00:00Z", "2026-06-01T14:00:00+02:00", "2026-06-01T12:00:00"]
)
def test_all_formats_of_a_time_have_the_same_order(written: str) -> None:
    assert made_up("a", written=written).order == microseconds(NOON)


def test_a_record_with_an_invalid_time_is_the_oldest(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        append(store, NOON, "dated")
        with open(store.folder / "other.jsonl", "w") as file:
            file.write(json.dumps(made_up("undated", written="yesterday").as_dict()) + "\n")
        assert [record.name for record in store.records()] == ["undated", "dated"]


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


def test_append_ignores_unreadable_files(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        append(store, NOON, "1")
        (store.folder / "00.jsonl").mkdir()
        append(store, NOON - DAY, "2")
        (store.folder / "00.jsonl").rmdir()
        assert [record.name for record in store.records()] == ["1", "2"]


def test_a_sequence_must_be_an_integer() -> None:
    with pytest.raises(schema.NotARecord, match="sequence: of another type in a record of kind experiment"):
        made_up("a", sequence="1")
