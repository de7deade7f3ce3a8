"""The judge on made-up records: which evidence speaks, what is missing, and what disagrees."""

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


def test_without_records_a_formula_decides_only_where_no_test_exists(tmp_path: Path) -> None:
    result = judged(tmp_path, row(f"{TWIN}, {PUBLISHED}"))
    assert (result.verdict, result.basis, result.kinds[0].kind) == (NOT_RUN, "", "measured")
    assert judged(tmp_path, row()).basis == "closed form 1/1"
    measured = [f for f in result.rows[0].findings if f.kind == "measured"]
    assert [f.verdict for f in measured] == [NOT_RUN, NOT_RUN]
    assert measured[0].reason == "s/full: no record; `repro run s.toml`"
    kind = result.kind("measured")
    assert kind is not None
    assert kind.verdict == NOT_RUN


def test_a_row_without_any_evidence_is_no_test_and_one_without_records_is_not_run(tmp_path: Path) -> None:
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
def test_the_strongest_evidence_speaks(tmp_path: Path, names: list[str], basis: str) -> None:
    speed = {"twin": 3.0, "rank": 2.0, "full": 2.0}
    records = [record(name, speed=speed[name]) for name in names]
    result = judged(tmp_path, row(f"{TWIN}, {ONE_RANK}, {PUBLISHED}"), *records)
    assert (result.verdict, result.basis, result.disagreements) == (REPRODUCED, basis, ())


def test_a_weaker_kind_that_disagrees_is_shown(tmp_path: Path) -> None:
    result = judged(tmp_path, row(PUBLISHED, analytic="dp_elements(7)"), record("full", speed=2.2))
    assert (result.verdict, result.basis) == (REPRODUCED, "measured, published scale 1/1")
    assert result.disagreements == (
        "x: reproduced (measured, published scale), but inconsistent (closed form)",
    )


def test_a_measurement_overrules_the_formula(tmp_path: Path) -> None:
    result = judged(tmp_path, row(PUBLISHED), record("full", speed=1.7))
    assert result.verdict == NOT_REPRODUCED
    assert "but follows (closed form)" in result.disagreements[0]


def test_a_twin_is_compared_with_the_formula_at_its_own_scale(tmp_path: Path) -> None:
    """The published number is 2.0; the formula says 3 at the twin's scale, and exactly."""
    assert judged(tmp_path, row(TWIN, analytic=""), record("twin", speed=3)).verdict == REPRODUCED
    assert judged(tmp_path, row(TWIN, analytic=""), record("twin", speed=2)).verdict == NOT_REPRODUCED
    assert judged(tmp_path, row(TWIN, analytic=""), record("twin", speed=3.001)).verdict == NOT_REPRODUCED


NOISY = '{ value = \'metric("s/twin", "idle")\', expect = "0.25", scale = "scaled twin", metric = "ratio" }'


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (0.26, 0.2, 0.3, REPRODUCED),
        (0.30, 0.2, 0.4, NOT_REPRODUCED),  # a wide interval is no help
        (0.21, 0.1, 0.3, NOT_REPRODUCED),
    ],
)
def test_a_metric_brings_its_interval_and_the_point_decides(
    tmp_path: Path, value: float, low: float, high: float, verdict: str
) -> None:
    metrics = {"idle": value, "idle.low": low, "idle.high": high}
    result = judged(tmp_path, row(NOISY, analytic=""), record("twin", **metrics))
    (finding,) = result.rows[0].findings
    assert (finding.verdict, finding.low, finding.high) == (verdict, low, high)


def test_the_conditions_of_an_experiment_may_be_read(tmp_path: Path) -> None:
    experiment = Experiment(
        name="twin",
        model=Model(name="m", layers=4, hidden=16, heads=4, vocab=64, seq=16),
        layout=Layout(pp=2, dp=2, global_batch=8),
    )

    made = changed(record("twin", speed=1), experiment=experiment.as_dict())

    def verdict(name: str, expected: str) -> tuple[str, str]:
        value = f'metric("s/twin", "speed") * setting("s/twin", "{name}")'
        twin = f'{{ value = \'{value}\', expect = "{expected}", scale = "scaled twin" }}'
        result = judged(
            tmp_path,
            row(twin, analytic=""),
            made,
        )
        return result.verdict, result.rows[0].reason

    assert verdict("layout.pp", "2")[0] == REPRODUCED
    assert verdict("layout.accumulation", "4")[0] == REPRODUCED
    assert verdict("seq", "16")[0] == REPRODUCED
    for wrong in ("layout.order", "layout.nothing", "__class__.__name__"):
        assert verdict(wrong, "4")[0] == NOT_RUN
        assert f"the experiment's conditions have no number {wrong}" in verdict(wrong, "4")[1]


