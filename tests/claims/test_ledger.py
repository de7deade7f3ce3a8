"""Tests of the packaged ledger: complete tables, and the verdicts of all claims with an empty store."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from repro.claims import verdicts as v
from repro.claims.judge import experiments_read, judge
from repro.claims.ledger import CLOSED_FORM, ITSELF
from repro.claims.verdicts import ClaimResult
from tests import committed

LEDGER = committed.ledger()


@pytest.fixture(scope="module")
def results() -> dict[str, ClaimResult]:
    return {result.claim.id: result for result in judge(LEDGER, [])}


ROW_COUNTS = {
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
    "meg2-fig13-tp-pp": 5 * 2 + 3,
    "meg2-fig16-micro-batch": 4 * 2 + 2,
    "meg2-fig17-recomputation": 7 + 3,
    "meg2-fig18-scatter-gather": 5 + 1,
    "meg1-fig5-weak-scaling": 5,
    "meg1-table8-strong-scaling": 3,
    "meg-v1-release": 4 * 3 + 3,
    "meg1-bert": 3 * 3 + 2,
    "meg2-table1-weak-scaling": 10 * 4,
    "vtrain-a100-node": 9,
    "vtrain-a100": 24,
    "korthikanti-memory": 1 + 4 + 3 + 4 * 2 + 3,
    "korthikanti-steps": 2 + 4 + 4,
    "simumax-b200-steps": 2 * 3 * 4,
}
"""Number of values by claim, for tables some of whose values are in no table of this file or of mutations.json."""
MEASURED_COUNTS = {
    "meg1-allreduce-count": 2,
    "meg2-comm-tp-pp": 8,
    "meg2-bubble": 8,
    "yuan-bubble": 1,
    "zero-r-pa-memory": 3,
    "zero-comm-megatron-block": 5,
    "zero-comm-pa-dp-tradeoff": 1,
}
"""Number of values with measured evidence, for claims about pipelines and checkpoints."""


def test_ledger_contains_all_values_of_a_table() -> None:
    assert {claim: len(LEDGER.claim(claim).rows) for claim in ROW_COUNTS} == ROW_COUNTS
    measured = {
        claim: sum(any(one.kind == "measured" for one in row.evidence) for row in LEDGER.claim(claim).rows)
        for claim in MEASURED_COUNTS
    }
    assert measured == MEASURED_COUNTS


def test_rows_have_evidence_or_a_reason_for_its_absence() -> None:
    for claim in LEDGER.claims:
        for row in claim.rows:
            assert row.evidence or row.needs or row.not_comparable, f"{claim.id}: {row.label}"
            assert (row.certainty == "digitised") == bool(row.error), f"{claim.id}: {row.label}"


def test_claims_cite_every_source_of_the_ledger() -> None:
    cited = {source.partition(" ")[0] for claim in LEDGER.claims for source in claim.source}
    assert cited <= set(LEDGER.sources)
    assert set(LEDGER.sources) - cited <= {"DSE-JUN20"}, "sources that no claim cites"


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
    rows = results[claim_id].rows
    tests = [found for row in rows if (found := row.under(ITSELF))]
    assert [all(finding.verdict in v.GOOD for finding in found) for found in tests] == [True] * count
    assert not any(row.under("analytic") for row in rows)


CONTRADICTING_ROWS = {
    "zero-table10-fig4-dp-only": 1,
    "zero-table6-fig3-superlinear": 1,
    "zero-fig2-throughput": 2,
    "zero-r-pa-memory": 2,
    "zero-activation-formula": 2,
    "zero-table4-model-shapes": 3,
    "zero-max-size-nd64": 2,
    "ds-3to5x-20to80b": 2,
    "yuan-one-pass": 1,
    "meg2-1t-network-and-storage": 1,
    "tnlg-architecture": 1,
}
"""Number of values that contradict other numbers of their source, by claim."""


def test_all_other_closed_forms_agree_and_contradictions_have_a_note(results: dict[str, ClaimResult]) -> None:
    bad = [
        (result, row)
        for result in results.values()
        for row in result.rows
        if any(finding.verdict in v.BAD for finding in row.findings)
    ]
    assert Counter(result.claim.id for result, _ in bad) == CONTRADICTING_ROWS
    for result, row in bad:
        assert row.verdict in (v.INCONSISTENT, v.ERRATUM)
        assert row.row.note or row.row.erratum, "missing reason"
        assert result.verdict in v.BAD or not row.row.main
    errata = {row.row.label for _, row in bad if row.verdict == v.ERRATUM}
    assert errata == {"40B 88x4096: parameters", "60B 132x4096: parameters"}


@pytest.mark.parametrize(
    ("claim_id", "labels"),
    [
        ("zero-comm-pa-dp-tradeoff", ["checkpoints per sample, none over P_a"]),
        ("zero-table2-max-model-size", ["MP 1: theory P_os", "MP 16: theory P_os"]),
        ("tnlg-mp16-to-4", ["training time"]),
        ("yuan-config", ["GPUs"]),
        ("yuan-efficiency-press", ["compute of 180B tokens", "efficiency 44 (without s/6h)"]),
    ],
)
def test_row_whose_value_is_an_input_has_no_test(claim_id: str, labels: list[str]) -> None:
    rows = {row.label: row for row in LEDGER.claim(claim_id).rows}
    assert {one.origin for label in labels for one in rows[label].evidence} <= {CLOSED_FORM, ITSELF}


def test_empty_store_has_no_measured_verdict(results: dict[str, ClaimResult]) -> None:
    """Claims about quality need weights, claims about hardware name the hardware, and design rules need simulations."""
    for claim_id in ("tnlg-wikitext103-ppl", "tnlg-lambada", "tnlg-rouge", "meg1-quality", "yuan-quality"):
        assert results[claim_id].verdict == v.NOT_COMPARABLE
        assert results[claim_id].reason
    for claim_id in ("ds-3p75x-lowbw", "zero-fragmentation", "tnlg-throughput", "ds-64gpu-table"):
        assert results[claim_id].verdict == v.NOT_RUN
        assert results[claim_id].claim.needs
    assert results["yuan-design-rules"].verdict == v.NOT_RUN
    for result in results.values():
        measured = result.kind("measured")
        assert measured is None or (measured.verdict, measured.decided) == (v.NOT_RUN, 0)
        assert result.verdict != v.REPRODUCED or result.claim.id == "ds-few-lines"
        assert not any(f.reason.startswith("cannot") for row in result.rows for f in row.findings)


def test_evidence_reads_only_experiments_of_the_suites() -> None:
    folder = Path(__file__).parents[2] / "suites"
    suites = [committed.suite(path) for path in folder.glob("*.toml")]
    known = {f"{suite.name}/{entry.experiment.name}" for suite in suites for entry in suite.entries}
    for claim in LEDGER.claims:
        for row in claim.rows:
            for evidence in row.evidence:
                for expression in (evidence.value, evidence.expect):
                    read = experiments_read(expression, row.variables) if expression else []
                    assert set(read) <= known, f"{claim.id}: {row.label}"
