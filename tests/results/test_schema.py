"""Tests of the schema of records: lines of the store are read as they were written, by any version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from repro.config import Layout
from repro.config.errors import ConfigError
from repro.results import schema
from repro.results.record_parts import RankMemory, SimulatedRole, TrafficRow
from repro.results.schema import ExperimentRecord
from repro.results.store import Store
from tests.records import CONDITIONS, lines, made_up

AMOUNTS = {"size": 2, "calls": 1, "payload_bytes": 8, "sent_bytes": 8}
TRAFFIC = {"op": "send", "group": "pp", "purpose": "", **AMOUNTS}
MEMORY = {"rss_peak_bytes": 1, "cuda": {}}
CHECKPOINTS = {"resumed": [], "written": [4], "write_seconds": [0.1], "failures": [], "times": "of all"}


def line(**keys: Any) -> dict[str, Any]:
    return {**made_up("a").as_dict(), **keys}


def test_records_are_written_as_they_were_read() -> None:
    for keys in (
        {},
        {"series": {"loss": [1.0, None], "loss_scale": []}, "checkpoints": CHECKPOINTS},
        {"comm": [TRAFFIC], "comm_by_rank": [[TRAFFIC], []], "memory_by_rank": [MEMORY]},
        {"comm": [TRAFFIC | {"link": "nvlink"}], "kernels": {"bias_gelu": {"cuda": 2}}, "copy_of": "x"},
        {"roles": [], "evidence": "simulated"},
    ):
        assert schema.read_record(line(**keys)).as_dict() == line(**keys)


def test_parts_of_a_record_have_types() -> None:
    role = dict.fromkeys(SimulatedRole.__dataclass_fields__, 0) | {"name": "all", "reserved_bytes": None}
    record = schema.read_record(line(comm_by_rank=[[TRAFFIC]], memory_by_rank=[MEMORY], roles=[role]))
    assert isinstance(record, ExperimentRecord)
    assert record.comm_by_rank[0][0] == TrafficRow(**TRAFFIC)
    assert record.memory_by_rank == [RankMemory(rss_peak_bytes=1)]
    assert record.roles == [SimulatedRole(**role)]
    assert record.as_dict()["roles"] == [role], "reserved_bytes = None is written"


def test_a_line_of_the_first_version_is_read() -> None:
    """The first version has no id, protocol or `kernels`, and fewer layout keys."""
    kept = ["kind", "suite", "name", "key", "written", "evidence", "outcome", "reason", "metrics", "series"]
    model = {"name": "m", "layers": 2, "hidden": 16, "heads": 2, "vocab": 64, "seq": 16}
    parts = {"model": model, "layout": {"dp": 2}, "training": {}, "limits": {}}
    short = {key: line()[key] for key in kept}
    short["experiment"] = {"name": "a", "system": "local", "engine": "native", **parts}
    record = schema.read_record(json.loads(json.dumps(short)))
    assert isinstance(record, ExperimentRecord)
    assert (record.id, record.protocol) == ("", None)
    assert record.experiment.layout == Layout(dp=2)


def test_records_with_unknown_layout_keys_are_reported(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append(made_up("a", experiment={**made_up("a").conditions, "layout": {"of_tomorrow": 1}}))
        with pytest.raises(ConfigError, match="an experiment whose keys this version knows"):
            _ = next(r for r in store.records() if isinstance(r, ExperimentRecord)).experiment
        records, remarks = store.readable()
        assert (records, len(remarks)) == ([], 1)
        assert f"{store.path}:1: " in remarks[0]
        assert len(store.records()) == 1, "the record itself is still read"


def test_lines_are_copied_unchanged_into_another_store(tmp_path: Path) -> None:
    """The lines are of a newer version with unknown keys and an unknown kind."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    (theirs / "records").mkdir(parents=True)
    written = [line(id="1", of_tomorrow={"a": 1}), line(id="2", kind="of tomorrow")]
    text = "".join(json.dumps(document) + "\n" for document in written)
    (theirs / "records" / "w.jsonl").write_text(text + '{"torn": 1}')
    for copied in (2, 0):
        with Store(mine) as store:
            assert store.take_over(Store(theirs)) == copied
    assert lines(mine) == written


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ({"comm": {}}, "comm: of another type"),
        ({"wall_s": "1"}, "wall_s: of another type"),
        ({"wall_s": 1, "metrics": []}, "metrics: of another type"),
        ({"series": "none", "metrics": []}, "metrics: of another type"),
        ({"metrics": {"a": 1, "b": "2", "c": 3}}, r"metrics\.b: of another type"),
        ({"metrics": {"a": True}}, r"metrics\.a: of another type"),
        ({"written": 5}, "written: of another type"),
        ({"sequence": "1"}, "sequence: of another type in a record of kind experiment"),
        ({"evidence": "heard of, by somebody who knows"}, "evidence: 'heard of, by somebod' in"),
    ],
)
def test_first_key_of_a_wrong_type_is_named(keys: dict[str, Any], wrong: str) -> None:
    with pytest.raises(schema.NotARecord, match=wrong):
        schema.read_record(line(**keys))


def test_a_record_needs_a_written_time_and_the_conditions_of_every_version() -> None:
    undated = line()
    del undated["written"]
    incomplete = [(undated, "written: missing"), (undated | {"wall_s": "1"}, "wall_s: of another type")]
    for key in ("model", "layout", "system", "engine"):
        conditions = {name: value for name, value in CONDITIONS.items() if name != key}
        incomplete.append((line(experiment=conditions), rf"experiment\.{key}: missing"))
    for document, wrong in incomplete:
        with pytest.raises(schema.NotARecord, match=f"{wrong} in a record of kind experiment"):
            schema.read_record(document)