def test_one_row_that_fails_fails_the_claim_and_is_counted(tmp_path: Path) -> None:
    rows = row(label="a") + row(label="b") + row(label="c", analytic="dp_elements(9)")
    result = judged(tmp_path, rows)
    assert (result.verdict, result.basis) == (INCONSISTENT, "closed form 2/3")


def test_one_row_without_evidence_keeps_the_claim_open(tmp_path: Path) -> None:
    result = judged(tmp_path, row(label="a") + row(label="b", analytic=""))
    assert (result.verdict, result.basis) == (NO_TEST, "closed form 1/1; 1 no test")


def test_two_measurements_of_one_row_must_both_be_there(tmp_path: Path) -> None:
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


def test_the_newest_conclusive_record_counts(tmp_path: Path) -> None:
    old = record("full", speed=2.0, written="2026-01-01T00:00:00Z")
    new = record("full", speed=1.0, written="2026-01-02T00:00:00Z")
    hang = record("full", outcome="hang", written="2026-01-03T00:00:00Z")
    assert judged(tmp_path, row(PUBLISHED), new, hang, old).verdict == NOT_REPRODUCED
    assert judged(tmp_path, row(PUBLISHED), hang).rows[0].findings[0].reason.startswith("s/full: ended hang")


def test_another_protocol_or_kind_of_evidence_does_not_count(tmp_path: Path) -> None:
    other = changed(record("full", speed=1.0), protocol=PROTOCOL + 1)
    simulated = changed(record("full", speed=1.0), evidence="simulated")
    assert judged(tmp_path, row(PUBLISHED), other, simulated).verdict == NOT_RUN


def test_a_missing_metric_is_named(tmp_path: Path) -> None:
    result = judged(tmp_path, row(PUBLISHED, analytic=""), record("full", pace=1))
    assert result.verdict == NOT_RUN
    assert "has no metric speed" in result.rows[0].findings[0].reason


def test_out_of_memory_is_evidence(tmp_path: Path) -> None:
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


def test_rows_that_cannot_be_compared_do_not_vanish(tmp_path: Path) -> None:
    """Before, they left the count, and a claim whose easy half was tested was reproduced."""
    result = judged(tmp_path, row() + QUALITY)
    assert (result.verdict, result.basis, result.reason) == (
        NOT_COMPARABLE,
        "closed form 1/1; 1 not comparable",
        "no weights",
    )
    alone = judged(tmp_path, QUALITY)
    assert (alone.verdict, alone.reason) == (NOT_COMPARABLE, "no weights")


def main(line: str) -> str:
    return line.replace("{ ", "{ main = true, ", 1)


def test_the_rows_that_are_the_claim_carry_it(tmp_path: Path) -> None:
    """Before, every row was as good as any other: one that is easily met made up for nothing, and failed nothing."""
    good, bad, open_ = (
        row(label="a"),
        row(label="b", analytic="dp_elements(9)"),
        row(label="c", analytic=""),
    )
    assert judged(tmp_path, main(good) + bad + open_ + QUALITY).verdict == FOLLOWS
    assert judged(tmp_path, good + main(bad)).basis == "closed form 0/1"
    assert judged(tmp_path, good + main(bad)).verdict == INCONSISTENT
    assert judged(tmp_path, good + main(open_)).verdict == NO_TEST
    assert judged(tmp_path, good + main(QUALITY)).verdict == NOT_COMPARABLE
    result = judged(tmp_path, main(good) + bad)
    kind = result.kind(ITSELF)
    assert kind is not None
    assert (kind.verdict, kind.reproduced, kind.rows) == (FOLLOWS, 1, 1), "not what is beside it"
    assert [row.verdict for row in result.rows] == [FOLLOWS, INCONSISTENT], "but is judged and shown"
    assert count_text(result, ITSELF) == "1/1"
    assert summary([result])["against_itself"]["rows_decided"] == 2, "and is one of all values"
    assert judged(tmp_path, main(good) + row(PUBLISHED), record("full", speed=9.0)).kind("measured") is None


