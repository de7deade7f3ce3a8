"""Verdicts, and the results that carry them: of evidence, rows, kinds of evidence and claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from repro.claims.expression import Value
from repro.claims.ledger import ITSELF, Claim, Row
from repro.results.interval import possible_range

MIN_SHOWN_SHARE = 0.02
"""Minimum share of the uncertainty of an unknown that is shown."""


@dataclass(frozen=True)
class InputUncertainty:
    """The values of one expression in all cases of its unknown inputs."""

    low: float
    """Lower end of the 90 % interval of joint draws. The interval includes the best value."""
    high: float
    least: float
    """Lower end of all possible values; `most` is the upper end."""
    most: float
    best: float
    alone: Mapping[str, tuple[float, float]]
    """By unknown, the values at both ends of its range; largest effect first."""

    def in_units_of(self, size: float) -> InputUncertainty:
        """Return a copy with every value divided by `size`."""
        alone = {key: (low / size, high / size) for key, (low, high) in self.alone.items()}
        ends = {name: getattr(self, name) / size for name in ("low", "high", "least", "most", "best")}
        return replace(self, alone=alone, **ends)

    @property
    def shares(self) -> dict[str, float]:
        """By unknown, its share of the summed effects of all unknowns."""
        spans = {key: abs(high - low) for key, (low, high) in self.alone.items()}
        whole = sum(spans.values()) or 1.0
        return {key: span / whole for key, span in spans.items()}

    def largest_unknowns(self, count: int) -> list[tuple[str, float, float, float]]:
        """Return (unknown, value at the low end, value at the high end, share) of the `count` largest effects."""
        shares = self.shares
        kept = [
            (key, *ends, shares[key]) for key, ends in self.alone.items() if shares[key] >= MIN_SHOWN_SHARE
        ]
        return kept[:count]

    def deciding_unknowns(self, meets: Callable[[float, float], bool]) -> tuple[str, ...]:
        """Return the unknown that alone explains the published value, else the two unknowns with the largest effects.

        `meets` says whether an interval contains the published value.
        """
        for key, ends in self.alone.items():
            if meets(*possible_range(ends, self.best)):
                return (key,)
        return tuple(list(self.alone)[:2])


REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
CONSISTENT, INCONSISTENT = "consistent", "inconsistent"
"""Verdicts of arithmetic on a source's own numbers or on given answers, which does not test a machine."""
POSSIBLE = "possible"
"""Verdict of a prediction whose best value misses and whose interval from unknown inputs holds the published value."""
NOT_COMPARABLE, NOT_RUN = "not comparable", "not run"
VERDICTS = (REPRODUCED, POSSIBLE, NOT_REPRODUCED, CONSISTENT, INCONSISTENT, NOT_COMPARABLE, NOT_RUN)
GOOD, BAD = (REPRODUCED, CONSISTENT), (NOT_REPRODUCED, INCONSISTENT)


@dataclass(frozen=True)
class Finding:
    """One piece of evidence for one row, with its own verdict."""

    kind: str
    scale: str
    origin: str
    """Where the value gets its inputs: `ledger.CLOSED_FORM`, `COUNT`, `ITSELF`, `TRACE` or `RUN`."""
    verdict: str
    reason: str
    """The rule that was applied, or what is missing."""
    value: Value | None = None
    """In the row's unit; None when not run."""
    low: Value | None = None
    """With `high` the interval of the evidence: of a measurement 95 %; of a predicted time 90 %, as far as inputs are
    not known for certain."""
    high: Value | None = None
    expected: Value | None = None
    """What the formula says at a twin's scale, in the row's unit; None: the published value counts."""
    text: str = ""
    """The value for a person."""
    expression: str = ""
    tolerance: str = ""
    """What is accepted, in words; known before anything was run."""
    experiments: tuple[str, ...] = ()
    """`suite/name` of those that the value comes from, each once; none of a closed form."""
    libraries: tuple[str, ...] = ()
    """What was measured, where it was not this suite's own step: `DeepSpeed 0.19.8`."""
    doubt: InputUncertainty | None = None
    """Of a predicted time: what unknown inputs leave of it, in the row's unit."""
    deciding: tuple[str, ...] = ()
    """Where it is `possible`: the unknown that brings it to what was published, or the two that move it most."""

    @property
    def scale_label(self) -> str:
        """Scale of a measurement, and the libraries that were measured."""
        return ", ".join((self.scale, *self.libraries))

    @property
    def decided(self) -> bool:
        """Whether there was something to judge."""
        return self.verdict in (*GOOD, POSSIBLE, *BAD)

    @property
    def itself(self) -> bool:
        """Whether it only holds a source against itself."""
        return self.origin == ITSELF


@dataclass(frozen=True)
class RowResult:
    """One published value and everything that speaks for or against it."""

    row: Row
    findings: tuple[Finding, ...]
    """Strongest first."""
    verdict: str
    basis: str
    """Kind and scale that the verdict rests on; empty when nothing is decided."""
    reason: str

    @property
    def disagrees(self) -> tuple[Finding, ...]:
        """Weaker decided evidence that does not say what the row's verdict says."""
        against = BAD if self.verdict in GOOD else GOOD if self.verdict in BAD else ()
        return tuple(f for f in self.findings if f.verdict in against and self.basis)

    def under(self, kind: str) -> tuple[Finding, ...]:
        """What one kind of evidence found, or (`ledger.ITSELF`) the source itself; but for what cannot be compared."""
        itself = kind == ITSELF
        found = [
            f
            for f in self.findings
            if f.itself == itself and (itself or f.kind == kind) and f.verdict != NOT_COMPARABLE
        ]
        decided = [f for f in found if f.decided]
        return tuple(decided if itself and decided else found)


@dataclass(frozen=True)
class KindResult:
    """The rows that are the claim under one kind of evidence; what stands beside them does not count."""

    kind: str
    """`analytic`, `simulated`, `measured`; or `ledger.ITSELF`, which none of these three counts."""
    scale: str
    """Of measured evidence: every scale that occurs, joined by `, `."""
    verdict: str
    reproduced: int
    """Rows that agree."""
    decided: int
    rows: int
    """Rows that this kind of evidence could test."""


@dataclass(frozen=True)
class ClaimResult:
    """One claim, judged."""

    claim: Claim
    rows: tuple[RowResult, ...]
    kinds: tuple[KindResult, ...]
    """Only kinds that some row that is the claim can be tested by."""
    verdict: str
    basis: str
    """What the rows that are the claim rest on, strongest first, each with the part of all of them that agree."""
    reason: str
    disagreements: tuple[str, ...]

    def kind(self, name: str) -> KindResult | None:
        """The summary for a kind of evidence or `ledger.ITSELF`; None if it can test none of the claim's own rows."""
        return next((k for k in self.kinds if k.kind == name), None)
