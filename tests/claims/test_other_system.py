"""Tests of the questions whether claims hold on another system, and of their answers from simulations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from repro.claims.expression import texts
from repro.claims.other_system import (
    QUESTION_FAMILIES,
    SUITE,
    Answer,
    QuestionSet,
    answer_questions,
    load_questions,
    simulated_systems,
)
from repro.config import ConfigError, Layout, OperatorSet, systems
from repro.model.counts import total_parameters
from repro.results.interval import Sensitivity, StepInterval
from repro.results.schema import SIMULATED, ExperimentRecord
from repro.simulate.time.calibration import PUBLISHED_POINT, UNCALIBRATED
from tests import committed
from tests.claims.constructed_records import conditions, record

LEDGER = committed.ledger()
AGAIN = committed.suite(Path(__file__).parents[2] / f"suites/{SUITE}.toml")
QUESTIONS = load_questions(LEDGER)
ROW = 'claim = "ds-3p75x-lowbw"\nrow = "throughput over Megatron"\nasks = "?"\n'
MEMORY = """value = 'metric("again/b", "memory.states_bytes") / 8e9'"""
RATIO = """value = 'metric("again/a", "samples_per_s") / metric("again/b", "samples_per_s")'\n"""


def test_claims_have_a_question_or_a_reason_against_it() -> None:
    asked = {question.claim for question in QUESTIONS.asked}
    assert asked | QUESTIONS.left_out.keys() == {c.id for c in LEDGER.claims if c.family in QUESTION_FAMILIES}


def test_questions_read_all_experiments_of_their_suite() -> None:
    names = [texts(question.value, question.row.variables) for question in QUESTIONS.asked]
    read = {text for found in names for text in found if "/" in text}
    assert read == {f"{AGAIN.name}/{entry.experiment.name}" for entry in AGAIN.entries}


def test_words_do_not_call_the_published_value_different() -> None:
    for question in QUESTIONS.asked:
        if question.words and question.row.printed is not None:
            word = question.word(question.row.printed.value)
            different = ("less", "more than", "fewer", "a smaller", "a larger")
            assert not word.startswith(different), question.row.label


def test_llama_models_of_the_suite_have_their_published_sizes() -> None:
    for entry in AGAIN.entries:
        model = entry.experiment.model
        assert total_parameters(model) == pytest.approx(model.published_params, rel=0.05), model.name


def questions(folder: Path, text: str, row: str = ROW) -> QuestionSet:
    path = folder / "questions.toml"
    path.write_text(f"[[question]]\n{row}{text}")
    return load_questions(LEDGER, path)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("value = 'PEEK'", "PEEK"),
        ("value = '1'\nwords = [\"a\", 2]", "words"),
        ('value = \'1\'\nwords = ["a", 2, "b", 1, "c"]', "words"),
        ("value = '1'\nwords = [1, \"b\", 2]", "words"),
        ('value = \'1\'\n[[left_out]]\nbecause = ""\nclaims = ["ds-3p75x-lowbw"]', "left_out"),
        ('value = \'1\'\n[[left_out]]\nbecause = ""\nclaims = ["ds-3p75x"]', "did you mean ds-3p75x-lowbw"),
    ],
)
def test_error_in_a_question_is_one_line(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as found:
        questions(tmp_path, text)
    assert "questions.toml" in str(found.value)
    assert "\n" not in str(found.value)
    message = r"row = 'a GPU': must be the label of a row of the claim: per GPU, of 125 TF"
    with pytest.raises(ConfigError, match=message):
        questions(tmp_path, 'value = "1"', 'claim = "tnlg-throughput"\nrow = "a GPU"\nasks = ""\n')


def simulated(name: str, step_s: float = 1.0, outcome: str = "ok", factor: float = 1.0) -> ExperimentRecord:
    """Return a step of 100 samples; the high end of an uncertain input and all draws multiply its time by `factor`."""
    moves = [Sensitivity(key="links.nvlink.x", low=1, best=1, high=2, low_s=step_s, high_s=factor * step_s)]
    metrics = {"step_seconds.median": step_s, "samples_per_s": 100 / step_s, "memory.states_bytes": 8e9}
    simulation = record(f"again/{name}", outcome=outcome, **metrics)
    interval = StepInterval(draws=[factor * step_s] * 4, moves=moves)
    return replace(simulation, evidence=SIMULATED, interval=interval)


def answer(folder: Path, text: str, *records: ExperimentRecord, system: str = "dgx-h100") -> Answer:
    (found,) = answer_questions(questions(folder, text).asked, records, systems.load_system_file(system))
    return found


def test_answer_has_the_value_and_interval_of_its_system(tmp_path: Path) -> None:
    base, other = simulated("b@dgx-h100"), simulated("a@dgx-h200", 9.0)
    records = [simulated("a@dgx-h100", 0.5, factor=0.25), base, other]
    words = 'words = ["no gain", 1.05, "a smaller gain", 3, "as published"]'
    found = answer(tmp_path, RATIO + words, *records)
    assert (found.value, found.low, found.high) == (2.0, 2.0, 8.0)
    assert (found.text, found.published) == ("2x [2, 8]", "3.75x")
    assert found.word == "a smaller gain (or as published)"
    assert simulated_systems(records) == ["dgx-h100", "dgx-h200"]
    (question,) = questions(tmp_path, 'value = \'1\'\nwords = ["under", 2, "from 2 on"]').asked
    assert [question.word(value) for value in (1.99, 2.0, 2.01)] == ["under", "from 2 on", "from 2 on"]


def test_answer_has_no_value_without_a_step_that_fits(tmp_path: Path) -> None:
    missing = answer(tmp_path, RATIO, simulated("a@dgx-h100"))
    assert (missing.value, missing.text, missing.unrecorded) == (None, "", True)
    assert missing.lacks == "b: no record"
    records = simulated("a@dgx-h100"), simulated("b@dgx-h100", outcome="oom")
    oom = answer(tmp_path, RATIO, *records)
    assert (oom.value, oom.unrecorded, oom.lacks) == (None, False, "b: the step does not fit in memory")
    assert answer(tmp_path, MEMORY, *records).value == 1.0  # known although the step does not fit


def test_fastest_returns_the_maximum_of_the_steps_that_fit(tmp_path: Path) -> None:
    text = """value = 'fastest("samples_per_s", "again/a", "again/b", "again/c")'"""
    a, c = simulated("a@dgx-h100", 2.0), simulated("c@dgx-h100", 1.0)
    assert answer(tmp_path, text, a, c, simulated("b@dgx-h100", 0.1, outcome="oom")).value == 100.0
    assert answer(tmp_path, text, a, c, simulated("b@dgx-h100", 0.1)).value == 1000.0
    none = answer(tmp_path, text, *(simulated(f"{name}@dgx-h100", outcome="oom") for name in "abc"))
    assert none.lacks.endswith("no experiment of the list fits in memory")
    assert answer(tmp_path, text, a, c).unrecorded


def test_peak_is_the_bf16_peak_of_the_system(tmp_path: Path) -> None:
    text = """value = 'metric("again/a", "samples_per_s") * 989.4e12 / PEAK'"""
    assert answer(tmp_path, text, simulated("a@dgx-h100")).value == pytest.approx(100.0)
    unknown = answer(tmp_path, text, simulated("a@dgx2"), system="dgx2")
    assert unknown.lacks.startswith("the value cannot be computed")


def test_answer_names_the_weakest_calibration_of_its_steps(tmp_path: Path) -> None:
    """A value in bytes needs no calibration of time."""

    def on_h100(name: str, kernels: str) -> ExperimentRecord:
        on_system = conditions(Layout(kernels=OperatorSet(kernels)), system="dgx-h100")
        return replace(simulated(f"{name}@dgx-h100"), conditions=on_system)

    records = [on_h100("a", "fused-2024"), on_h100("b", "fused-2024")]
    assert answer(tmp_path, RATIO, *records).rests_on == PUBLISHED_POINT
    records[1] = on_h100("b", "unfused")
    assert answer(tmp_path, RATIO, *records).rests_on == UNCALIBRATED
    assert answer(tmp_path, MEMORY, *records).rests_on == ""
