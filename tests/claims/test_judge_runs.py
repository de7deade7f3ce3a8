"""Tests of the judge with runs: the order of the kinds of evidence, and ratios of interleaved experiments."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from repro.claims.records import Records
from repro.claims.verdicts import NOT_REPRODUCED, NOT_RUN, REPRODUCED
from repro.config import ConfigError, EmulatedNetwork, Experiment, Layout, Model
from repro.results.reference_records import ReferenceFile
from repro.results.schema import ComparisonRecord, Record, Side
from tests.claims.constructed_records import record
from tests.claims.test_judge import PUBLISHED, judged, row
from tests.records import changed

NETWORK = EmulatedNetwork(nodes=2, ranks_per_node=2, between=1e6)


def comparison(subject: str, baseline: str, ratio: float, low: float, high: float) -> ComparisonRecord:
    sides = [Side(name=name, key=name) for name in (baseline, subject)]
    interval = {"ratio": ratio, "low": low, "high": high}
    return ComparisonRecord(
        suite="s", name="x", baseline=sides[0], subject=sides[1], metric="samples_per_s", rounds=5, **interval
    )


def test_interval_of_a_measured_ratio_does_not_widen_tolerance(tmp_path: Path) -> None:
    rows = row('{ value = \'compared("s/a", "s/b")\' }', analytic="")
    assert judged(tmp_path, rows, comparison("a", "b", 2.1, 2.05, 2.15)).verdict == REPRODUCED
    wide = judged(tmp_path, rows, comparison("a", "b", 1.5, 0.5, 4.0))
    assert wide.verdict == NOT_REPRODUCED
    across = judged(tmp_path, rows, comparison("a", "b", 2.1, 1.0, 4.0)).rows[0].findings[0]
    assert "reaches beyond" in across.reason
    swapped = judged(tmp_path, rows, comparison("b", "a", 0.5, 0.48, 0.52)).rows[0].findings[0]
    assert (swapped.verdict, swapped.value) == (REPRODUCED, 2)


SIMULATED = 'simulated = { value = \'metric("s/full", "speed")\' }'


def simulated_row() -> str:
    return f'{{ label = "x", published = "2.0", {SIMULATED} }},\n'


def full_run(kind: str, speed: float, outcome: str = "ok") -> dict[str, Any]:
    return changed(record("full", outcome=outcome, speed=speed), evidence=kind)


def test_run_of_a_simulated_experiment_is_a_measurement(tmp_path: Path) -> None:
    """The run at published scale decides, and the disagreement of the simulation is reported."""
    result = judged(tmp_path, simulated_row(), full_run("simulated", 2.0), full_run("measured", 1.0))
    assert (result.verdict, result.basis) == (NOT_REPRODUCED, "measured, published scale 0/1")
    assert len(result.disagreements) == 1
    result = judged(tmp_path, simulated_row(), full_run("simulated", 1.0), full_run("measured", 2.0))
    assert (result.verdict, result.basis) == (REPRODUCED, "measured, published scale 1/1")


def test_missing_or_failed_run_leaves_the_simulation_to_decide(tmp_path: Path) -> None:
    result = judged(tmp_path, simulated_row(), full_run("simulated", 2.0))
    assert result.basis == "simulated 1/1"
    assert result.kind("measured") is None
    result = judged(tmp_path, simulated_row(), full_run("simulated", 2.0), full_run("measured", 2.0, "oom"))
    assert result.basis == "simulated 1/1"
    (finding,) = (f for f in result.rows[0].findings if f.kind == "measured")
    assert (finding.verdict, finding.scale) == (NOT_RUN, "published scale")
    assert "ended oom" in finding.reason


def test_measured_expression_of_a_row_replaces_the_simulated_one(tmp_path: Path) -> None:
    """A row with a measured expression does not evaluate its simulated expression on measured records."""
    rows = f'{{ label = "x", published = "2.0", {SIMULATED}, measured = [{PUBLISHED}] }},\n'
    result = judged(tmp_path, rows, full_run("simulated", 2.0), full_run("measured", 2.0))
    assert [f.kind for f in result.rows[0].findings] == ["measured", "simulated"]


def test_ratio_of_interleaved_experiments_comes_from_their_comparison(tmp_path: Path) -> None:
    """Two separate records decide only without a comparison record, which has an interval."""
    value = 'metric("s/a", "samples_per_s") / metric("s/b", "samples_per_s")'
    rows = f'{{ label = "x", published = "2.0", simulated = {{ value = \'{value}\' }} }},\n'
    separate = [record("a", samples_per_s=9.0), record("b", samples_per_s=1.0)]
    assert judged(tmp_path, rows, *separate).verdict == NOT_REPRODUCED
    result = judged(tmp_path, rows, *separate, comparison("a", "b", 2.1, 2.05, 2.15))
    finding = result.rows[0].findings[0]
    assert (result.verdict, result.basis) == (REPRODUCED, "measured, published scale 1/1")
    assert (finding.low, finding.high, finding.experiments) == (2.05, 2.15, ("s/a", "s/b"))


def test_only_an_interval_of_the_evidence_widens_a_bound(tmp_path: Path) -> None:
    """Both the interval of a measured ratio and the error of a digitised number count; a tolerance does not."""
    over = '"2.0", bound = "over"'
    ratio = row('{ value = \'compared("s/a", "s/b")\' }', analytic="").replace('"2.0"', over)
    assert judged(tmp_path, ratio, comparison("a", "b", 1.98, 1.95, 1.99)).verdict == NOT_REPRODUCED
    across = judged(tmp_path, ratio, comparison("a", "b", 1.98, 1.95, 2.03)).rows[0].findings[0]
    assert across.verdict == REPRODUCED
    assert "reaches beyond" in across.reason
    exact = row(PUBLISHED, analytic="").replace('"2.0"', over)
    assert judged(tmp_path, exact, record("full", speed=1.999)).verdict == NOT_REPRODUCED
    read_off = exact.replace("bound", 'certainty = "digitised", error = 0.1, bound')
    assert judged(tmp_path, read_off, record("full", speed=1.999)).verdict == REPRODUCED
    assert judged(tmp_path, read_off, record("full", speed=1.89)).verdict == NOT_REPRODUCED


EMULATED = 'emulated = { value = \'compared("s/a", "s/b")\' }'


def on_a_network(name: str, network: EmulatedNetwork | None = NETWORK) -> Record:
    found = record(name, samples_per_s=1.0)
    return changed(found, experiment={**found.conditions, "network": network and asdict(network)})


def test_emulation_decides_over_simulation_and_measurement_over_emulation(tmp_path: Path) -> None:
    twins = [on_a_network("a"), on_a_network("b"), comparison("a", "b", 2.1, 2.05, 2.15)]
    rows = f'{{ label = "x", published = "2.0", {EMULATED}, {SIMULATED} }},\n'
    result = judged(tmp_path, rows, *twins, full_run("simulated", 1.0))
    assert (result.verdict, result.basis) == (REPRODUCED, "emulated 1/1")
    assert len(result.disagreements) == 1
    found = result.kind("emulated")
    assert found is not None
    assert (found.scale, found.reproduced) == ("scaled twin, emulated network", 1)
    assert result.kind("measured") is None
    result = judged(tmp_path, rows, *twins, full_run("measured", 1.0))
    assert (result.verdict, result.basis) == (NOT_REPRODUCED, "measured, published scale 0/1")


def test_reference_twins_decide_until_local_twins_have_run(tmp_path: Path) -> None:
    rows = f'{{ label = "x", published = "2.0", {EMULATED} }},\n'
    twins = (on_a_network("a"), on_a_network("b"), comparison("a", "b", 2.1, 2.05, 2.15))
    file = ReferenceFile("f", "AMD EPYC", "2026-11-28", twins)
    (finding,) = judged(tmp_path, rows, references=[file]).rows[0].findings
    assert (finding.verdict, finding.machine) == (REPRODUCED, "as measured on AMD EPYC, 2026-11-28")
    own = (on_a_network("a"), on_a_network("b"), comparison("a", "b", 1.0, 0.9, 1.1))
    (finding,) = judged(tmp_path, rows, *own, references=[file]).rows[0].findings
    assert (finding.verdict, finding.machine) == (NOT_REPRODUCED, "")


@pytest.mark.parametrize(
    ("kind", "network", "words"), [("measured", NETWORK, "emulated network"), ("emulated", None, "own links")]
)
def test_emulated_network_belongs_to_emulated_evidence_only(
    tmp_path: Path, kind: str, network: EmulatedNetwork | None, words: str
) -> None:
    for value in (
        'compared("s/a", "s/b")',
        'metric("s/a", "samples_per_s") / metric("s/b", "samples_per_s")',
    ):
        rows = f'{{ label = "x", published = "2.0", {kind} = {{ value = \'{value}\' }} }},\n'
        twins = [
            on_a_network("a", network),
            on_a_network("b", network),
            comparison("a", "b", 2.1, 2.05, 2.15),
        ]
        result = judged(tmp_path, rows, *twins)
        assert result.verdict == NOT_RUN
        assert words in result.reason


@pytest.mark.parametrize(
    "line",
    [
        'emulated = { value = \'metric("s/a", "x")\', expect = "3" }',
        'metric = "throughput", emulated = { value = \'metric("s/a", "x")\' }',
    ],
)
def test_emulated_evidence_must_be_a_ratio(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="only ratios"):
        judged(tmp_path, f'{{ label = "x", published = "2.0", {line} }},\n')


def test_records_name_the_training_libraries_of_other_engines() -> None:
    def ran(name: str, engine: str) -> Record:
        model = Model(name="m", layers=4, hidden=16, heads=4, vocab=64, seq=16)
        experiment = Experiment(name=name, model=model, layout=Layout(dp=2, zero=1), engine=engine)
        base = changed(record(name), experiment=experiment.as_dict())
        return changed(base, software={"name": f"{engine} 1", "calls": {}, "kernels": ""})

    records = Records([ran("ours", "native"), ran("theirs", "deepspeed")])
    assert records.libraries(["s/ours", "s/theirs", "s/nobody"]) == ["deepspeed 1"]


def test_ratio_is_measured_only_if_both_sides_ran(tmp_path: Path) -> None:
    value = 'metric("s/a", "speed") / metric("s/b", "speed")'
    rows = f'{{ label = "x", published = "2.0", simulated = {{ value = \'{value}\' }} }},\n'
    one = judged(tmp_path, rows, record("a", speed=2.0))
    assert [finding.kind for finding in one.rows[0].findings] == ["simulated"]
    both = judged(tmp_path, rows, record("a", speed=2.0), record("b", speed=1.0))
    assert [finding.kind for finding in both.rows[0].findings] == ["measured", "simulated"]
