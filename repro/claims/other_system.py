"""Questions that ask whether published claims hold on another system, and simulated predictions that answer them.

    [[question]]
    claim = "ds-3p75x-lowbw"
    row = "throughput over Megatron"                       # row of the ledger: published value and unit
    asks = "1.5B on 16 GPUs: ZeRO 1 over MP 4"
    value = 'metric("again/1.5b-zero1", "samples_per_s") / metric("again/1.5b-mp4", "samples_per_s")'
    words = ["no gain", 1.05, "a smaller gain", 3, "as published"]      # no gain below 1.05, as published from 3 on

`value` reads the suite `again` (Llamas in the published layouts): on dgx-h100, the records `again/NAME@dgx-h100`, which
`repro run again --evidence simulated --system dgx-h100` creates. `PEAK` is the system's dense bf16 peak in FLOP/s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from repro.claims.evidence import propagate_unknowns
from repro.claims.expression import Expression, ExpressionError, arguments, evaluate_expression
from repro.claims.formulas import CONSTANTS, FORMULAS
from repro.claims.judge import experiments_read
from repro.claims.ledger import Ledger, Row
from repro.claims.published import UNITS, append_unit, format_value
from repro.claims.reader import parse_checked
from repro.claims.records import Missing, Records
from repro.claims.verdicts import InputUncertainty
from repro.config import systems
from repro.config.errors import ConfigError, require
from repro.config.files import build_dataclass, read_toml
from repro.config.system import System
from repro.results.metrics import SPEED
from repro.results.schema import SIMULATED, ExperimentRecord, Record
from repro.results.select import select
from repro.simulate.time.calibration import basis_of_record, weakest_basis

SUITE = "again"
QUESTIONS_FILE = Path(__file__).parent / "data" / "questions.toml"
PEAK = "PEAK"
QUESTION_FAMILIES = ("throughput", "memory", "limit", "scaling", "time")
"""Topics whose claims all need a prediction for another system (`[[question]]`), or a reason why there is none."""
PREDICTIONS = (
    "Predictions for Llama models of the published sizes with software of 2024; they get no verdicts. The 90 % "
    "intervals include the uncertainty of the system's inputs, but not the error of the time model."
)


@dataclass(frozen=True)
class SystemQuestion:
    """Question whether a published value holds on another system, with the expression that computes the answer."""

    claim: str
    row: Row
    asks: str
    """Displayed description of the compared experiments, such as `1.5B on 16 GPUs: ZeRO 1 over MP 4`."""
    value: Expression
    words: tuple[str, ...]
    """Words for ranges of the predicted value, such as `slower`, between the thresholds `steps`; empty: no words."""
    steps: tuple[float, ...]
    """Rising thresholds between `words`, in the published unit; a value at a threshold has the word above it."""
    note: str = ""
    """Caveat that is displayed with the predicted value; empty: none."""

    def word(self, value: float) -> str:
        """Return the word for the range with the predicted value, such as `slower`; empty if there are no words."""
        return self.words[sum(value >= step for step in self.steps)] if self.words else ""


@dataclass(frozen=True)
class QuestionSet:
    """Questions whether published claims hold on another system, in file order, and reasons for claims without one."""

    asked: tuple[SystemQuestion, ...]
    left_out: Mapping[str, str]
    """Reason why the file has no question about a claim on another system, by claim id."""


@dataclass(frozen=True, kw_only=True)
class _QuestionEntry:
    claim: str
    row: str
    asks: str
    value: str
    words: list[str | float] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class _LeftOutEntry:
    because: str
    claims: list[str]


@dataclass(frozen=True, kw_only=True)
class _QuestionFile:
    question: list[_QuestionEntry]
    left_out: list[_LeftOutEntry] = field(default_factory=list)


def load_questions(ledger: Ledger, file: Path = QUESTIONS_FILE) -> QuestionSet:
    """Read and check the questions whether claims hold on another system. Raises `ConfigError` for invalid ones."""
    content = build_dataclass(_QuestionFile, read_toml(file), file=str(file))
    left_out = {claim: part.because for part in content.left_out for claim in part.claims}
    try:
        for claim in left_out:
            ledger.claim(claim)
        asked = tuple(_question(entry, ledger) for entry in content.question)
    except ConfigError as error:
        raise error.within(file=str(file)) from None
    for twice in left_out.keys() & {question.claim for question in asked}:
        right = "the id of a claim without a [[question]] table in this file"
        raise ConfigError("left_out", twice, right, file=str(file))
    return QuestionSet(asked, left_out)


def _question(entry: _QuestionEntry, ledger: Ledger) -> SystemQuestion:
    rows = {row.label: row for row in ledger.claim(entry.claim).rows}
    try:
        require(entry.row in rows, "row", entry.row, f"the label of a row of the claim: {', '.join(rows)}")
        words, steps = _words_and_thresholds(entry.words)
        row = rows[entry.row]
        functions = {**FORMULAS, **Records([]).functions(SIMULATED)}
        value = parse_checked("value", entry.value, functions, {*row.variables, PEAK})
        return SystemQuestion(entry.claim, row, entry.asks, value, words, steps, entry.note)
    except ConfigError as error:
        raise error.within(where=entry.claim) from None


def _words_and_thresholds(parts: list[str | float]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Split a list such as `["slower", 1.1, "faster"]` into its words and the thresholds between the words."""
    words = tuple(part for part in parts[::2] if isinstance(part, str))
    steps = tuple(float(part) for part in parts[1::2] if not isinstance(part, str))
    rising = all(low < high for low, high in pairwise(steps))
    if len(words) + len(steps) != len(parts) or not rising or (parts and len(parts) % 2 == 0):
        raise ConfigError(
            "words", parts, 'words with rising thresholds between them: ["slower", 1.1, "faster"]'
        )
    return words, steps


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Whether a published value holds on another system: the simulated value there, or the reason why it is missing."""

    question: SystemQuestion
    value: float | str | None = None
    """Predicted value in the unit of the published value; None: the value is missing."""
    low: float | None = None
    """Lower end of the value's 90 % interval, due to uncertain inputs of the system; None if all inputs are known."""
    high: float | None = None
    word: str = ""
    """Word for the predicted value, such as `slower`; then in brackets, words for other values in its 90 % interval."""
    rests_on: str = ""
    """Least reliable calibration of the simulated step times, a key of `repro.simulate.time.calibration.BASES`."""
    lacks: str = ""
    """Reason why the predicted value is missing; empty if the value exists."""
    unrecorded: bool = False
    """Whether the predicted value is missing because an experiment has no record."""

    @property
    def published(self) -> str:
        """Return the published value with its unit."""
        row = self.question.row
        text = f"{row.bound} {row.published}".strip()
        return text if row.printed is None else append_unit(text, row.unit)

    @property
    def text(self) -> str:
        """Return the predicted value and its interval as displayed, such as `1.15x [1.1, 1.2]`."""
        row = self.question.row
        if self.value is None or isinstance(self.value, str):
            return self.value or ""
        text = format_value(self.value, row.printed)
        if self.low is not None and self.high is not None:
            text += f" [{format_value(self.low, row.printed)}, {format_value(self.high, row.printed)}]"
        return append_unit(text, row.unit)

    def as_dict(self) -> dict[str, Any]:
        """Return the question whether a claim holds on another system, and its answer, as JSON data."""
        row = self.question.row
        keys = ("value", "low", "high", "word", "rests_on", "lacks")
        return {
            "claim": self.question.claim,
            "row": row.label,
            "asks": self.question.asks,
            "note": self.question.note,
            "published": row.published,
            "unit": row.unit,
            **{key: getattr(self, key) for key in keys},
        }


