"""Tests of ranked unknowns: shares by hand on artificial records, and advice on their measurement."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from repro.accuracy.calibrate import document
from repro.accuracy.validate.unknowns import RankedInputs, measurement_advice, rank_inputs
from repro.cli import main
from repro.config import OperatorSet, systems
from repro.config.systems.unknowns import PACE
from repro.measure.local_system import load_system
from repro.results.interval import Sensitivity, StepInterval
from repro.results.schema import ExperimentRecord
from repro.results.store import Store
from repro.simulate.time.calibration import calibration_point_of, calibration_points, uncertain_numbers
from tests.accuracy.calibrate.test_gpu import rank_result
from tests.accuracy.validate.test_implied_inputs import RINGS, judge_rates, step_record
from tests.claims.constructed_records import HEAD, row
from tests.claims.test_possible import rate
from tests.records import changed


def ranked(path: Path, published: dict[str, str], *records: ExperimentRecord) -> RankedInputs:
    return rank_inputs(judge_rates(path, published, *records), records)


def test_ranking_counts_shares_rows_and_verdicts(tmp_path: Path) -> None:
    """Rates of 100 samples. In a, rings change the rate by 10 (10 to 20/s), pace by 2.5 (10 to 12.5/s): 80 % for rings.
    In b, only pace acts. c is on another system, whose rings are another input."""
    found = ranked(
        tmp_path,
        {"a": "18", "b": "10", "c": "10"},
        step_record("dgx2", "a", rings=(10.0, 5.0), pace=(8.0, 10.0)),
        step_record("dgx2", "b", pace=(8.0, 12.5)),
        step_record("selene", "c", rings=(10.0, 12.5)),
    )
    assert (found.rows, found.possible, found.settled_by_the_first) == (3, 1, 3)
    by_name = {(one.key, one.system): one for one in found.inputs}
    assert set(by_name) == {(RINGS, "dgx2"), (PACE, "dgx2"), (RINGS, "selene")}
    rings, pace = by_name[RINGS, "dgx2"], by_name[PACE, "dgx2"]
    assert (rings.rows, rings.settles, rings.possible) == (["a-claim/a"], ["a-claim/a"], ["a-claim/a"])
    assert rings.share == pytest.approx(10 / 12.5 / 3)
    assert (pace.rows, pace.settles, pace.possible) == (["a-claim/a", "a-claim/b"], ["a-claim/b"], [])
    assert pace.share == pytest.approx((2.5 / 12.5 + 1) / 3)
    assert sum(one.share for one in found.inputs) == pytest.approx(1)
    assert found.inputs[0] is pace, "equal rows are ordered by share"
    assert "adapter" in rings.source
    assert (rings.low, rings.best, rings.high) == (1, 2, 3), "the values of the record"
    half = step_record("dgx2", "a", rings=(10.0, 5.0), pace=(5.0, 10.0))
    assert [one.settles for one in ranked(tmp_path, {"a": "10"}, half).inputs] == [[], []]


def test_calibration_point_is_one_input_on_all_systems(tmp_path: Path) -> None:
    (point,) = (p for p in calibration_points() if p.name == "Megatron-LM of September 2019 on V100")
    move = Sensitivity(key=point.rate.key, low=1, best=2, high=3, low_s=10, high_s=12)
    interval = StepInterval(draws=[10.0] * 4, moves=[move])
    records = [changed(step_record(name, name), interval=interval.as_dict()) for name in ("dgx2", "dgx2h")]
    found = ranked(tmp_path, {"dgx2": "10", "dgx2h": "10"}, *records)
    assert [(one.key, one.system, len(one.rows)) for one in found.inputs] == [(point.rate.key, "dgx2h", 2)]


def two_gpus_per_node(nvlink: bool) -> dict[str, Any]:
    """Return the result of one of four ranks on two nodes with two GPUs each."""
    timing, ranks = (1e-3, 1e-3, 1e-3, 3), {"between": 4, "inside": 2}
    call = {"median": 1e-3, "low": 1e-3, "high": 1e-3, "is_unaligned": False}
    kind = {"points": [(1000, timing), (10**6, timing)], "per_node": 2, "stride": 1}
    links = [
        {"op": op, "place": place, "ranks": count, **kind}
        for place, count in ranks.items()
        for op in ("all_reduce", "send")
    ]
    sizes = ((1e6, 1e9), (1e7, 1e10), (1e3, 0.0))
    operators = [{"name": "aten.mm", "nbytes": b, "flops": f, **call} for b, f in sizes]
    operators += [{"name": "elementwise", "nbytes": b, "flops": 0, **call} for b, _ in sizes]
    launch = {"operators": [("elementwise", 1, 1)] * 2, "backward_s": 5e-4, "backward_operators": 1, **call}
    overlap = {place: {"all_reduce": 0.1} for place in ranks}
    measured = {"operators": operators, "launch": launch, "links": links, "overlap": overlap}
    return rank_result(nvlink=nvlink, per_node=2, copy={"nbytes": 10**9, **call}, **measured)


def test_every_unknown_has_advice_and_its_fact_is_written() -> None:
    advice = {}
    for name in systems.system_names():
        system = load_system(name)
        ranks = [two_gpus_per_node("nvlink" in system.links)] * 4
        written = document.system_tables("local-gpu", "fp16", ranks, repeats=3, load=0.0, quick=False)
        for kernels in OperatorSet:
            for one in uncertain_numbers(system, calibration_point_of(kernels, system)):
                advice[one.key] = how = measurement_advice(one.key, name)
                assert how.how, one.key
                assert bool(how.command) == bool(how.fact), one.key
                table: Any = written
                for part in how.fact.split(".") if how.fact else ():
                    assert part in table, f"{one.key} of {name}: {how.fact} is not in the document"
                    table = table[part]
    rates = {point.rate.key for point in calibration_points()}
    assert {RINGS, PACE, "kernels of other devices: products"} <= set(advice)
    unmeasurable = {"device.time.spread"} | rates & set(advice)
    assert {key for key, how in advice.items() if not how.command} == unmeasurable != {"device.time.spread"}
    assert "--system dgx2 --profile" in measurement_advice(RINGS, "dgx2").command


@pytest.fixture
def store(tmp_path: Path) -> list[str]:
    """Return the options of a store and of an additional ledger with one row."""
    ledger = tmp_path / "mine.toml"
    text = HEAD.replace('id = "a-claim"', 'id = "my-claim"').replace('key = "PAPER"', 'key = "MY-PAPER"')
    text = text.replace('["PAPER p.1"]', '["MY-PAPER p.1"]')
    ledger.write_text(f"{text}{row('18', 'a', simulated=rate('s/a'))}]\n")
    with Store(tmp_path / "results") as opened:
        opened.append(step_record("dgx2", "a", rings=(10.0, 5.0), pace=(8.0, 10.0)))
    return ["--results", str(tmp_path / "results"), "--ledger", str(ledger)]


def test_command_and_export_list_unknowns(store: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--unknowns", *store]) == 0
    text = capsys.readouterr().out
    answer = "Largest of 2 uncertainties: inter-node rings of dgx2, which causes 80.0 % of the widths of all"
    assert " ".join(text.split()).startswith(f"{answer} prediction intervals.")
    rows = [line.split() for line in text.splitlines() if line.startswith((RINGS, PACE))]
    assert [row[0] for row in rows] == [RINGS, PACE]
    assert rows[0][-3:] == ["1", "1", "80.0"]
    assert "repro calibrate" not in text
    assert main(["validate", "--unknowns", "--details", *store]) == 0
    first = capsys.readouterr().out.partition(f"{PACE} of dgx2")[0]
    assert f"{RINGS} of dgx2" in first
    assert "1 possible: my-claim" in first
    assert "repro calibrate --system dgx2 --profile" in first
    assert main(["validate", "--unknowns", "--json", *store]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [one["key"] for one in document["unknowns"]] == [RINGS, PACE]
    assert document["unknowns"][0]["fact"] == "links.inter-node.collectives"
    assert main(["export", "--table", "unknowns", "--format", "csv", *store]) == 0
    row = next(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert (row["unknown"], row["system"], row["rows"], row["settles"]) == (RINGS, "dgx2", "1", "1")
    for form in ("markdown", "latex"):
        assert main(["export", "--table", "unknowns", "--format", form, *store]) == 0
        assert "inter-node.rings" in capsys.readouterr().out
    assert main(["validate", "--unknowns", "--svg", "x.svg", *store]) == 2
    assert "cannot be combined with --svg or --system" in capsys.readouterr().err
