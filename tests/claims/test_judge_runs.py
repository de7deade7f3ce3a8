"""Tests of the judge with runs: the order of the kinds of evidence, interleaved experiments, and loss curves."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from repro.claims.independence import QuantityCounts, count_independent
from repro.claims.records import Records
from repro.claims.verdicts import NOT_REPRODUCED, NOT_RUN, REPRODUCED
from repro.config import ConfigError, EmulatedNetwork, Layout
from repro.results.record_parts import StepSeries
from repro.results.reference_records import ReferenceFile
from repro.results.schema import ExperimentRecord, Record
from tests.claims.constructed_records import RATIO, comparison, conditions, judged, record, row, value
from tests.records import changed

NETWORK = EmulatedNetwork(nodes=2, ranks_per_node=2, between=1e6)
COMPARED = value('compared("s/a", "s/b")')
SPEED = value('metric("s/full", "speed")')


def full_run(kind: str, speed: float, outcome: str = "ok") -> ExperimentRecord:
    return changed(record("full", outcome=outcome, speed=speed), evidence=kind)


def test_interval_of_a_measured_ratio_widens_a_bound_only(tmp_path: Path) -> None:
    for bound, ends, verdict, is_across, shown in (
        ("", ("a", "b", 2.1, 2.05, 2.15), REPRODUCED, False, 2.1),
        ("", ("a", "b", 1.5, 0.5, 4.0), NOT_REPRODUCED, True, 1.5),  # the tolerance is not widened
        ("", ("a", "b", 2.1, 1.0, 4.0), REPRODUCED, True, 2.1),
        ("", ("b", "a", 0.5, 0.48, 0.52), REPRODUCED, False, 2.0),
        ("over", ("a", "b", 1.98, 1.95, 1.99), NOT_REPRODUCED, False, 1.98),
        ("over", ("a", "b", 1.98, 1.95, 2.03), REPRODUCED, True, 1.98),
    ):
        rows = row(bound=f'"{bound}"', measured=COMPARED)
        (finding,) = judged(tmp_path, rows, comparison(*ends)).rows[0].findings  # type: ignore[arg-type]
        assert (finding.verdict, finding.value) == (verdict, shown)
        assert ("reaches beyond" in finding.reason) == is_across


def test_run_of_a_simulated_experiment_is_a_measurement(tmp_path: Path) -> None:
    """The run at published scale decides, and the disagreement of the simulation is reported."""
    rows = row(simulated=SPEED)
    result = judged(tmp_path, rows, full_run("simulated", 2.0), full_run("measured", 1.0))
    assert (result.verdict, result.basis) == (NOT_REPRODUCED, "measured, published scale 0/1")
    assert len(result.disagreements) == 1
    result = judged(tmp_path, rows, full_run("simulated", 1.0), full_run("measured", 2.0))
    assert (result.verdict, result.basis) == (REPRODUCED, "measured, published scale 1/1")
    result = judged(tmp_path, rows, full_run("simulated", 2.0))
    assert (result.basis, result.kind("measured")) == ("simulated 1/1", None)
    result = judged(tmp_path, rows, full_run("simulated", 2.0), full_run("measured", 2.0, "oom"))
    assert result.basis == "simulated 1/1"
    (failed,) = (finding for finding in result.rows[0].findings if finding.kind == "measured")
    assert (failed.verdict, failed.scale) == (NOT_RUN, "published scale")
    assert failed.reason.startswith("s/full: ended oom: rank 1 ran out of memory")
    # A row with a measured expression does not evaluate its simulated expression on measured records.
    both = judged(
        tmp_path, row(simulated=SPEED, measured=SPEED), full_run("simulated", 2.0), full_run("measured", 2.0)
    )
    assert [finding.kind for finding in both.rows[0].findings] == ["measured", "simulated"]


def test_ratio_of_interleaved_experiments_comes_from_their_comparison(tmp_path: Path) -> None:
    """Records of both sides decide only without a comparison record, which has an interval."""
    rows = row(simulated=value(RATIO))
    separate = [record("a", samples_per_s=9.0), record("b", samples_per_s=1.0)]
    one_side = judged(tmp_path, rows, separate[0])
    assert [finding.kind for finding in one_side.rows[0].findings] == ["simulated"]
    assert judged(tmp_path, rows, *separate).verdict == NOT_REPRODUCED
    result = judged(tmp_path, rows, *separate, comparison("a", "b", 2.1, 2.05, 2.15))
    finding = result.rows[0].findings[0]
    assert (result.verdict, result.basis) == (REPRODUCED, "measured, published scale 1/1")
    assert (finding.low, finding.high, finding.experiments) == (2.05, 2.15, ("s/a", "s/b"))


def twins(network: EmulatedNetwork | None, *ratio: float) -> list[Record]:
    runs = [record(name, samples_per_s=1.0) for name in "ab"]
    on_network = {**runs[0].conditions, "network": network and asdict(network)}
    return [*(changed(run, experiment=on_network) for run in runs), comparison("a", "b", *ratio)]


def test_emulation_decides_over_simulation_and_measurement_over_emulation(tmp_path: Path) -> None:
    rows, runs = row(emulated=COMPARED, simulated=SPEED), twins(NETWORK, 2.1, 2.05, 2.15)
    result = judged(tmp_path, rows, *runs, full_run("simulated", 1.0))
    assert (result.verdict, result.basis) == (REPRODUCED, "emulated 1/1")
    assert (len(result.disagreements), result.kind("measured")) == (1, None)
    found = result.kind("emulated")
    assert found is not None
    assert (found.scale, found.reproduced) == ("scaled twin, emulated network", 1)
    result = judged(tmp_path, rows, *runs, full_run("measured", 1.0))
    assert (result.verdict, result.basis) == (NOT_REPRODUCED, "measured, published scale 0/1")


def test_reference_twins_decide_until_local_twins_have_run(tmp_path: Path) -> None:
    rows = row(emulated=COMPARED)
    file = ReferenceFile("f", "AMD EPYC", "2026-11-28", tuple(twins(NETWORK, 2.1, 2.05, 2.15)))
    (finding,) = judged(tmp_path, rows, references=[file]).rows[0].findings
    assert (finding.verdict, finding.machine) == (REPRODUCED, "as measured on AMD EPYC, 2026-11-28")
    (finding,) = judged(tmp_path, rows, *twins(NETWORK, 1.0, 0.9, 1.1), references=[file]).rows[0].findings
    assert (finding.verdict, finding.machine) == (NOT_REPRODUCED, "")


@pytest.mark.parametrize("evidence", [COMPARED, value(RATIO)])
@pytest.mark.parametrize(
    ("kind", "network", "words"), [("measured", NETWORK, "emulated network"), ("emulated", None, "own links")]
)
def test_emulated_network_belongs_to_emulated_evidence_only(
    tmp_path: Path, kind: str, network: EmulatedNetwork | None, words: str, evidence: str
) -> None:
    result = judged(tmp_path, row(**{kind: evidence}), *twins(network, 2.1, 2.05, 2.15))
    assert result.verdict == NOT_RUN
    assert words in result.reason


def test_emulated_evidence_must_be_a_ratio(tmp_path: Path) -> None:
    expected, rate = value('metric("s/a", "x")', 'expect = "3"'), value('metric("s/a", "x")')
    for rows in (row(emulated=expected), row(metric='"throughput"', emulated=rate)):
        with pytest.raises(ConfigError, match="only ratios"):
            judged(tmp_path, rows)


def test_records_name_the_training_libraries_of_other_engines() -> None:
    runs = []
    for engine in ("native", "deepspeed"):
        software = {"name": f"{engine} 1", "calls": {}, "kernels": ""}
        experiment = conditions(Layout(dp=2, zero=1), engine=engine)
        runs.append(changed(record(engine), experiment=experiment, software=software))
    assert Records(runs).libraries(["s/native", "s/deepspeed", "s/nobody"]) == ["deepspeed 1"]


STRAYED, APART = value('strayed("s/a", "s/one", "s/order")'), value('apart("s/a", "s/one")')
CURVE_ROWS = row("3", bound='"at most"', measured=STRAYED)
CURVE_ROWS += row("1", "y", bound='"at most"', unit='"%"', measured=APART)
"""Rows about the distance of a loss curve from the curve s/one, and about the distance of their final losses."""


def curve(name: str, relative: float, steps: int = 100, outcome: str = "ok") -> ExperimentRecord:
    losses: list[float | None] = [2.0 * (1 + relative)] * steps
    return replace(record(name, outcome=outcome), series=StepSeries(loss=losses))


def test_loss_curve_strays_at_most_three_times_the_controls(tmp_path: Path) -> None:
    """Two comparisons of one curve are one independent quantity."""
    for relative, verdicts in (
        (2.9e-6, [REPRODUCED, REPRODUCED]),
        (3.1e-6, [NOT_REPRODUCED, REPRODUCED]),
        (-0.02, [NOT_REPRODUCED, NOT_REPRODUCED]),
    ):
        result = judged(tmp_path, CURVE_ROWS, curve("one", 0), curve("order", 1e-6), curve("a", relative))
        assert [row.verdict for row in result.rows] == verdicts
        held = int(verdicts == [REPRODUCED, REPRODUCED])
        assert count_independent([result])["measured"] == QuantityCounts(1, held)


def test_curves_without_comparable_losses_are_not_run(tmp_path: Path) -> None:
    for wrong, reason, is_final_known in (
        (curve("a", 0, steps=99), "the losses of all steps", True),
        (curve("a", 0, steps=49), "the losses of all steps", False),
        (record("a"), "the experiment's record has no losses", False),
        (curve("a", 0, outcome="diverged"), "ended diverged", False),
    ):
        strayed, apart = judged(tmp_path, CURVE_ROWS, curve("one", 0), curve("order", 1e-6), wrong).rows
        assert (strayed.verdict, apart.verdict) == (NOT_RUN, REPRODUCED if is_final_known else NOT_RUN)
        assert reason in strayed.reason
