"""What simulations on a system of today answer to the questions: values with their 90 % interval, and words for them.

A question is evaluated by the judge's machinery on the records that `repro run again --evidence simulated --system S`
makes, `again/NAME@S`, under their plain names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from repro.claims.again.questions import Question
from repro.claims.evidence import propagate_unknowns
from repro.claims.expression import ExpressionError, arguments, evaluate
from repro.claims.formulas import CONSTANTS, FORMULAS
from repro.claims.judge import experiments_read
from repro.claims.published import UNITS, append_unit, format_value
from repro.claims.records import Missing, Records
from repro.claims.verdicts import InputUncertainty
from repro.config import systems
from repro.config.errors import ConfigError
from repro.config.system import System
from repro.results.metrics import SPEED
from repro.results.schema import SIMULATED, ExperimentRecord, Record
from repro.results.select import select
from repro.simulate.time.calibration import basis_of_record, weakest_basis

SUITE = "again"
PREDICTIONS = (
    "Predictions of Llamas of the same size in software of 2024, with the 90 % interval that the system's unknown "
    "numbers leave and the model's own error is not in; no verdicts."
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one question comes to on one system."""

    question: Question
    value: float | str | None = None
    """In the row's unit; None: `lacks` says why."""
    low: float | None = None
    """With `high` the 90 % interval of what is not known of the system; None where nothing is in doubt."""
    high: float | None = None
    word: str = ""
    """What the value means, and in brackets what else it would mean in the interval."""
    rests_on: str = ""
    """One of `repro.simulate.time.calibration.BASES`, of what times the value is made of."""
    lacks: str = ""
    """Why there is no value."""
    unrecorded: bool = False
    """Whether that is a record which is not there."""

    @property
    def published(self) -> str:
        """What was published, with its unit."""
        row = self.question.row
        text = f"{row.bound} {row.published}".strip()
        return text if row.printed is None else append_unit(text, row.unit)

    @property
    def text(self) -> str:
        """The value for a person: `1.15x [1.1, 1.2]`."""
        row = self.question.row
        if self.value is None or isinstance(self.value, str):
            return self.value or ""
        text = format_value(self.value, row.printed)
        if self.low is not None and self.high is not None:
            text += f" [{format_value(self.low, row.printed)}, {format_value(self.high, row.printed)}]"
        return append_unit(text, row.unit)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        row = self.question.row
        told = {name: getattr(self, name) for name in ("value", "low", "high", "word", "rests_on", "lacks")}
        return {
            "claim": self.question.claim,
            "row": row.label,
            "asks": self.question.asks,
            "note": self.question.note,
            "published": row.published,
            "unit": row.unit,
            **told,
        }


def how_to_simulate(system: str) -> str:
    """The command that makes the records of a system."""
    return f"repro run {SUITE} --evidence {SIMULATED} --system {system}"


def systems_of(records: Iterable[Record]) -> list[str]:
    """The systems on which the suite has been simulated, by name; not those of a file of somebody's own."""
    names = {record.name.rpartition("@")[2] for record in _asked(records)}
    return [name for name in systems.system_names() if name in names]


def answers(questions: Iterable[Question], records: Iterable[Record], system: System) -> list[Answer]:
    """An answer to each question on `system`."""
    ending = f"@{system.name}"
    of_it = [record for record in _asked(records) if record.name.endswith(ending)]
    of_it = [replace(record, name=record.name.removesuffix(ending)) for record in of_it]
    quantity = system.device.peak_flops.get("bf16")
    peak = None if quantity is None else quantity.value
    named = {name: record for (_, name), record in select(of_it).by_name.items()}
    seen = Records(of_it)
    return [_answer(question, seen, named, peak) for question in questions]


def _asked(records: Iterable[Record]) -> list[ExperimentRecord]:
    """The records of the suite."""
    every = [record for record in records if isinstance(record, ExperimentRecord)]
    return [record for record in every if (record.suite, record.evidence) == (SUITE, SIMULATED)]


def _answer(
    question: Question, records: Records, named: Mapping[str, ExperimentRecord], peak: float | None
) -> Answer:
    row, evidence = question.on(peak), question.evidence()
    read = experiments_read(question.value, row.variables)
    functions = {**FORMULAS, **records.functions(SIMULATED)}
    try:
        timed = _timed(question, named)
        value = evaluate(question.value, functions, {**CONSTANTS, **row.variables}).value
    except Missing as missing:
        return Answer(question=question, lacks=_short(missing), unrecorded=not set(read) <= named.keys())
    except (ConfigError, ExpressionError, KeyError) as error:
        return Answer(question=question, lacks=f"cannot be computed: {error}")
    if isinstance(value, str):
        return Answer(question=question, value=value)
    size = UNITS[row.unit]
    doubt = propagate_unknowns(evidence, row, read, records, functions)
    spread = None if doubt is None else doubt.in_units_of(size)
    return Answer(
        question=question,
        value=value / size,
        low=None if spread is None else spread.low,
        high=None if spread is None else spread.high,
        word=_words(question, value / size, spread),
        rests_on=weakest_basis(map(basis_of_record, timed)),
    )


def _short(missing: Missing) -> str:
    """Why there is no value, without the suite, which is the same for all."""
    return str(missing).replace(f"{SUITE}/", "")


def _timed(question: Question, named: Mapping[str, ExperimentRecord]) -> list[ExperimentRecord]:
    """The records whose seconds the value is made of.

    Raises `Missing` where a rate is read of a step that does not fit: nobody would see it.
    """
    found = []
    for function, texts in arguments(question.value, question.row.variables):
        if function == "metric":
            experiment, name = texts
            record = named.get(experiment)
            if record is None or not name.startswith(SPEED):
                continue
            if record.outcome != "ok":
                raise Missing(experiment, "it does not fit")
            found.append(record)
        elif function == "fastest":
            found += [named[experiment] for experiment in texts[1:] if experiment in named]
    return found


def _words(question: Question, value: float, spread: InputUncertainty | None) -> str:
    best = question.word(value)
    if spread is None:
        return best
    ends = (
        spread.low,
        value,
        *(step for step in question.steps if spread.low < step < spread.high),
        spread.high,
    )
    others = dict.fromkeys(word for word in map(question.word, sorted(ends)) if word != best)
    return f"{best} (or {', '.join(others)})" if others else best
