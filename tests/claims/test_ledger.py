"""Tests of the packaged ledger: complete tables, and the verdicts of all claims with an empty store."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.claims.judge import experiments_read, judge
from repro.claims.ledger import CLOSED_FORM, ITSELF, Ledger
from repro.claims.tolerance import RELATIVE_TOLERANCE
from repro.claims.verdicts import (
    BAD,
    ERRATUM,
    GOOD,
    INCONSISTENT,
    NOT_COMPARABLE,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    ClaimResult,
)
from repro.config import ConfigError
from tests import committed


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return committed.ledger()


@pytest.fixture(scope="module")
def results(ledger: Ledger) -> dict[str, ClaimResult]:
    """Return the verdicts with an empty store, by claim."""
    return {result.claim.id: result for result in judge(ledger, [])}


ROW_COUNTS = {
    "zero-table1-per-device-memory": 9 * 6,
    "zero-table2-max-model-size": 5 * 6 + 2 + 2,
    "zero-table5-fig2-configs": 18 + 4,
    "zero-fig2-throughput": 9 * 3 + 6,
    "zero-table6-fig3-superlinear": 4 * 3 + 3,
    "zero-table7-fig6-maxmodel": 5 * 3,
    "zero-table8-fig7-maxcache": 7,
    "zero-table10-fig4-dp-only": 11 * 2 + 4,
    "ds-64gpu-table": 8 * 3 + 4 + 8 + 7 + 6,
    "meg-dec2020-table": 8 * 4 + 4 * 3 + 1,
    "meg2-table2-vs-zero3": 12 * 2 + 4 + 1,
    "meg2-fig11-pipeline-weak-scaling": 4 * 2 + 4 + 1,
    "meg2-interleaved-10pct": 5 * 2 + 1,
    "meg2-fig13-tp-pp": 5 * 2 + 3,
    "meg2-fig14-pp-dp": 5 * 2,
    "meg2-fig16-micro-batch": 4 * 2 + 2,
    "meg2-fig17-recomputation": 7 + 3,
    "meg2-fig18-scatter-gather": 5 + 1,
    "meg1-table1-weak-scaling": 4 * 3,
    "meg1-fig5-weak-scaling": 5,
    "meg1-table8-strong-scaling": 3,
    "meg1-table7-heads": 3,
    "meg-v1-release": 4 * 3 + 3,
    "meg1-bert": 3 * 3 + 2,
    "meg2-table1-weak-scaling": 10 * 4,
    "vtrain-a100-node": 9,
    "vtrain-a100": 24,
    "korthikanti-baselines": 4,
    "korthikanti-memory": 1 + 4 + 3 + 4 * 2 + 3,
    "korthikanti-steps": 2 + 4 + 4,
    "nemo-5b": 3 + 6,
    "simumax-b200-steps": 2 * 3 * 4,
    "simumax-b200-memory": 2 * 4 + 7,
    "simumax-b200-long": 7,
    "simumax-a100-steps": 4 * 3,
}


@pytest.mark.parametrize("claim_id", ROW_COUNTS)
def test_ledger_contains_all_values_of_a_table(ledger: Ledger, claim_id: str) -> None:
    assert len(ledger.claim(claim_id).rows) == ROW_COUNTS[claim_id]


def test_rows_have_evidence_or_a_reason_for_its_absence(ledger: Ledger) -> None:
    for claim in ledger.claims:
        for row in claim.rows:
            assert row.evidence or row.needs or row.not_comparable, f"{claim.id}: {row.label}"
            assert (row.certainty == "digitised") == bool(row.error), f"{claim.id}: {row.label}"


def test_claims_cite_every_source_of_the_ledger(ledger: Ledger) -> None:
    cited = {source.partition(" ")[0] for claim in ledger.claims for source in claim.source}
    assert cited <= set(ledger.sources)
    assert set(ledger.sources) - cited <= {"DSE-JUN20"}, "sources that no claim cites"


def counted(results: dict[str, ClaimResult], claim_id: str, kind: str) -> tuple[int, int]:
    """Return the numbers of agreeing values and of values that this kind of evidence can test."""
    found = [tests for row in results[claim_id].rows if (tests := row.under(kind))]
    return sum(all(f.verdict in GOOD for f in tests) for tests in found), len(found)


@pytest.mark.parametrize(
    ("claim_id", "count"),
    [
        ("zero-table1-per-device-memory", 54),
        ("zero-table2-max-model-size", 20),  # four values, multiplied by MP
        ("zero-fig1-7p5b", 4),
        ("zero-1t-on-1024", 3),
        ("zero-table5-fig2-configs", 18),  # batch x GPUs / MP
        ("meg1-table1-weak-scaling", 12),
        ("meg2-table1-weak-scaling", 30),
        ("meg-v1-release", 4 * 2 + 2),
        ("meg1-bert", 3),
        ("yuan-bubble", 1),
        ("meg2-bubble", 8),
        ("meg2-comm-tp-pp", 9),
        ("zero-1t-time", 1),
    ],
)
def test_values_follow_from_formulas_and_numbers_of_the_paper(
    results: dict[str, ClaimResult], claim_id: str, count: int
) -> None:
    """Closed forms and arithmetic show consistency alone, so no value counts as an analytic test."""
    assert counted(results, claim_id, ITSELF) == (count, count)
    assert counted(results, claim_id, "analytic") == (0, 0)


@pytest.mark.parametrize(
    ("claim_id", "label", "verdict"),
    [
        ("zero-r-pa-memory", "without P_a", INCONSISTENT),
        ("zero-r-pa-memory", "with P_a", INCONSISTENT),
        ("yuan-one-pass", "tokens of 5 TB in the longest entries", INCONSISTENT),
        ("meg2-1t-network-and-storage", "checkpoint of 1008B", INCONSISTENT),
        ("zero-activation-formula", "100B, batch 32, checkpointing", INCONSISTENT),
        ("zero-table10-fig4-dp-only", "average of the ZeRO points", INCONSISTENT),
        ("zero-table6-fig3-superlinear", "256 -> 400 (1.56x GPUs): growth", INCONSISTENT),
        ("zero-fig2-throughput", "8B-100B average, of peak (text)", INCONSISTENT),
        ("zero-table4-model-shapes", "40B 88x4096: parameters", ERRATUM),
        ("zero-table4-model-shapes", "60B 132x4096: parameters", ERRATUM),
        ("ds-3to5x-20to80b", "40B: three to five times", INCONSISTENT),
    ],
)
def test_row_that_contradicts_its_source_has_a_note(
    results: dict[str, ClaimResult], claim_id: str, label: str, verdict: str
) -> None:
    result = results[claim_id]
    row = next(row for row in result.rows if row.row.label == label)
    assert row.verdict == verdict
    assert row.row.note or row.row.erratum, "missing reason"
    assert result.verdict in BAD or not row.row.main


def test_all_other_closed_forms_agree(results: dict[str, ClaimResult]) -> None:
    bad = {verdict: set[str]() for verdict in BAD}
    for result in results.values():
        for finding in (finding for row in result.rows for finding in row.findings):
            if finding.verdict in BAD:
                bad[finding.verdict].add(result.claim.id)
    assert not bad[NOT_REPRODUCED]
    assert bad[INCONSISTENT] == {
        "zero-table10-fig4-dp-only",
        "zero-table6-fig3-superlinear",
        "zero-fig2-throughput",
        "ds-3to5x-20to80b",
        "yuan-one-pass",
        *("zero-r-pa-memory", "zero-activation-formula", "zero-table4-model-shapes", "zero-max-size-nd64"),
        *("meg2-1t-network-and-storage", "tnlg-architecture"),
    }


ROWS_THAT_ARE_INPUTS = {
    "zero-comm-pa-dp-tradeoff": ("checkpoints per sample, none over P_a",),
    "zero-table2-max-model-size": ("MP 1: theory P_os", "MP 16: theory P_os"),
    "tnlg-mp16-to-4": ("training time",),
    "yuan-config": ("GPUs",),
    "yuan-efficiency-press": ("compute of 180B tokens", "efficiency 44 (without s/6h)"),
}


@pytest.mark.parametrize("claim_id", ROWS_THAT_ARE_INPUTS)
def test_row_whose_value_is_an_input_has_no_test(ledger: Ledger, claim_id: str) -> None:
    rows = {row.label: row for row in ledger.claim(claim_id).rows}
    for label in ROWS_THAT_ARE_INPUTS[claim_id]:
        assert {evidence.origin for evidence in rows[label].evidence} <= {CLOSED_FORM, ITSELF}, label


def test_yuan_design_rules_need_simulations(results: dict[str, ClaimResult]) -> None:
    assert results["yuan-design-rules"].verdict == NOT_RUN


@pytest.mark.parametrize(
    "claim_id", ["tnlg-wikitext103-ppl", "tnlg-lambada", "tnlg-rouge", "meg1-quality", "yuan-quality"]
)
def test_quality_is_not_comparable_without_weights(results: dict[str, ClaimResult], claim_id: str) -> None:
    assert results[claim_id].verdict == NOT_COMPARABLE
    assert results[claim_id].reason


@pytest.mark.parametrize(
    "claim_id", ["ds-3p75x-lowbw", "zero-fragmentation", "tnlg-throughput", "ds-64gpu-table"]
)
def test_claims_about_hardware_name_the_hardware_they_need(
    results: dict[str, ClaimResult], claim_id: str
) -> None:
    assert results[claim_id].verdict == NOT_RUN
    assert results[claim_id].claim.needs


def test_empty_store_has_no_measured_verdict(results: dict[str, ClaimResult]) -> None:
    for result in results.values():
        measured = result.kind("measured")
        assert measured is None or (measured.verdict, measured.decided) == (NOT_RUN, 0)
        assert result.verdict != REPRODUCED or result.claim.id == "ds-few-lines"
        assert not any(f.reason.startswith("cannot") for row in result.rows for f in row.findings)


def test_every_metric_class_has_a_tolerance(ledger: Ledger) -> None:
    assert {row.metric for claim in ledger.claims for row in claim.rows} <= set(RELATIVE_TOLERANCE)


def test_error_for_an_unknown_claim_suggests_a_known_claim(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="did you mean zero-fig1-7p5b"):
        ledger.claim("zero-fig1-7p5")


def test_claims_about_pipelines_and_checkpoints_have_measured_evidence(ledger: Ledger) -> None:
    measured_rows = {
        "meg1-allreduce-count": 2,
        "meg2-comm-tp-pp": 8,
        "meg2-bubble": 8,
        "yuan-bubble": 1,
        "zero-r-pa-memory": 3,
        "zero-comm-megatron-block": 5,
        "zero-comm-pa-dp-tradeoff": 1,
    }
    for claim_id, count in measured_rows.items():
        rows = ledger.claim(claim_id).rows
        assert sum(any(e.kind == "measured" for e in row.evidence) for row in rows) == count, claim_id


def test_evidence_reads_only_experiments_of_the_suites(ledger: Ledger) -> None:
    folder = Path(__file__).parents[2] / "suites"
    known = {
        f"{suite.name}/{entry.experiment.name}"
        for suite in (committed.suite(path) for path in folder.glob("*.toml"))
        for entry in suite.entries
    }
    for claim in ledger.claims:
        for row in claim.rows:
            for evidence in row.evidence:
                for expression in (evidence.value, evidence.expect):
                    read = experiments_read(expression, row.variables) if expression else []
                    assert set(read) <= known, f"{claim.id}: {row.label}"
