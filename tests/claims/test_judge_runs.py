"""The judge on runs: which kind of evidence goes before which, and ratios of members that took turns."""

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


def test_noise_does_not_help_a_measured_ratio(tmp_path: Path) -> None:
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


def at(kind: str, speed: float, outcome: str = "ok") -> dict[str, Any]:
    return changed(record("full", outcome=outcome, speed=speed), evidence=kind)


def test_who_runs_a_simulated_experiment_measures_its_claim(tmp_path: Path) -> None:
    """The run at published scale speaks, and the simulation that disagrees stays in sight."""
    result = judged(tmp_path, simulated_row(), at("simulated", 2.0), at("measured", 1.0))
    assert (result.verdict, result.basis) == (NOT_REPRODUCED, "measured, published scale 0/1")
    assert len(result.disagreements) == 1
    result = judged(tmp_path, simulated_row(), at("simulated", 1.0), at("measured", 2.0))
    assert (result.verdict, result.basis) == (REPRODUCED, "measured, published scale 1/1")


def test_a_simulated_experiment_that_nobody_ran_or_that_failed_is_no_measurement(tmp_path: Path) -> None:
    result = judged(tmp_path, simulated_row(), at("simulated", 2.0))
    assert result.basis == "simulated 1/1"
    assert result.kind("measured") is None
    result = judged(tmp_path, simulated_row(), at("simulated", 2.0), at("measured", 2.0, "oom"))
    assert result.basis == "simulated 1/1"
    (finding,) = (f for f in result.rows[0].findings if f.kind == "measured")
    assert (finding.verdict, finding.scale) == (NOT_RUN, "published scale")
    assert "ended oom" in finding.reason


def test_evidence_of_its_own_goes_before(tmp_path: Path) -> None:
    """A row that says how its measurement is read is not read another way as well."""
    rows = f'{{ label = "x", published = "2.0", {SIMULATED}, measured = [{PUBLISHED}] }},\n'
    result = judged(tmp_path, rows, at("simulated", 2.0), at("measured", 2.0))
    assert [f.kind for f in result.rows[0].findings] == ["measured", "simulated"]


def test_a_ratio_of_two_that_took_turns_is_that_of_their_turns(tmp_path: Path) -> None:
    """Before, it was one record over another, of any two days, without an interval."""
    value = 'metric("s/a", "samples_per_s") / metric("s/b", "samples_per_s")'
    rows = f'{{ label = "x", published = "2.0", simulated = {{ value = \'{value}\' }} }},\n'
    apart = [record("a", samples_per_s=9.0), record("b", samples_per_s=1.0)]
    assert judged(tmp_path, rows, *apart).verdict == NOT_REPRODUCED
    result = judged(tmp_path, rows, *apart, comparison("a", "b", 2.1, 2.05, 2.15))
    finding = result.rows[0].findings[0]
    assert (result.verdict, result.basis) == (REPRODUCED, "measured, published scale 1/1")
    assert (finding.low, finding.high, finding.experiments) == (2.05, 2.15, ("s/a", "s/b"))


def test_an_interval_of_the_evidence_widens_a_bound_and_nothing_else_does(tmp_path: Path) -> None:
    """Before, the measured point alone decided at a bound as well."""
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


def test_what_ran_on_an_emulated_network_goes_before_a_simulation_and_after_a_measurement(
    tmp_path: Path,
) -> None:
    twins = [on_a_network("a"), on_a_network("b"), comparison("a", "b", 2.1, 2.05, 2.15)]
    rows = f'{{ label = "x", published = "2.0", {EMULATED}, {SIMULATED} }},\n'
    result = judged(tmp_path, rows, *twins, at("simulated", 1.0))
    assert (result.verdict, result.basis) == (REPRODUCED, "emulated 1/1")
    assert len(result.disagreements) == 1
    found = result.kind("emulated")
    assert found is not None
    assert (found.scale, found.reproduced) == ("scaled twin, emulated network", 1)
    assert result.kind("measured") is None
    result = judged(tmp_path, rows, *twins, at("measured", 1.0))
    assert (result.verdict, result.basis) == (NOT_REPRODUCED, "measured, published scale 0/1")


def test_twins_of_another_machine_decide_until_own_twins_ran(tmp_path: Path) -> None:
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
def test_an_emulated_network_is_never_taken_for_another_kind_of_evidence(
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
def test_only_ratios_come_from_an_emulated_network(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="only ratios"):
        judged(tmp_path, f'{{ label = "x", published = "2.0", {line} }},\n')


def test_whose_software_measured_is_said_where_it_is_not_this_suites() -> None:
    def ran(name: str, engine: str) -> Record:
        model = Model(name="m", layers=4, hidden=16, heads=4, vocab=64, seq=16)
        experiment = Experiment(name=name, model=model, layout=Layout(dp=2, zero=1), engine=engine)
        by = changed(record(name), experiment=experiment.as_dict())
        return changed(by, software={"name": f"{engine} 1", "calls": {}, "kernels": ""})

    seen = Records([ran("ours", "native"), ran("theirs", "deepspeed")])
    assert seen.libraries(["s/ours", "s/theirs", "s/nobody"]) == ["deepspeed 1"]


def test_a_ratio_of_which_one_side_was_run_is_not_measured(tmp_path: Path) -> None:
    value = 'metric("s/a", "speed") / metric("s/b", "speed")'
    rows = f'{{ label = "x", published = "2.0", simulated = {{ value = \'{value}\' }} }},\n'
    one = judged(tmp_path, rows, record("a", speed=2.0))
    assert [finding.kind for finding in one.rows[0].findings] == ["simulated"]
    both = judged(tmp_path, rows, record("a", speed=2.0), record("b", speed=1.0))
    assert [finding.kind for finding in both.rows[0].findings] == ["measured", "simulated"]