@pytest.mark.parametrize(
    "analytic", ["2", "4 / 2", "printed('2')", "dp_elements(printed('1'))", "flat_buffer_bytes(0.5)"]
)
def test_a_source_is_consistent_with_itself_and_never_reproduced(tmp_path: Path, analytic: str) -> None:
    """Before, arithmetic on the source's own numbers made a claim reproduced."""
    result = judged(tmp_path, row(analytic=analytic))
    origin = "closed form" if "flat" in analytic else "the source against itself"
    assert (result.verdict, result.basis) == (FOLLOWS, f"{origin} 1/1")
    assert result.kind("analytic") is None
    assert judged(tmp_path, row(analytic=f"3 + {analytic}")).verdict == INCONSISTENT


def test_what_was_put_in_does_not_come_out_as_evidence(tmp_path: Path) -> None:
    given = row(PUBLISHED, analytic="").replace("{ ", '{ given = "the batch", ', 1)
    result = judged(tmp_path, given, record("full", speed=2.0))
    assert (result.verdict, result.reason) == (FOLLOWS, "the batch")
    assert result.kind("measured") is None
    assert judged(tmp_path, given, record("full", speed=3.0)).verdict == INCONSISTENT


def test_a_test_that_has_not_run_is_not_replaced_by_a_check_of_consistency(tmp_path: Path) -> None:
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
def test_readings_of_a_condition_that_is_not_printed_must_agree(
    tmp_path: Path, wide: float, narrow: float, verdict: str
) -> None:
    result = judged(tmp_path, row(READINGS), record("full", speed=wide), record("rank", speed=narrow))
    assert result.verdict == verdict
    assert ("wide: " in result.rows[0].reason) == (verdict == DEPENDS)
    assert judged(tmp_path, row(READINGS), record("full", speed=wide)).verdict in (NOT_RUN, NOT_REPRODUCED)


def test_an_erratum_is_a_number_that_its_source_corrects(tmp_path: Path) -> None:
    line = row(PUBLISHED, analytic="dp_elements(9)").replace("{ ", '{ erratum = "9 is printed on p.2", ', 1)
    result = judged(tmp_path, line)
    assert (result.verdict, result.reason) == (ERRATUM, "9 is printed on p.2")
    assert judged(tmp_path, line, record("full", speed=5.0)).verdict == NOT_REPRODUCED


def test_a_claim_of_three_parts_has_three_deciding_rows(tmp_path: Path) -> None:
    """Before, "17B; twice; ten times" was reproduced by 17B alone."""
    head = HEAD.replace('published = "2x"', 'published = "2x; 3x; 4x"')
    lines = main(row(label="a")) + row(label="b") + row(label="c")
    (tmp_path / "test.toml").write_text(head + lines + "]\n")
    with pytest.raises(ConfigError, match="true in 3 or more rows"):
        load_ledger(tmp_path)


def test_rows_of_one_sentence_simulate_the_same_experiments(tmp_path: Path) -> None:
    simulated = '{ label = "%s", sentence = "one", published = "2", simulated = { value = \'metric("s/%s", "v")\' } },'
    assert judged(tmp_path, simulated % ("x", "a") + simulated % ("y", "a")).verdict == NOT_RUN
    with pytest.raises(ConfigError, match="a-claim tests with the same simulations; these differ: s/a, s/b"):
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
def test_evidence_that_shares_an_input_with_what_was_published_is_refused(
    tmp_path: Path, value: str, unit: str, published: str
) -> None:
    rows = f'{{ label = "x", published = "{published}", unit = "{unit}", measured = {{ value = \'{value}\' }} }},\n'
    with pytest.raises(ConfigError, match="the part of the answer that is an input"):
        judged(tmp_path, rows)
    assert judged(tmp_path, rows.replace("{ ", '{ given = "the suite", ', 1)).verdict == NOT_RUN