def simulation_command(system: str) -> str:
    """Return the command that simulates the suite `again` (Llama models in the published layouts) on a system."""
    return f"repro run {SUITE} --evidence {SIMULATED} --system {system}"


def simulated_systems(records: Iterable[Record]) -> list[str]:
    """Return the packaged systems on which the suite `again` (Llamas in the published layouts) has been simulated."""
    names = {record.name.rpartition("@")[2] for record in _suite_records(records)}
    return [name for name in systems.system_names() if name in names]


def answer_questions(
    questions: Iterable[SystemQuestion], records: Iterable[Record], system: System
) -> list[Answer]:
    """Return for each question whether the published value holds on `system`, predicted from its simulated records."""
    ending = f"@{system.name}"
    system_records = [
        replace(record, name=record.name.removesuffix(ending))
        for record in _suite_records(records)
        if record.name.endswith(ending)
    ]
    quantity = system.device.peak_flops.get("bf16")
    peak = None if quantity is None else quantity.value
    named = {name: record for (_, name), record in select(system_records).by_name.items()}
    seen = Records(system_records)
    return [_answer(question, seen, named, peak) for question in questions]


def _suite_records(records: Iterable[Record]) -> list[ExperimentRecord]:
    """Return the simulated records of the suite `again` (Llama models in the published layouts)."""
    experiments = (record for record in records if isinstance(record, ExperimentRecord))
    return [record for record in experiments if (record.suite, record.evidence) == (SUITE, SIMULATED)]


