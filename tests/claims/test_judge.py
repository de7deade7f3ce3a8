"""Tests of the judge with constructed records: deciding and missing evidence, disagreements, and texts of results."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.claims import verdicts as v
from repro.claims.judge import judge
from repro.claims.ledger import ITSELF, KINDS
from repro.claims.table import count_text, summary, totals, why
from repro.claims.verdicts import ClaimResult
from repro.config import ConfigError, Layout
from tests import committed
from tests.claims.constructed_records import conditions, judged, record, row, value
from tests.records import changed

FORMULA, WRONG_FORMULA = '"flat_buffer_bytes(0.5)"', '"dp_elements(9)"'
"""Formulas that give 2 and 18. The published number is 2.0."""
PUBLISHED = value('metric("s/full", "speed")')
ONE_RANK = value('metric("s/rank", "speed")', 'scale = "one rank of 64"')
TWIN = value('metric("s/twin", "speed")', 'expect = "3", scale = "scaled twin"')
QUALITY = row("good", "q", not_comparable='"no weights"')


def counts(result: ClaimResult, kind: str) -> tuple[str, int, int, int] | None:
    """Return the verdict and the numbers of agreeing, decided and testable values of a kind; None without evidence."""
    found = result.kind(kind)
    return None if found is None else (found.verdict, found.reproduced, found.decided, found.rows)


def test_formula_does_not_decide_a_row_with_other_evidence(tmp_path: Path) -> None:
    result = judged(tmp_path, row(analytic=FORMULA, measured=f"[{TWIN}, {PUBLISHED}]"))
    assert (result.verdict, result.basis) == (v.NOT_RUN, "")
    assert counts(result, "measured") == (v.NOT_RUN, 0, 0, 1)
    reasons = [finding.reason for finding in result.rows[0].findings if finding.kind == "measured"]
    assert reasons == [f"s/{name}: no record; `repro run s.toml`" for name in ("full", "twin")]


def main(line: str) -> str:
    """Return a row that decides the verdict of its claim."""
    return line.replace("{ ", "{ main = true, ", 1)


GOOD, BAD, UNTESTED = row(label="a", analytic=FORMULA), row(label="b", analytic=WRONG_FORMULA), row(label="c")


@pytest.mark.parametrize(
    ("rows", "verdict", "basis", "reason"),
    [
        (UNTESTED, v.NO_TEST, "", "two GPUs"),
        (GOOD + UNTESTED, v.NO_TEST, "closed form 1/1; 1 no test", "two GPUs"),
        (GOOD + BAD, v.INCONSISTENT, "closed form 1/2", "printed digits"),
        # An incomparable row counts, so a test of the other rows alone does not make the claim reproduced.
        (GOOD + QUALITY, v.NOT_COMPARABLE, "closed form 1/1; 1 not comparable", "no weights"),
        (QUALITY, v.NOT_COMPARABLE, "", "no weights"),
        # Other rows than the main rows neither support nor contradict the claim.
        (main(GOOD) + BAD + UNTESTED + QUALITY, v.FOLLOWS, "closed form 1/1", ""),
        (GOOD + main(BAD), v.INCONSISTENT, "closed form 0/1", "printed digits"),
        (GOOD + main(UNTESTED), v.NO_TEST, "", "two GPUs"),
    ],
)
def test_weakest_main_row_decides_a_claim(
    tmp_path: Path, rows: str, verdict: str, basis: str, reason: str
) -> None:
    result = judged(tmp_path, rows)
    assert (result.verdict, result.basis, result.reason) == (verdict, basis, reason)
    if verdict == v.FOLLOWS:
        assert counts(result, ITSELF) == (v.FOLLOWS, 1, 1, 1), "main rows only"
        assert count_text(result, ITSELF) == "1/1"
        assert [row.verdict for row in result.rows][:2] == [v.FOLLOWS, v.INCONSISTENT], "all rows"
        assert summary([result])["against_itself"]["rows_decided"] == 2, "all rows"


def test_strongest_evidence_decides(tmp_path: Path) -> None:
    """The published number is 2. At the scale of the twin, the formula gives exactly 3."""
    rows = row(analytic=FORMULA, measured=f"[{TWIN}, {ONE_RANK}, {PUBLISHED}]")
    for speeds, verdict, basis in (
        ({"twin": 3}, v.REPRODUCED, "measured, scaled twin 1/1"),
        ({"twin": 2}, v.NOT_REPRODUCED, "measured, scaled twin 0/1"),
        ({"twin": 3, "rank": 2}, v.REPRODUCED, "measured, one rank of 64 1/1"),
        ({"twin": 3, "rank": 2, "full": 2}, v.REPRODUCED, "measured, published scale 1/1"),
    ):
        result = judged(tmp_path, rows, *(record(name, speed=speed) for name, speed in speeds.items()))
        assert (result.verdict, result.basis) == (verdict, basis)
        assert len(result.disagreements) == (verdict == v.NOT_REPRODUCED)


def test_row_with_two_measurements_needs_both_records(tmp_path: Path) -> None:
    both = row(analytic=FORMULA, measured=f"[{PUBLISHED}, {PUBLISHED.replace('s/full', 's/other')}]")
    for full, other, verdict, counted in (
        (2, None, v.NOT_RUN, (0, 0)),
        (5, None, v.NOT_REPRODUCED, (0, 0)),
        (2, 5, v.NOT_REPRODUCED, (0, 1)),
        (2, 2, v.REPRODUCED, (1, 1)),
    ):
        speeds = {"full": full} | ({} if other is None else {"other": other})
        result = judged(tmp_path, both, *(record(name, speed=speed) for name, speed in speeds.items()))
        basis = f"measured, published scale {counted[0]}/1" if verdict != v.NOT_RUN else ""
        assert (result.verdict, result.basis) == (verdict, basis)
        assert counts(result, "measured") == (verdict, *counted, 1)


def test_weaker_evidence_that_disagrees_is_reported(tmp_path: Path) -> None:
    full = record("full", speed=2.2)
    result = judged(tmp_path, row(measured=PUBLISHED, analytic=WRONG_FORMULA), full)
    assert (result.verdict, result.basis) == (v.REPRODUCED, "measured, published scale 1/1")
    assert result.disagreements == (
        "x: verdict reproduced (measured, published scale), "
        "but a weaker kind of evidence has the verdict inconsistent (closed form)",
    )
    result = judged(tmp_path, row(measured=PUBLISHED, analytic=FORMULA), record("full", speed=1.7))
    assert result.verdict == v.NOT_REPRODUCED
    assert "has the verdict follows (closed form)" in result.disagreements[0]


def test_measured_point_decides_and_not_its_interval(tmp_path: Path) -> None:
    noisy = value('metric("s/twin", "idle")', 'expect = "0.25", scale = "scaled twin", metric = "ratio"')
    for idle, low, high, verdict in (
        (0.26, 0.2, 0.3, v.REPRODUCED),
        (0.30, 0.2, 0.4, v.NOT_REPRODUCED),  # the interval does not widen the tolerance
        (0.21, 0.1, 0.3, v.NOT_REPRODUCED),
    ):
        run = record("twin", **{"idle": idle, "idle.low": low, "idle.high": high})
        (finding,) = judged(tmp_path, row(measured=noisy), run).rows[0].findings
        assert (finding.verdict, finding.low, finding.high) == (verdict, low, high)


def test_expressions_read_the_conditions_of_an_experiment(tmp_path: Path) -> None:
    run = changed(record("twin", speed=1), experiment=conditions(Layout(pp=2, dp=2, global_batch=8)))
    for name, expected in (("layout.pp", 2), ("layout.accumulation", 4), ("seq", 16)):
        text = f'metric("s/twin", "speed") * setting("s/twin", "{name}")'
        twin = value(text, f'expect = "{expected}", scale = "scaled twin"')
        assert judged(tmp_path, row(measured=twin), run).verdict == v.REPRODUCED
    for wrong in ("layout.order", "layout.nothing", "__class__.__name__"):
        twin = value(f'metric("s/twin", "speed") * setting("s/twin", "{wrong}")')
        result = judged(tmp_path, row(measured=twin), run)
        assert result.verdict == v.NOT_RUN
        assert f"the experiment's conditions have no number {wrong}" in result.reason


def test_out_of_memory_decides_a_claim_about_memory(tmp_path: Path) -> None:
    rows = row("oom", measured=value('outcome("s/big")', 'expect = \'"oom"\', scale = "scaled twin"'))
    for outcome, verdict in (("oom", v.REPRODUCED), ("ok", v.NOT_REPRODUCED), ("timeout", v.NOT_RUN)):
        assert judged(tmp_path, rows, record("big", outcome=outcome)).verdict == verdict


def test_given_row_is_not_reproduced_by_its_measurement(tmp_path: Path) -> None:
    given = row(given='"the batch"', measured=PUBLISHED)
    result = judged(tmp_path, given, record("full", speed=2.0))
    assert (result.verdict, result.reason) == (v.FOLLOWS, "the batch")
    assert result.kind("measured") is None
    assert judged(tmp_path, given, record("full", speed=3.0)).verdict == v.INCONSISTENT


def test_consistency_check_does_not_replace_a_missing_measurement(tmp_path: Path) -> None:
    good, bad = (row(label=number, measured=PUBLISHED, analytic=f'"{number}"') for number in "23")
    assert judged(tmp_path, good).verdict == v.NOT_RUN
    assert judged(tmp_path, bad).verdict == v.INCONSISTENT
    result = judged(tmp_path, bad, record("full", speed=2.0))
    assert (result.verdict, len(result.disagreements)) == (v.REPRODUCED, 1)
    both = judged(tmp_path, good + bad)
    assert counts(both, ITSELF) == (v.INCONSISTENT, 1, 2, 2)
    assert both.basis == "the source against itself 0/1; 1 not run"


def test_verdict_depends_where_readings_of_a_condition_disagree(tmp_path: Path) -> None:
    readings = (value(f'metric("s/{name}", "speed")', f'reading = "{name}"') for name in ("wide", "narrow"))
    rows = row(analytic=FORMULA, measured=f"[{', '.join(readings)}]")
    for wide, narrow, verdict in (
        (2.0, 2.0, v.REPRODUCED),
        (2.0, 5.0, v.DEPENDS),
        (5.0, 2.0, v.DEPENDS),
        (5.0, 5.0, v.NOT_REPRODUCED),
    ):
        result = judged(tmp_path, rows, record("wide", speed=wide), record("narrow", speed=narrow))
        assert result.verdict == verdict
        assert ("wide: " in result.rows[0].reason) == (verdict == v.DEPENDS)
        only_wide = judged(tmp_path, rows, record("wide", speed=wide))
        assert only_wide.verdict == (v.NOT_RUN if wide == 2 else v.NOT_REPRODUCED)


def test_erratum_row_has_the_verdict_erratum_until_measured(tmp_path: Path) -> None:
    line = row(erratum='"9 is printed on p.2"', measured=PUBLISHED, analytic=WRONG_FORMULA)
    result = judged(tmp_path, line)
    assert (result.verdict, result.reason) == (v.ERRATUM, "9 is printed on p.2")
    assert judged(tmp_path, line, record("full", speed=5.0)).verdict == v.NOT_REPRODUCED


def test_rows_of_one_sentence_read_the_same_simulations(tmp_path: Path) -> None:
    x, y, other = (
        row("2", label, sentence='"one"', simulated=value(f'metric("s/{name}", "v")'))
        for label, name in (("x", "a"), ("y", "a"), ("y", "b"))
    )
    assert judged(tmp_path, x + y).verdict == v.NOT_RUN
    with pytest.raises(ConfigError, match="those of a-claim differ in: s/a, s/b"):
        judged(tmp_path, x + other)


def test_evidence_that_repeats_an_input_must_be_given(tmp_path: Path) -> None:
    for expression, unit, published in (
        ('setting("s/full", "layout.tp")', "", "4"),
        ('512 / setting("s/full", "layout.tp")', "GPUs", "128"),
        ('parameters("s/full")', "parameters", "1.5B"),
        ('metric("s/full", "speed") / metric("s/full", "speed") * 38e12', "TFLOP/s", "38"),
        ('metric("s/full", "speed") * 0 + 16', "x", "16"),
    ):
        keys = {"unit": f'"{unit}"', "measured": value(expression)}
        with pytest.raises(ConfigError, match="the published number that the test uses as an input"):
            judged(tmp_path, row(published, **keys))
        assert judged(tmp_path, row(published, given='"the suite"', **keys)).verdict == v.NOT_RUN


def test_totals_count_values_by_kind_and_verdict(tmp_path: Path) -> None:
    """Measured evidence is "not run" without an expression if the claim names needed hardware and is comparable."""
    rows = GOOD + row(label="b") + row(label="c", measured=PUBLISHED) + row(label="d", measured=TWIN)
    result = judged(tmp_path, rows, record("full", speed=2.0))
    assert totals([result]) == (
        "4 values: 0 simulated, 0 emulated, 1 measured, 0 in closed form; 1 agree (0 weak), 0 miss, "
        "0 undecided. Untested: 1 follow from formulas, 0 contradict them, 1 not run, 1 without a test."
    )
    quality = judged(tmp_path, QUALITY)
    assert totals([result, quality]).endswith("1 not run, 2 without a test.")
    assert [count_text(result, kind) for kind in KINDS] == ["-", "-", "-", "1/2"]
    assert [count_text(judged(tmp_path, GOOD), kind) for kind in KINDS] == ["-", "-", "-", "not run"]
    assert count_text(quality, "measured") == "-"


def test_every_verdict_has_an_explanation_in_one_line(tmp_path: Path) -> None:
    explanation = why(judged(tmp_path, row("3", analytic='"dp_elements(1.5)"')))
    assert explanation.startswith("The only value agrees with the formula of the source. ")
    for result in judge(committed.ledger(), []):
        assert why(result).endswith(".")
        assert "\n" not in why(result)
