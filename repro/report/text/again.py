"""`repro claims [ID] --system S`: the ledger's throughput and memory claims asked again of another machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from repro.claims.again.answers import PREDICTIONS, Answer, answers, how_to_simulate
from repro.claims.again.questions import ASKED
from repro.claims.again.questions import load as load_questions
from repro.claims.reader import load
from repro.config.errors import ConfigError
from repro.measure.local_system import load_system
from repro.results.store import read
from repro.simulate.time.calibration import BASIS_LABELS, count_bases
from repro.util import table as render
from repro.util.console import WIDE, print_json, stdout
from repro.util.units import NOTHING

if TYPE_CHECKING:
    from rich.console import Console


def print_claims_on_system(claim: str, system: str, json: bool, results: Path) -> int:
    """Print what the store `results` predicts of `system`; 0, or 1 where it has nothing of it, as JSON too.

    Raises `ConfigError` for an unknown system, and for a claim that is unknown or not asked again.
    """
    ledger = load()
    questions = load_questions(ledger)
    if claim:
        family = ledger.claim(claim).family
        asked = tuple(question for question in questions.asked if question.claim == claim)
        if not asked:
            why = questions.left_out.get(claim, f"its family is {family}, not one of {', '.join(ASKED)}")
            raise ConfigError("claim", claim, says=f"is not asked again: {why}")
    else:
        asked = questions.asked
    asked_of = load_system(system)
    name, found = asked_of.name, answers(asked, read(results), asked_of)
    nothing = all(answer.unrecorded for answer in found)
    if json:
        print_json({"system": name, "is": PREDICTIONS, "answers": [answer.as_dict() for answer in found]})
        return int(nothing)
    console = stdout(WIDE)
    if nothing:
        console.print(
            f"Nothing is predicted of {name} in {results}; `{how_to_simulate(system)}` does it.",
            markup=False,
            soft_wrap=True,
        )
        return 1
    print_answers(found, name, console)
    if lacking := sum(answer.unrecorded for answer in found):
        console.print(
            f"{lacking} not simulated yet: `{how_to_simulate(system)}`.", markup=False, soft_wrap=True
        )
    return 0


def print_answers(found: Sequence[Answer], system: str, console: Console) -> None:
    """Print one line per answer, grouped by claim."""
    from rich.text import Text

    headings = ("asked again", "published", f"on {system}", "so", "rests on")
    wrapped = set(headings) - {"rests on"}
    grid = render.table(*headings, left=set(headings), wrap=wrapped)
    before = ""
    for answer in found:
        if answer.question.claim != before:
            before = answer.question.claim
            grid.add_row(Text(before, style="cyan"), "", "", "", "")
        question = answer.question
        note = f" [{question.note}]" if question.note else ""
        grid.add_row(
            f"  {question.asks}{note}",
            answer.published,
            answer.text or NOTHING,
            answer.word or answer.lacks,
            BASIS_LABELS[answer.rests_on],
        )
    console.print(grid)
    console.print()
    console.print(PREDICTIONS)
    if rests_on := count_bases(answer.rests_on for answer in found):
        console.print(rests_on)
