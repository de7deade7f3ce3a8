"""Tests of the mutations of the simulator: their changed quantities, and the committed table of verdicts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from repro.claims.judge import load_mutations
from repro.results.schema import SIMULATED
from repro.util.processes import Workers
from tests import committed
from tests.claims import mutations

DOCUMENT = json.loads(mutations.DATA.read_text(encoding="utf-8"))
ROWS = {(claim, label): names for claim, rows in load_mutations().items() for label, names in rows.items()}
PSI, ND = 7.5e9, 64
MIN_CHANGED_SHARE = 0.8
"""Minimum share of reproduced values whose verdict at least one mutation changes."""
PINNED = ("zero-fig1-7p5b", "zero-comm-posgp-3psi")
"""Claims whose verdicts the slow test computes."""


def test_table_has_the_current_mutations_and_rows() -> None:
    names = [one.name for one in mutations.MUTATIONS]
    assert DOCUMENT["mutations"] == names == [name for faults in mutations.FAULTS.values() for name in faults]
    simulated = {
        (claim.id, row.label)
        for claim in committed.ledger().claims
        for row in claim.rows
        if any(one.kind == SIMULATED for one in row.evidence)
    }
    assert set(ROWS) - simulated == set()
    assert mutations.PAGE.read_text(encoding="utf-8") == mutations.page(DOCUMENT)
    assert {name for changing in ROWS.values() for name in changing} == set(names)
    assert sum(map(bool, ROWS.values())) >= MIN_CHANGED_SHARE * DOCUMENT["agreeing"]


@pytest.fixture(scope="module")
def stage_2() -> mutations.MutatedSimulation:
    """Return the simulation of 7.5B parameters on 64 devices with ZeRO 2 (ZeRO paper, Figure 1)."""
    suite = committed.suite(mutations.ROOT / "suites/zero_memory.toml")
    simulation = mutations.MutatedSimulation(suite.entry("7.5b-z2-n64").experiment, suite.name)
    simulation.record(mutations.NONE)
    return simulation


@pytest.mark.parametrize(
    ("name", "metric", "expected"),
    [
        # 2 bytes a parameter; 2 + 12 bytes of gradients and optimizer states, partitioned over the devices.
        ("", "memory.states_bytes", 2 * PSI + 14 * PSI / ND),
        ("fp32 gradients", "memory.states_bytes", 2 * PSI + 16 * PSI / ND),
        ("no master copy", "memory.states_bytes", 2 * PSI + 10 * PSI / ND),
        ("no optimizer states", "memory.states_bytes", 2 * PSI + 2 * PSI / ND),
        ("optimizer states not partitioned", "memory.states_bytes", 14 * PSI + 2 * PSI / ND),
        ("gradients not partitioned", "memory.states_bytes", 4 * PSI + 12 * PSI / ND),
        # A reduce-scatter and an all-gather send (Nd - 1) / Nd of 2 bytes a parameter each.
        ("", "comm.sent_bytes", 4 * PSI * (1 - 1 / ND)),
        ("fp32 gradients", "comm.sent_bytes", 6 * PSI * (1 - 1 / ND)),
        ("gradients not reduced", "comm.sent_bytes", 2 * PSI * (1 - 1 / ND)),
        ("parameters not gathered", "comm.sent_bytes", 2 * PSI * (1 - 1 / ND)),
    ],
)
def test_mutation_changes_the_model_states_or_the_traffic(
    stage_2: mutations.MutatedSimulation, name: str, metric: str, expected: float
) -> None:
    record = stage_2.record(mutations.BY_NAME[name])
    assert record is not None
    assert record.metrics[metric] == pytest.approx(expected, rel=1e-3)


def test_mutation_of_time_makes_the_step_slower(stage_2: mutations.MutatedSimulation) -> None:
    for name in ("half the bandwidth between nodes", "no overlap", "slower kernels"):
        record = stage_2.record(mutations.BY_NAME[name])
        assert record is not None
        assert record.metrics["step_seconds.median"] > 1.01 * stage_2.base["step_seconds.median"]


def test_mutation_of_an_unused_feature_has_no_record(stage_2: mutations.MutatedSimulation) -> None:
    """The experiment has one pipeline stage and no tensor parallelism."""
    assert stage_2.record(mutations.BY_NAME["double bubble"]) is None
    assert stage_2.record(mutations.BY_NAME["no tensor-parallel collective in backward"]) is None


@pytest.mark.slow
def test_table_has_the_verdicts_of_the_current_simulator() -> None:
    ledger = committed.ledger()
    ledger = replace(ledger, claims=tuple(one for one in ledger.claims if one.id in PINNED))
    with Workers(1) as workers:
        found, _ = mutations.verdict_changes(ledger, workers)
    expected = {row: set(names) for row, names in ROWS.items() if row[0] in PINNED}
    assert {row: set(names) for row, names in found.items()} == expected
