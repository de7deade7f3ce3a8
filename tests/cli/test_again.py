"""Tests of `repro claims --system S`: the table, the JSON document, and errors for missing simulations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from repro.config import ConfigError, Experiment, Layout, Model
from repro.report.text.claims import print_claims_on_system
from repro.results.schema import SIMULATED
from repro.results.store import Store
from tests.claims.constructed_records import record


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a store with the two simulations of one question on dgx-h100."""
    model = Model(name="m", layers=2, hidden=16, heads=2, vocab=64, seq=16)
    with Store(tmp_path / "results") as store:
        store.prepare()
        for name, rate in (("1.5b-zero1", 300.0), ("1.5b-mp4", 200.0)):
            plain = record(f"again/{name}@dgx-h100", samples_per_s=rate, **{"step_seconds.median": 1.0})
            experiment = Experiment(name=plain.name, model=model, layout=Layout(), system="dgx-h100")
            conditions = experiment.as_dict()
            store.append(replace(plain, id=name, evidence=SIMULATED, conditions=conditions))
    return tmp_path / "results"


def test_table_has_published_and_predicted_values(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_claims_on_system("ds-3p75x-lowbw", "dgx-h100", False, results, True) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "3.75x 1.5x a smaller gain" in text
    assert "1.5b-dp: no record" in text
    assert "no verdicts" in text
    assert (
        "No simulation has run for 1 prediction: `repro run again --evidence simulated --system dgx-h100`"
        in text
    )


def test_store_without_predictions_names_the_command(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_claims_on_system("", "dgx-h200", False, results, True) == 1
    *answer, command = capsys.readouterr().out.splitlines()
    assert " ".join(answer).endswith("has no predictions for dgx-h200.")
    assert command == "Next: repro run again --evidence simulated --system dgx-h200"
    assert print_claims_on_system("", "dgx-h200", True, results, False) == 1


def test_json_contains_the_answers(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert print_claims_on_system("", "dgx-h100", True, results, False) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["system"] == "dgx-h100"
    assert "no verdicts" in document["is"]
    first = document["answers"][0]
    assert (first["claim"], first["published"], first["unit"], first["value"]) == (
        "ds-3p75x-lowbw",
        "3.75",
        "x",
        1.5,
    )


@pytest.mark.parametrize(
    ("claim", "system", "message"),
    [
        ("", "dgx-h10", "did you mean dgx-h100"),
        ("ds-3p75", "dgx-h100", "did you mean ds-3p75x-lowbw"),
        (
            "tnlg-lambada",
            "dgx-h100",
            "cannot be predicted for another system: the claim's family is quality, not one of throughput, memory",
        ),
        ("yuan-bubble", "dgx-h100", "cannot be predicted for another system: the value depends on sizes or on a schedule"),
    ],
)
def test_error_for_a_claim_without_a_question(results: Path, claim: str, system: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        print_claims_on_system(claim, system, False, results, True)
