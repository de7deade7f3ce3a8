"""Tests of claims about quality: the newest evaluation of the same model size, task and scoring protocol decides."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from repro.claims.judge import judge_claim
from repro.claims.records import Records
from repro.claims.run_commands import evaluation_commands
from repro.claims.verdicts import NOT_COMPARABLE, NOT_REPRODUCED, NOT_RUN, REPRODUCED, RowResult
from repro.config import models
from repro.results.schema import EvaluationRecord, Record, read_record
from repro.results.store import Store, read_records
from tests import committed

GPT2 = asdict(models.load_model("gpt2-1.5b"))


def scored(
    protocol: str, task: str = "lambada", model: dict[str, Any] = GPT2, **metrics: float
) -> EvaluationRecord:
    return EvaluationRecord(
        suite="evaluate",
        name=f"somebody's-{task}-{protocol}",
        model=model,
        weights={"kind": "Hugging Face GPT-2", "files": {}},
        task=task,
        way={"name": protocol},
        data={},
        tokenizer={},
        layout={},
        system="local",
        outcome="ok",
        reason="",
        metrics={name.replace("_", "."): value for name, value in metrics.items()},
    )


def row(claim: str, label: str, *records: Record) -> RowResult:
    result = judge_claim(committed.ledger().claim(claim), Records(records))
    return next(row for row in result.rows if row.row.label == label)


def lambada(*records: Record) -> RowResult:
    return row("tnlg-lambada", "GPT-2 1.5B", *records)


def test_reason_of_a_missing_record_names_the_command() -> None:
    found = lambada()
    assert found.verdict == NOT_RUN
    command = "`repro evaluate --weights DIR --task lambada --protocol gpt2 --data FILE`"
    assert command in found.findings[0].reason
    claim = committed.ledger().claim("tnlg-lambada")
    assert [command.text.split()[7] for command in evaluation_commands(claim)] == ["megatron", "gpt2"]


def test_unreleased_weights_are_not_comparable_without_a_record() -> None:
    assert row("tnlg-lambada", "Turing-NLG 17B").verdict == NOT_COMPARABLE
    evaluation = scored("megatron", model=asdict(models.load_model("turing-nlg-17b")), accuracy=0.6798)
    assert row("tnlg-lambada", "Turing-NLG 17B", evaluation).verdict == REPRODUCED


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.6324, REPRODUCED), (0.5266, NOT_REPRODUCED)])
def test_filtered_accuracy_is_compared_with_the_published_one(accuracy: float, verdict: str) -> None:
    found = lambada(scored("gpt2", accuracy=0.1, accuracy_filtered=accuracy))
    assert found.verdict == verdict
    assert found.basis == "measured, published scale"


def test_newest_record_decides_for_padded_and_unpadded_vocabularies() -> None:
    padded = {**GPT2, "vocab": 50304, "ffn": 6400}
    new = replace(scored("gpt2", model=padded, accuracy_filtered=0.6324), written="2026-01-02")
    old = replace(scored("gpt2", accuracy_filtered=0.1), written="2026-01-01")
    assert lambada(new, old).verdict == REPRODUCED


@pytest.mark.parametrize(
    "other",
    [
        scored("megatron", accuracy_filtered=0.6324),
        scored("gpt2", task="wikitext103", accuracy_filtered=0.6324),
        scored("gpt2", model={**GPT2, "layers": 36}, accuracy_filtered=0.6324),
        replace(scored("gpt2", accuracy_filtered=0.6324), outcome="oom"),
        scored("gpt2", model={"layers": 48}, accuracy_filtered=0.6324),
        scored("gpt2", model={**GPT2, "heads": 7}, accuracy_filtered=0.6324),
        scored("gpt2", model={**GPT2, "experts": 8}, accuracy_filtered=0.6324),
    ],
)
def test_evaluation_of_another_protocol_task_or_model_is_ignored(other: EvaluationRecord) -> None:
    assert lambada(other).verdict == NOT_RUN


def test_reason_names_a_metric_that_is_missing_or_text() -> None:
    text = replace(scored("gpt2"), metrics={"accuracy.filtered": "63.24"})  # type: ignore[dict-item]
    for evaluation in (text, scored("gpt2", accuracy=0.5)):
        assert "no metric accuracy.filtered" in lambada(evaluation).findings[0].reason


def test_token_and_word_counts_must_be_equal() -> None:
    right = scored("megatron", "wikitext103", tokens=270_329, words=245_566)
    for label in ("tokens T of the test set", "original tokens To"):
        assert row("meg1-quality", label, right).verdict == REPRODUCED
    wrong = scored("megatron", "wikitext103", tokens=270_330, words=245_566)
    assert row("meg1-quality", "tokens T of the test set", wrong).verdict == NOT_REPRODUCED


def test_evaluation_record_is_equal_after_a_store(tmp_path: Path) -> None:
    record = scored("gpt2", accuracy=0.5)
    with Store(tmp_path) as store:
        store.append(record)
    (stored,) = read_records(tmp_path)
    assert replace(stored, sequence=None) == record == read_record(record.as_dict())
