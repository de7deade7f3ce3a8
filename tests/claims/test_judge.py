"""Tests of the judge with constructed records: the deciding evidence, missing evidence, and disagreements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from repro.claims.judge import judge
from repro.claims.ledger import ITSELF
from repro.claims.reader import load_ledger
from repro.claims.table import count_text, summary
from repro.claims.verdicts import (
    DEPENDS,
    ERRATUM,
    FOLLOWS,
    INCONSISTENT,
    NO_TEST,
    NOT_COMPARABLE,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    ClaimResult,
)
from repro.config import PROTOCOL, ConfigError, Experiment, Layout, Model
from repro.results.reference_records import ReferenceFile
from repro.results.schema import Record
from tests.claims.constructed_records import record
from tests.records import changed

HEAD = """
title = "Test"
[[source]]
key = "PAPER"
title = "A paper"
where = "a shelf"
[[claim]]
id = "a-claim"
title = "Twice as fast"
family = "throughput"
published = "2x"
source = ["PAPER p.1"]
certainty = "confirmed"
unit = "x"
metric = "ratio"
needs = "two GPUs"
rows = [
"""
PUBLISHED = '{ value = \'metric("s/full", "speed")\' }'
ONE_RANK = '{ value = \'metric("s/rank", "speed")\', scale = "one rank of 64" }'
TWIN = '{ value = \'metric("s/twin", "speed")\', expect = "3", scale = "scaled twin" }'


def judged(
    tmp_path: Path, rows: str, *records: Record, references: Sequence[ReferenceFile] = ()
) -> ClaimResult:
    (tmp_path / "test.toml").write_text(HEAD + rows + "]\n")
    (result,) = judge(load_ledger(tmp_path), records, references)
    return result


def row(measured: str = "", analytic: str = "flat_buffer_bytes(0.5)", label: str = "x") -> str:
    measured = f", measured = [{measured}]" if measured else ""
    analytic = f', analytic = "{analytic}"' if analytic else ""
    return f'{{ label = "{label}", published = "2.0"{analytic}{measured} }},\n'


def test_formula_decides_a_row_only_without_other_evidence(tmp_path: Path) -> None:
    result = judged(tmp_path, row(f"{TWIN}, {PUBLISHED}"))
    assert (result.verdict, result.basis, result.kinds[0].kind) == (NOT_RUN, "", "measured")
    assert judged(tmp_path, row()).basis == "closed form 1/1"
    measured = [f for f in result.rows[0].findings if f.kind == "measured"]
    assert [f.verdict for f in measured] == [NOT_RUN, NOT_RUN]
    assert measured[0].reason == "s/full: no record; `repro run s.toml`"
    kind = result.kind("measured")
    assert kind is not None
    assert kind.verdict == NOT_RUN


def test_rows_lack_a_test_or_have_not_run(tmp_path: Path) -> None:
    result = judged(tmp_path, row(analytic=""))
    assert (result.verdict, result.reason, result.basis) == (NO_TEST, "two GPUs", "")
    assert judged(tmp_path, row(PUBLISHED, analytic="")).verdict == NOT_RUN


@pytest.mark.parametrize(
    ("names", "basis"),
    [
        (["twin"], "measured, scaled twin 1/1"),
        (["twin", "rank"], "measured, one rank of 64 1/1"),
        (["twin", "rank", "full"], "measured, published scale 1/1"),
    ],
)
def test_strongest_evidence_decides(tmp_path: Path, names: list[str], basis: str) -> None:
    speed = {"twin": 3.0, "rank": 2.0, "full": 2.0}
    records = [record(name, speed=speed[name]) for name in names]
    result = judged(tmp_path, row(f"{TWIN}, {ONE_RANK}, {PUBLISHED}"), *records)
    assert (result.verdict, result.basis, result.disagreements) == (REPRODUCED, basis, ())


def test_weaker_evidence_that_disagrees_is_reported(tmp_path: Path) -> None:
    result = judged(tmp_path, row(PUBLISHED, analytic="dp_elements(7)"), record("full", speed=2.2))
    assert (result.verdict, result.basis) == (REPRODUCED, "measured, published scale 1/1")
    assert result.disagreements == (
        "x: reproduced (measured, published scale), but inconsistent (closed form)",
    )


def test_measurement_decides_against_a_formula(tmp_path: Path) -> None:
    result = judged(tmp_path, row(PUBLISHED), record("full", speed=1.7))
    assert result.verdict == NOT_REPRODUCED
    assert "but follows (closed form)" in result.disagreements[0]


def test_scaled_twin_is_compared_with_formula_at_its_scale(tmp_path: Path) -> None:
    """The published number is 2.0. At the scale of the twin, the formula gives exactly 3."""
    assert judged(tmp_path, row(TWIN, analytic=""), record("twin", speed=3)).verdict == REPRODUCED
    assert judged(tmp_path, row(TWIN, analytic=""), record("twin", speed=2)).verdict == NOT_REPRODUCED
    assert judged(tmp_path, row(TWIN, analytic=""), record("twin", speed=3.001)).verdict == NOT_REPRODUCED


NOISY = '{ value = \'metric("s/twin", "idle")\', expect = "0.25", scale = "scaled twin", metric = "ratio" }'


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (0.26, 0.2, 0.3, REPRODUCED),
        (0.30, 0.2, 0.4, NOT_REPRODUCED),  # the interval does not widen the tolerance
        (0.21, 0.1, 0.3, NOT_REPRODUCED),
    ],
)
def test_measured_point_decides_and_not_its_interval(
    tmp_path: Path, value: float, low: float, high: float, verdict: str
) -> None:
    metrics = {"idle": value, "idle.low": low, "idle.high": high}
    result = judged(tmp_path, row(NOISY, analytic=""), record("twin", **metrics))
    (finding,) = result.rows[0].findings
    assert (finding.verdict, finding.low, finding.high) == (verdict, low, high)


def test_expressions_read_the_conditions_of_an_experiment(tmp_path: Path) -> None:
    experiment = Experiment(
        name="twin",
        model=Model(name="m", layers=4, hidden=16, heads=4, vocab=64, seq=16),
        layout=Layout(pp=2, dp=2, global_batch=8),
    )

    twin_record = changed(record("twin", speed=1), experiment=experiment.as_dict())

    def verdict(name: str, expected: str) -> tuple[str, str]:
        value = f'metric("s/twin", "speed") * setting("s/twin", "{name}")'
        twin = f'{{ value = \'{value}\', expect = "{expected}", scale = "scaled twin" }}'
        result = judged(tmp_path, row(twin, analytic=""), twin_record)
        return result.verdict, result.rows[0].reason

    assert verdict("layout.pp", "2")[0] == REPRODUCED
    assert verdict("layout.accumulation", "4")[0] == REPRODUCED
    assert verdict("seq", "16")[0] == REPRODUCED
    for wrong in ("layout.order", "layout.nothing", "__class__.__name__"):
        assert verdict(wrong, "4")[0] == NOT_RUN
        assert f"the experiment's conditions have no number {wrong}" in verdict(wrong, "4")[1]


def test_one_contradicted_row_makes_the_claim_inconsistent(tmp_path: Path) -> None:
    rows = row(label="a") + row(label="b") + row(label="c", analytic="dp_elements(9)")
    result = judged(tmp_path, rows)
    assert (result.verdict, result.basis) == (INCONSISTENT, "closed form 2/3")


def test_claim_with_a_row_without_evidence_has_no_test(tmp_path: Path) -> None:
    result = judged(tmp_path, row(label="a") + row(label="b", analytic=""))
    assert (result.verdict, result.basis) == (NO_TEST, "closed form 1/1; 1 no test")


def test_row_with_two_measurements_needs_both_records(tmp_path: Path) -> None:
    both = f"{PUBLISHED}, {PUBLISHED.replace('s/full', 's/other')}"
    half = judged(tmp_path, row(both), record("full", speed=2))
    assert (half.verdict, half.basis) == (NOT_RUN, "")
    counted = half.kind("measured")
    assert counted is not None
    assert (counted.verdict, counted.rows, counted.decided) == (NOT_RUN, 1, 0)
    mixed = judged(tmp_path, row(both), record("full", speed=2), record("other", speed=5)).kind("measured")
    assert mixed is not None
    assert (mixed.verdict, mixed.decided, mixed.reproduced) == (NOT_REPRODUCED, 1, 0)
    assert judged(tmp_path, row(both), record("full", speed=5)).verdict == NOT_REPRODUCED
    full = judged(tmp_path, row(both), record("full", speed=2), record("other", speed=2))
    assert full.basis == "measured, published scale 1/1"


def test_newest_conclusive_record_decides(tmp_path: Path) -> None:
    old = record("full", speed=2.0, written="2026-01-01T00:00:00Z")
    new = record("full", speed=1.0, written="2026-01-02T00:00:00Z")
    hang = record("full", outcome="hang", written="2026-01-03T00:00:00Z")
    assert judged(tmp_path, row(PUBLISHED), new, hang, old).verdict == NOT_REPRODUCED
    assert judged(tmp_path, row(PUBLISHED), hang).rows[0].findings[0].reason.startswith("s/full: ended hang")


def test_records_of_another_protocol_or_kind_are_ignored(tmp_path: Path) -> None:
    other = changed(record("full", speed=1.0), protocol=PROTOCOL + 1)
    simulated = changed(record("full", speed=1.0), evidence="simulated")
    assert judged(tmp_path, row(PUBLISHED), other, simulated).verdict == NOT_RUN


def test_reason_names_the_missing_metric(tmp_path: Path) -> None:
    result = judged(tmp_path, row(PUBLISHED, analytic=""), record("full", pace=1))
    assert result.verdict == NOT_RUN
    assert "has no metric speed" in result.rows[0].findings[0].reason


def test_out_of_memory_decides_a_claim_about_memory(tmp_path: Path) -> None:
    rows = (
        '{ label = "fails", published = "oom", measured = '
        '{ value = \'outcome("s/big")\', expect = \'"oom"\', scale = "scaled twin" } },\n'
    )
    assert judged(tmp_path, rows, record("big", outcome="oom")).verdict == REPRODUCED
    assert judged(tmp_path, rows, record("big")).verdict == NOT_REPRODUCED
    assert judged(tmp_path, rows, record("big", outcome="timeout")).verdict == NOT_RUN
    metric = judged(tmp_path, row(PUBLISHED, analytic=""), record("full", outcome="oom"))
    assert "ended oom: rank 1 ran out of memory" in metric.rows[0].findings[0].reason


QUALITY = '{ label = "q", published = "good", not_comparable = "no weights" },\n'


def test_claim_with_an_incomparable_row_is_not_comparable(tmp_path: Path) -> None:
    """An incomparable row counts, so a test of the other rows alone does not make the claim reproduced."""
    result = judged(tmp_path, row() + QUALITY)
    assert (result.verdict, result.basis, result.reason) == (
        NOT_COMPARABLE,
        "closed form 1/1; 1 not comparable",
        "no weights",
    )
    alone = judged(tmp_path, QUALITY)
    assert (alone.verdict, alone.reason) == (NOT_COMPARABLE, "no weights")


def main_row(line: str) -> str:
    return line.replace("{ ", "{ main = true, ", 1)


def test_main_rows_alone_decide_the_verdict_of_a_claim(tmp_path: Path) -> None:
    """Other rows neither support nor contradict the claim, but they are judged and displayed."""
    good, bad, open_ = (
        row(label="a"),
        row(label="b", analytic="dp_elements(9)"),
        row(label="c", analytic=""),
    )
    assert judged(tmp_path, main_row(good) + bad + open_ + QUALITY).verdict == FOLLOWS
    assert judged(tmp_path, good + main_row(bad)).basis == "closed form 0/1"
    assert judged(tmp_path, good + main_row(bad)).verdict == INCONSISTENT
    assert judged(tmp_path, good + main_row(open_)).verdict == NO_TEST
    assert judged(tmp_path, good + main_row(QUALITY)).verdict == NOT_COMPARABLE
    result = judged(tmp_path, main_row(good) + bad)
    kind = result.kind(ITSELF)
    assert kind is not None
    assert (kind.verdict, kind.reproduced, kind.rows) == (FOLLOWS, 1, 1), "main rows only"
    assert [row.verdict for row in result.rows] == [FOLLOWS, INCONSISTENT], "all rows"
    assert count_text(result, ITSELF) == "1/1"
    assert summary([result])["against_itself"]["rows_decided"] == 2, "all rows"
    result = judged(tmp_path, main_row(good) + row(PUBLISHED), record("full", speed=9.0))
    assert result.kind("measured") is None


@pytest.mark.parametrize(
    "analytic", ["2", "4 / 2", "printed('2')", "dp_elements(printed('1'))", "flat_buffer_bytes(0.5)"]
)
def test_arithmetic_of_the_source_never_reproduces_a_claim(tmp_path: Path, analytic: str) -> None:
    """Formulas and printed numbers of the source show only that the source is consistent."""
    result = judged(tmp_path, row(analytic=analytic))
    origin = "closed form" if "flat" in analytic else "the source against itself"
    assert (result.verdict, result.basis) == (FOLLOWS, f"{origin} 1/1")
    assert result.kind("analytic") is None
    assert judged(tmp_path, row(analytic=f"3 + {analytic}")).verdict == INCONSISTENT


def test_given_row_is_not_reproduced_by_its_measurement(tmp_path: Path) -> None:
    given = row(PUBLISHED, analytic="").replace("{ ", '{ given = "the batch", ', 1)
    result = judged(tmp_path, given, record("full", speed=2.0))
    assert (result.verdict, result.reason) == (FOLLOWS, "the batch")
    assert result.kind("measured") is None
    assert judged(tmp_path, given, record("full", speed=3.0)).verdict == INCONSISTENT


def test_consistency_check_does_not_replace_a_missing_measurement(tmp_path: Path) -> None:
    assert judged(tmp_path, row(PUBLISHED, analytic="2")).verdict == NOT_RUN
    assert judged(tmp_path, row(PUBLISHED, analytic="3")).verdict == INCONSISTENT
    result = judged(tmp_path, row(PUBLISHED, analytic="3"), record("full", speed=2.0))
    assert (result.verdict, len(result.disagreements)) == (REPRODUCED, 1)
    both = judged(tmp_path, row(PUBLISHED, analytic="2") + row(PUBLISHED, analytic="3", label="y"))
    own = both.kind(ITSELF)
    assert own is not None
    assert (own.reproduced, own.rows, both.basis) == (1, 2, "the source against itself 0/1; 1 not run")


READINGS = (
    '{ reading = "wide", value = \'metric("s/full", "speed")\' }, '
    '{ reading = "narrow", value = \'metric("s/rank", "speed")\' }'
)


@pytest.mark.parametrize(
    ("wide", "narrow", "verdict"),
    [(2.0, 2.0, REPRODUCED), (2.0, 5.0, DEPENDS), (5.0, 2.0, DEPENDS), (5.0, 5.0, NOT_REPRODUCED)],
)
def test_verdict_depends_where_readings_of_a_condition_disagree(
    tmp_path: Path, wide: float, narrow: float, verdict: str
) -> None:
    result = judged(tmp_path, row(READINGS), record("full", speed=wide), record("rank", speed=narrow))
    assert result.verdict == verdict
    assert ("wide: " in result.rows[0].reason) == (verdict == DEPENDS)
    assert judged(tmp_path, row(READINGS), record("full", speed=wide)).verdict in (NOT_RUN, NOT_REPRODUCED)


def test_erratum_row_has_the_verdict_erratum_until_measured(tmp_path: Path) -> None:
    line = row(PUBLISHED, analytic="dp_elements(9)").replace("{ ", '{ erratum = "9 is printed on p.2", ', 1)
    result = judged(tmp_path, line)
    assert (result.verdict, result.reason) == (ERRATUM, "9 is printed on p.2")
    assert judged(tmp_path, line, record("full", speed=5.0)).verdict == NOT_REPRODUCED


def test_claim_of_three_parts_needs_three_main_rows(tmp_path: Path) -> None:
    """One main row must not reproduce a claim such as "17B; twice; ten times"."""
    head = HEAD.replace('published = "2x"', 'published = "2x; 3x; 4x"')
    lines = main_row(row(label="a")) + row(label="b") + row(label="c")
    (tmp_path / "test.toml").write_text(head + lines + "]\n")
    with pytest.raises(ConfigError, match="true in 3 or more rows"):
        load_ledger(tmp_path)


def test_rows_of_one_sentence_read_the_same_simulations(tmp_path: Path) -> None:
    simulated = '{ label = "%s", sentence = "one", published = "2", simulated = { value = \'metric("s/%s", "v")\' } },'
    assert judged(tmp_path, simulated % ("x", "a") + simulated % ("y", "a")).verdict == NOT_RUN
    with pytest.raises(
        ConfigError, match="a-claim tests with the same simulations; simulations that differ: s/a, s/b"
    ):
        judged(tmp_path, simulated % ("x", "a") + simulated % ("y", "b"))


@pytest.mark.parametrize(
    ("value", "unit", "published"),
    [
        ('setting("s/full", "layout.tp")', "", "4"),
        ('512 / setting("s/full", "layout.tp")', "GPUs", "128"),
        ('parameters("s/full")', "parameters", "1.5B"),
        ('metric("s/full", "speed") / metric("s/full", "speed") * 38e12', "TFLOP/s", "38"),
        ('metric("s/full", "speed") * 0 + 16', "x", "16"),
    ],
)
def test_evidence_that_repeats_an_input_must_be_given(
    tmp_path: Path, value: str, unit: str, published: str
) -> None:
    rows = f'{{ label = "x", published = "{published}", unit = "{unit}", measured = {{ value = \'{value}\' }} }},\n'
    with pytest.raises(ConfigError, match="the input that contains the published answer"):
        judged(tmp_path, rows)
    assert judged(tmp_path, rows.replace("{ ", '{ given = "the suite", ', 1)).verdict == NOT_RUN
