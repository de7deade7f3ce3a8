"""Tests of simulated evidence: functions on records, limits among experiments, and the digits of the papers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from repro.claims.expression import arguments
from repro.claims.judge import experiments_read, judge_claim
from repro.claims.records import Missing, Records
from repro.claims.tolerance import accepted_range
from repro.claims.verdicts import NO_TEST, NOT_COMPARABLE, NOT_REPRODUCED, REPRODUCED
from repro.config import Experiment
from repro.launch.simulated import simulate_experiment, simulated_system
from repro.results.schema import ExperimentRecord
from tests import committed
from tests.claims.constructed_records import SMALL, conditions
from tests.claims.constructed_records import record as constructed
from tests.records import changed

LEDGER = committed.ledger()
PACKAGED = {
    f"{suite.name}/{entry.experiment.name}": entry.experiment
    for suite in (committed.suite(path) for path in (Path(__file__).parents[2] / "suites").glob("*.toml"))
    for entry in suite.entries
}


def record(name: str, outcome: str = "ok", evidence: str = "simulated", **metrics: float) -> ExperimentRecord:
    size = {"a": 1e9, "c": 4e9}.get(name, 1.0)
    experiment = conditions(model=dataclasses.replace(SMALL, published_params=size))
    return changed(constructed(name, outcome=outcome, **metrics), evidence=evidence, experiment=experiment)


def call(name: str, *arguments: str, of: list[ExperimentRecord], kind: str = "simulated") -> Any:
    return Records(of).functions(kind)[name](*arguments)


def test_simulated_peak_memory_of_an_oom_step_is_readable() -> None:
    records = [record("a", "oom", **{"memory.peak_bytes": 7}), record("b", "oom", "measured", x=1)]
    assert call("metric", "s/a", "memory.peak_bytes", of=records) == 7
    with pytest.raises(
        Missing, match=r"no metric memory.reserved_bytes \(ended oom: rank 1 ran out of memory\)"
    ):
        call("metric", "s/a", "memory.reserved_bytes", of=records)
    with pytest.raises(Missing, match="ended oom"):
        call("metric", "s/b", "x", of=records, kind="measured")


def test_failure_reports_phase_and_memory() -> None:
    (failed,) = simulated("zero_memory", "fig4-dp-1.5b-batch1")
    names = ("phase", "allocated_bytes", "reserved_bytes")
    found = [call("failure", failed.label, name, of=[failed]) for name in names]
    assert found[0] == "backward"
    assert f"{found[1]} allocated and {found[2]} reserved" in failed.reason
    assert call("failure", "s/a", "phase", of=[record("a")]) == "it fits"
    with pytest.raises(Missing, match="does not contain the phase"):
        call("failure", "s/a", "phase", of=[record("a", "oom")])
    with pytest.raises(Missing, match="does not contain the place"):
        call("failure", failed.label, "place", of=[failed])


def test_ddp_bucket_copies_decide_whether_1p5b_fits() -> None:
    """On a V100, 1.4B fits with the copies; 1.5B fits only without the copies (ZERO3 p.2, DS-FEB20 README)."""
    outcomes = {}
    for size in ("1.4b", "1.5b"):
        experiment = PACKAGED[f"zero_memory/dp-mp1-{size}"]
        assert not experiment.layout.gradient_as_bucket_view
        for view in (False, True):
            layout = dataclasses.replace(experiment.layout, gradient_as_bucket_view=view)
            run = dataclasses.replace(experiment, layout=layout)
            outcomes[size, view] = simulate_experiment(run, simulated_system(run), "s").outcome
    fits = {("1.4b", False): "ok", ("1.4b", True): "ok", ("1.5b", True): "ok"}
    assert outcomes == {**fits, ("1.5b", False): "oom"}


def test_search_needs_experiments_that_differ_in_one_setting() -> None:
    for part, changes, differ in (
        ("layout", {"micro_batch": 2, "global_batch": 2}, "layout.global_batch, layout.micro_batch"),
        # The sequence length of a model counts as a condition of the training, not as the size of the model.
        ("model", {"seq": 32}, "training.seq"),
    ):
        small, large = record("a"), record("c", "oom")
        search = "largest", "model.published_params", "s/a", "s/c"
        assert call(*search, of=[small, large]) == 1e9
        with pytest.raises(Missing, match="s/c: no record"):
            call(*search, of=[small])
        other = dataclasses.replace(getattr(large.experiment, part), **changes)
        different = dataclasses.replace(large.experiment, **{part: other}).as_dict()
        with pytest.raises(Missing, match=f"experiment also differs from s/a in {differ}$"):
            call(*search, of=[small, changed(large, experiment=different)])


def simulated(suite: str, *names: str) -> list[ExperimentRecord]:
    found = [PACKAGED[f"{suite}/{name}"] for name in names]
    return [simulate_experiment(experiment, simulated_system(experiment), suite) for experiment in found]


def test_simulated_table_1_has_the_digits_of_the_paper() -> None:
    """The test has one cell of every stage and size, rounded or truncated as in the paper; `make smoke` has all 54."""
    names = (
        *("7.5b-z1-n4", "7.5b-z2-n4", "7.5b-z3-n1024", "128b-z1-n1024", "128b-z2-n1024", "128b-z3-n64"),
        *("1t-z1-n64", "1t-z2-n256", "1t-z3-n256"),
    )
    records = simulated("zero_memory", *names)
    result = judge_claim(LEDGER.claim("zero-table1-per-device-memory"), Records(records))
    compared = [
        (row.row.printed, finding)
        for row in result.rows
        for finding in row.findings
        if finding.kind == "simulated" and finding.decided
    ]
    assert len(compared) == len(names)
    for printed, finding in compared:
        assert printed is not None
        assert finding.verdict == REPRODUCED
        value = float(finding.value or 0)
        assert accepted_range(printed, "exact", closed_form=True).meets(value, value), (printed, value)


def records_of(fit: Collection[str], names: Collection[str]) -> list[ExperimentRecord]:
    """Return the records of packaged experiments; those in `fit` fit, and the others end out of memory."""
    return [
        changed(record(name, "ok" if name in fit else "oom"), experiment=PACKAGED[name].as_dict())
        for name in names
    ]


SEARCHES = sorted(
    {
        (function, *texts)
        for claim in LEDGER.claims
        for row in claim.rows
        for evidence in row.evidence
        for function, texts in arguments(evidence.value, row.variables)
        if function in ("largest", "smallest")
    }
)


@pytest.mark.parametrize("search", SEARCHES, ids=" ".join)
def test_result_of_a_ledger_search_depends_on_its_experiments(search: tuple[str, ...]) -> None:
    """The experiments differ in the setting alone. The largest model or the smallest degree must not fit."""
    function, setting, *names = search

    def limit(fit: Collection[str]) -> float:
        return float(call(function, setting, *names, of=records_of(fit, names)))

    values = {name: call("setting", name, setting, of=records_of((), names)) for name in names}
    *inside, end = sorted(set(values.values()), reverse=function == "smallest")
    assert inside
    assert limit(()) == (0 if function == "largest" else math.inf)
    for place, value in enumerate(inside):
        assert limit([name for name in names if values[name] in inside[: place + 1]]) == value
    if (function, end) == ("smallest", 1):  # no degree is below 1
        assert limit(names) == 1
        return
    with pytest.raises(Missing, match=f"the {function} listed {setting} fits in memory") as error:
        limit(names)
    assert values[error.value.experiment] == end


SHAPE = {"model.name", "model.layers", "model.hidden"}
RULE_SETTINGS = {
    "efficiency with the sequence": {"training.seq"},
    "efficiency with fewer layers and more width, 40B": SHAPE,
    "efficiency with fewer layers and more width, 60B": SHAPE,
    "efficiency with micro-batches": {"layout.global_batch"},
    "idle time as m falls from much larger than L/l to L/l": {"layout.global_batch"},
    "efficiency with fewer stages": {"layout.pp"},
    "memory of twice the sequence above that of twice the batch": {
        *("training.seq", "layout.micro_batch", "layout.global_batch")
    },
}
"""Settings that differ within the sweep for each design rule of Yuan 1.0."""


def test_sweep_of_a_yuan_rule_changes_only_its_setting() -> None:
    """For example, the wider 60B model has the same number of heads."""
    rows = {row.label: row for row in LEDGER.claim("yuan-design-rules").rows}
    del rows["all-reduces per layer"]
    assert rows.keys() == RULE_SETTINGS.keys()
    for label, row in rows.items():
        (evidence,) = row.evidence
        names = experiments_read(evidence.value, row.variables)
        flat = [settings(PACKAGED[name]) for name in names]
        differ = {key for key in flat[0] if len({str(one[key]) for one in flat}) > 1}
        assert differ - {"model.note", "model.source"} == RULE_SETTINGS[label], label


def settings(experiment: Experiment) -> dict[str, Any]:
    """Return the conditions of an experiment by name, such as `layout.tp`."""
    return {
        f"{part}.{key}": value
        for part in ("model", "layout", "training")
        for key, value in dataclasses.asdict(getattr(experiment, part)).items()
    }


def test_turing_nlg_limits_depend_on_the_layouts_that_fit() -> None:
    claims = ("tnlg-mp16-to-4", "tnlg-256-vs-1024")
    fit = [f"turing_nlg/{name}" for name in ("megatron-mp16", "zero1-mp16", "zero1-mp8", "zero1-mp4")]
    names = [name for name in PACKAGED if name.startswith("turing_nlg/")]

    def verdicts(*more: str) -> dict[str, str]:
        records = Records(records_of((*fit, *more), names))
        rows = [row for claim in claims for row in judge_claim(LEDGER.claim(claim), records).rows]
        rows = [row for row in rows if row.row.label != "training time"]
        return {row.row.label: f.verdict for row in rows for f in row.findings if f.kind == "simulated"}

    expected = verdicts()
    assert set(expected.values()) == {REPRODUCED}
    assert len(expected) == 7
    wrong = verdicts("turing_nlg/megatron-mp8")
    assert {label for label, verdict in wrong.items() if verdict != REPRODUCED} == {
        *("smallest MP that fits without ZeRO", "largest batch of a 16-GPU node"),
        "fewest GPUs with Megatron-LM alone",
    }
    wrong = verdicts("turing_nlg/megatron-mp16-batch16")
    assert [label for label in wrong if wrong[label] != REPRODUCED] == ["largest batch of a 16-GPU node"]
    wrong = verdicts("turing_nlg/zero1-128gpus", "turing_nlg/zero1-mp2")
    assert wrong["fewest GPUs with ZeRO 1"] != REPRODUCED


def test_simulation_does_not_test_a_value_that_calibrates_it() -> None:
    claim = LEDGER.claim("meg1-baseline-39tf")
    rate = {"hardware_flops_per_s.device": 39e12}
    simulation = changed(record("meg1-1.2b-mp1", "ok"), suite="megatron_2019", metrics=rate)
    result = judge_claim(claim, Records([simulation]))
    row = next(row for row in result.rows if row.row.calibrates)
    (finding,) = row.findings
    assert (finding.verdict, finding.text) == (NOT_COMPARABLE, "39")
    assert row.row.calibrates in finding.reason
    assert (row.verdict, row.basis, row.reason) == (NO_TEST, "", row.row.needs)
    assert result.kind("simulated") is None
    empty = [f for row in judge_claim(claim, Records([])).rows for f in row.findings]
    assert [f.verdict for f in empty if f.kind == "simulated"] == [NOT_COMPARABLE]


def test_calibration_points_are_the_rows_marked_calibrates() -> None:
    from repro.simulate.time.calibration import calibration_points

    marked = {(row.calibrates, claim.id) for claim in LEDGER.claims for row in claim.rows if row.calibrates}
    assert marked == {(known.name, known.claim) for known in calibration_points()}


def test_rising_order_needs_every_value_to_increase() -> None:
    for rates, verdict in (((1, 2, 3, 4), REPRODUCED), ((1, 3, 3, 4), NOT_REPRODUCED)):
        metrics = [{"hardware_flops_per_s.device": rate} for rate in rates]
        records = [
            changed(record(f"fig8-c{number}-60b"), suite="zero_throughput", metrics=found)
            for number, found in enumerate(metrics, 1)
        ]
        result = judge_claim(LEDGER.claim("zero-table9-fig8-ablation"), Records(records))
        assert next(row for row in result.rows if row.row.label == "60B").verdict == verdict
