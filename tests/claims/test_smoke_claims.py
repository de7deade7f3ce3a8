"""Tests of the claims of the smoke suite with constructed records of correct and incorrect implementations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.claims.judge import judge_claim
from repro.claims.records import Records
from repro.claims.verdicts import NOT_REPRODUCED, REPRODUCED
from repro.results.schema import ExperimentRecord
from tests import committed
from tests.claims.constructed_records import record

LEDGER = committed.ledger()
PSI = 1_000_003


def states(nd: int, stage: int) -> float:
    """Return the model-state bytes of a rank; each partitioned state is padded to a multiple of `nd` elements."""
    shard = -(-PSI // nd)
    optimizer, gradients, weights = (shard if stage >= first else PSI for first in (1, 2, 3))
    return 12 * optimizer + 2 * gradients + 2 * weights


def smoke(**wrong: float) -> list[ExperimentRecord]:
    """Return the smoke records of a correct implementation, with the model-state bytes in `wrong` by experiment."""
    records = []
    for nd in (1, 2, 4):
        ring = 2 * (nd - 1) / nd  # sent elements per reduced element, 2 bytes each
        for stage in (0, 1, 2, 3):
            metrics = {
                "parameters": PSI,
                "memory.states_bytes": states(nd, stage),
                "comm.sent_bytes": 2 * PSI * ring * (1.5 if stage == 3 else 1) + 8,
            }
            name = f"states-z{stage}-dp{nd}"
            metrics |= {"memory.states_bytes": wrong[name]} if name in wrong else {}
            records.append(record(f"smoke/{name}", **metrics))
        if nd > 1:
            sent = {"comm.sent_bytes": 2 * PSI * ring * 1.5 + 8}
            records.append(record(f"smoke/comm-z1-allreduce-dp{nd}", **sent))
    return records


@pytest.mark.parametrize(
    "claim_id",
    [
        *("zero-mem-formula-stages", "ds-4x-memory", "zero-comm-dp-2psi", "zero-comm-posg-2psi"),
        "zero-comm-posgp-3psi",
    ],
)
def test_smoke_records_of_a_correct_implementation_reproduce(claim_id: str) -> None:
    result = judge_claim(LEDGER.claim(claim_id), Records(smoke()))
    assert (result.verdict, result.disagreements) == (REPRODUCED, ())
    assert result.basis.startswith("measured, scaled twin")


@pytest.mark.parametrize(
    ("name", "bytes_wrong"),
    [
        ("states-z1-dp4", states(4, 1) + PSI),  # one additional byte per parameter
        ("states-z2-dp2", states(2, 1)),  # gradients not partitioned
        ("states-z3-dp4", states(4, 3) * 1.01),
        ("states-z0-dp1", states(1, 0) + 1),  # one additional byte; one rank has no padding
    ],
)
def test_incorrect_model_states_are_not_reproduced(name: str, bytes_wrong: float) -> None:
    records = smoke(**{name: bytes_wrong})
    result = judge_claim(LEDGER.claim("zero-mem-formula-stages"), Records(records))
    assert result.verdict == NOT_REPRODUCED
    assert result.disagreements, "the closed form agrees with the paper"


def test_parity_compares_every_layout_with_one_process() -> None:
    names = [row.variables["experiment"] for row in LEDGER.claim("repro-parity").rows]
    records = [record("smoke/parity-single", **{"loss.last": 3.0})]
    records += [record(str(name), **{"loss.last": 3.00001}) for name in names]
    result = judge_claim(LEDGER.claim("repro-parity"), Records(records))
    assert (result.verdict, len(result.rows)) == (REPRODUCED, 17)
    records[-1].metrics["loss.last"] = 3.0001
    result = judge_claim(LEDGER.claim("repro-parity"), Records(records))
    assert (result.verdict, result.basis) == (NOT_REPRODUCED, "measured, published scale 16/17")


def test_zero_3_gathered_bytes_do_not_grow_with_depth() -> None:
    claim = LEDGER.claim("zero-dynamic-schedule")
    claim = replace(claim, rows=claim.rows[:1])
    for at_32, verdict in ((2, REPRODUCED), (3, NOT_REPRODUCED)):
        layers = {"gathered-l2": 2, "gathered-l8": 2, "gathered-l32": at_32}
        records = [record(f"smoke/{name}", **{"memory.gathered_bytes": n}) for name, n in layers.items()]
        assert judge_claim(claim, Records(records)).verdict == verdict


def test_all_reduces_per_layer_are_compared_exactly() -> None:
    calls = "comm.per_layer.tp.all_reduce.calls"
    for claim_id, name, expected in (
        ("meg1-allreduce-count", "parity-tp2", 4),
        ("zero-comm-megatron-block", "recompute-tp2", 6),
    ):
        for value, verdict in ((expected, REPRODUCED), (expected + 0.5, NOT_REPRODUCED)):
            records = [record(f"smoke/{name}", **{calls: value})]
            result = judge_claim(LEDGER.claim(claim_id), Records(records))
            finding = next(f for f in result.rows[0].findings if f.kind == "measured")
            assert finding.verdict == verdict