def _answer(
    question: SystemQuestion, records: Records, named: Mapping[str, ExperimentRecord], peak: float | None
) -> Answer:
    row = question.row
    if peak is not None:
        row = replace(row, variables={**row.variables, PEAK: peak})
    read = experiments_read(question.value, row.variables)
    functions = {**FORMULAS, **records.functions(SIMULATED)}
    try:
        timed = _timed_records(question, named)
        value = evaluate_expression(question.value, functions, {**CONSTANTS, **row.variables}).value
    except Missing as missing:
        reason = str(missing).replace(f"{SUITE}/", "")  # every experiment has this prefix, so omit it
        return Answer(question=question, lacks=reason, unrecorded=not set(read) <= named.keys())
    except (ConfigError, ExpressionError, KeyError) as error:
        return Answer(question=question, lacks=f"the value cannot be computed: {error}")
    if isinstance(value, str):
        return Answer(question=question, value=value)
    size = UNITS[row.unit]
    uncertainty = propagate_unknowns(question.value, row, read, records, functions)
    low = high = None
    if uncertainty is not None:
        uncertainty = uncertainty.in_units_of(size)
        low, high = uncertainty.low, uncertainty.high
    return Answer(
        question=question,
        value=value / size,
        low=low,
        high=high,
        word=_word_with_alternatives(question, value / size, uncertainty),
        rests_on=weakest_basis(map(basis_of_record, timed)),
    )


def _timed_records(question: SystemQuestion, named: Mapping[str, ExperimentRecord]) -> list[ExperimentRecord]:
    """Return the simulated records whose speed a question reads. Raises `Missing` if a step exceeds the memory."""
    found = []
    for function, texts in arguments(question.value, question.row.variables):
        if function == "metric":
            experiment, name = texts
            record = named.get(experiment)
            if record is None or not name.startswith(SPEED):
                continue
            if record.outcome != "ok":
                raise Missing(experiment, "the step does not fit in memory")
            found.append(record)
        elif function == "fastest":
            found += [named[experiment] for experiment in texts[1:] if experiment in named]
    return found


def _word_with_alternatives(
    question: SystemQuestion, value: float, uncertainty: InputUncertainty | None
) -> str:
    """Return the word for a predicted value, such as `slower`; in brackets, words for other values in its interval."""
    best = question.word(value)
    if uncertainty is None:
        return best
    low, high = uncertainty.low, uncertainty.high
    ends = (low, value, *(step for step in question.steps if low < step < high), high)
    others = dict.fromkeys(word for word in map(question.word, sorted(ends)) if word != best)
    return f"{best} (or {', '.join(others)})" if others else best
