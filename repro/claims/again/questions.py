"""What is asked again: a row of the ledger, the expression that answers it on another machine, words for the answer.

    [[question]]
    claim = "ds-3p75x-lowbw"
    row = "throughput over Megatron"                       # of the ledger: what was published, and in which unit
    asks = "1.5B on 16 GPUs: ZeRO 1 over MP 4"
    value = 'metric("again/1.5b-zero1", "samples_per_s") / metric("again/1.5b-mp4", "samples_per_s")'
    words = ["no gain", 1.05, "a smaller gain", 3, "as then"]      # no gain below 1.05, as then from 3 on

An expression names experiments as their suite does; on dgx-h100 it reads `again/1.5b-zero1@dgx-h100`.  `PEAK` is the
system's dense bf16 peak in FLOP/s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from repro.claims.expression import Expression, ExpressionError, check, parse
from repro.claims.formulas import CONSTANTS, FORMULAS
from repro.claims.ledger import PUBLISHED_SCALE, TRACE, Evidence, Ledger, Row
from repro.claims.records import Records
from repro.config.errors import ConfigError
from repro.config.files import build_dataclass, read_toml
from repro.results.schema import SIMULATED

FILE = Path(__file__).with_name("questions.toml")
PEAK = "PEAK"
ASKED = ("throughput", "memory", "limit", "scaling", "time")
"""Families of claims that are asked again, or said why not."""


@dataclass(frozen=True)
class Question:
    """One row of the ledger, to be answered on another system."""

    claim: str
    row: Row
    asks: str
    """What of whom, for a person."""
    value: Expression
    words: tuple[str, ...]
    """One more than `steps`; empty: the number says it."""
    steps: tuple[float, ...]
    """In the row's unit, rising: from the first on the second word holds."""
    note: str = ""
    """What a reader must know of the answer."""

    def word(self, value: float) -> str:
        """What `value`, in the row's unit, means; empty without words."""
        return self.words[sum(value >= step for step in self.steps)] if self.words else ""

    def evidence(self) -> Evidence:
        """The expression as the judge takes it."""
        kind = {"kind": SIMULATED, "scale": PUBLISHED_SCALE, "origin": TRACE}
        return Evidence(**kind, value=self.value, expect=None, metric=self.row.metric)

    def on(self, peak: float | None) -> Row:
        """The row with what an expression may know of a system of this peak, FLOP/s."""
        return replace(self.row, variables={**self.row.variables, **({} if peak is None else {PEAK: peak})})


@dataclass(frozen=True)
class Questions:
    """All of them, in the order of the file."""

    asked: tuple[Question, ...]
    left_out: Mapping[str, str]
    """By claim, why it is not asked again."""


@dataclass(frozen=True, kw_only=True)
class _Entry:
    claim: str
    row: str
    asks: str
    value: str
    words: list[str | float] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class _LeftOut:
    because: str
    claims: list[str]


@dataclass(frozen=True, kw_only=True)
class _File:
    question: list[_Entry]
    left_out: list[_LeftOut] = field(default_factory=list)


def load(ledger: Ledger, file: Path = FILE) -> Questions:
    """Read and check the questions in `file`.  Raises `ConfigError` in one line."""
    content = build_dataclass(_File, read_toml(file), file=str(file))
    left_out = {claim: part.because for part in content.left_out for claim in part.claims}
    try:
        for claim in left_out:
            ledger.claim(claim)
        asked = tuple(_question(entry, ledger) for entry in content.question)
    except ConfigError as error:
        raise error.within(file=str(file)) from None
    for twice in left_out.keys() & {question.claim for question in asked}:
        raise ConfigError("left_out", twice, "a claim that no question asks", file=str(file))
    return Questions(asked, left_out)


def _question(entry: _Entry, ledger: Ledger) -> Question:
    rows = {row.label: row for row in ledger.claim(entry.claim).rows}
    try:
        if entry.row not in rows:
            raise ConfigError("row", entry.row, f"a row of the claim: {', '.join(rows)}")
        words, steps = _scale(entry.words)
        row = rows[entry.row]
        value = _expression(entry.value, row)
        return Question(entry.claim, row, entry.asks, value, words, steps, entry.note)
    except ConfigError as error:
        raise error.within(where=entry.claim) from None


def _scale(given: Iterable[str | float]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Words and the thresholds between them."""
    parts = list(given)
    words, steps = tuple(parts[::2]), tuple(parts[1::2])
    texts = [part for part in words if isinstance(part, str)]
    numbers = [float(part) for part in steps if not isinstance(part, str)]
    rising = all(low < high for low, high in pairwise(numbers))
    if (
        [len(texts), len(numbers)] != [len(words), len(steps)]
        or not rising
        or (parts and len(parts) % 2 == 0)
    ):
        raise ConfigError("words", parts, 'words with rising thresholds between them: ["gone", 1.1, "still"]')
    return tuple(texts), tuple(numbers)


def _expression(text: str, row: Row) -> Expression:
    functions: dict[str, Any] = {**FORMULAS, **Records([]).functions(SIMULATED)}
    try:
        expression = parse(text)
        check(expression, functions, frozenset({*row.variables, *CONSTANTS, PEAK}))
    except ExpressionError as error:
        raise ConfigError("value", text, says=str(error)) from None
    return expression
