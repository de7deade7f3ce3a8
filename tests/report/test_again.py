"""Tests of the page's section on other systems: published ratios and their predictions on systems of today."""

from __future__ import annotations

from repro.claims.other_system import Answer, load_questions
from repro.report.page.context import template
from tests import committed

QUESTIONS = load_questions(committed.ledger()).asked


def rendered(*systems: str) -> str:
    gain = Answer(question=QUESTIONS[0], value=1.5, low=1.25, high=4.0, word="a smaller gain (or as published)")
    unanswered = Answer(question=QUESTIONS[1], lacks="1.5b-dp: the step does not fit in memory")
    return template("again.html").render(
        again={system: [gain, unanswered] for system in systems}, ledger=committed.ledger()
    )


def test_rows_have_the_published_value_and_all_predictions() -> None:
    text = rendered("dgx-h100", "dgx-h200")
    assert text.count("<b>1.5x [1.25, 4]</b>") == 2
    assert text.count("a smaller gain (or as published)") == 2
    assert text.count("1.5b-dp: the step does not fit in memory") == 2
    assert "Predicted on dgx-h200" in text
    assert "<td>3.75x</td>" in text
    assert 'href="claims/ds-3p75x-lowbw.html"' in text
    assert "no verdicts" in text


def test_section_is_empty_without_simulations() -> None:
    assert rendered().strip() == ""


def test_basis_of_an_answer_is_reported() -> None:
    answer = Answer(question=QUESTIONS[0], value=1.5, rests_on="published point")
    text = template("again.html").render(again={"dgx-h100": [answer]}, ledger=committed.ledger())
    assert 'title="rests on: published point"' in text
