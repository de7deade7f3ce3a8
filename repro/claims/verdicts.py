"""Verdicts, and the results of evidence, rows, kinds of evidence and claims that contain them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from repro.claims.expression import Value
from repro.claims.ledger import CLOSED_FORM, ITSELF, Claim, Row
from repro.results.interval import possible_range

MAX_MARGIN = 0.25
"""Maximum margin of a test that is not weak, relative to the published number."""
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
    """Map from an unknown to the values at both ends of its range; largest effect first."""

    def in_units_of(self, size: float) -> InputUncertainty:
        """Return a copy with every value divided by `size`."""
        alone = {key: (low / size, high / size) for key, (low, high) in self.alone.items()}
        ends = {name: getattr(self, name) / size for name in ("low", "high", "least", "most", "best")}
        return replace(self, alone=alone, **ends)

    @property
    def shares(self) -> dict[str, float]:
        """Return each unknown's share of the summed effects of all unknowns."""
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

        `meets` returns whether an interval contains the published value.
        """
        for key, ends in self.alone.items():
            if meets(*possible_range(ends, self.best)):
                return (key,)
        return tuple(list(self.alone)[:2])


REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
FOLLOWS, INCONSISTENT = "follows", "inconsistent"
"""Verdicts of arithmetic: a formula or other numbers of the source, or a given answer, give the published value."""
POSSIBLE = "possible"
"""Verdict of a prediction whose best value misses and whose interval from unknown inputs holds the published value."""
ERRATUM, DEPENDS = "erratum", "depends"
"""Verdicts of a printed number that its source corrects, and of a value that agrees under one reading only."""
NOT_COMPARABLE, NOT_RUN, NO_TEST = "not comparable", "not run", "no test"
TESTED = (REPRODUCED, POSSIBLE, DEPENDS, NOT_REPRODUCED)
"""Verdicts of rows that a test decides."""
GOOD, BAD = (REPRODUCED, FOLLOWS), (NOT_REPRODUCED, INCONSISTENT, ERRATUM)
VERDICTS = (
    REPRODUCED,
    POSSIBLE,
    DEPENDS,
    NOT_REPRODUCED,
    FOLLOWS,
    *BAD[1:],
    NOT_COMPARABLE,
    NO_TEST,
    NOT_RUN,
)


@dataclass(frozen=True)
class Finding:
    """One piece of evidence for one row, with its own verdict."""

    kind: str
    scale: str
    origin: str
    """Origin of the inputs: `ledger.CLOSED_FORM`, `COUNT`, `ITSELF`, `TRACE` or `RUN`."""
    verdict: str
    reason: str
    """The applied rule, or the missing record."""
    reading: str = ""
    """Unpublished condition that the evidence assumes, where a row has evidence for several; otherwise empty."""
    value: Value | None = None
    """Value in the row's unit; None if not run."""
    low: Value | None = None
    """Lower end of the evidence's interval: 95 % if measured, 90 % from unknown inputs if predicted."""
    high: Value | None = None
    expected: Value | None = None
    """Value of the formula at a twin's scale, in the row's unit; None: the published value counts."""
    text: str = ""
    """The value for a person."""
    expression: str = ""
    tolerance: str = ""
    """Accepted values in words, independent of any run."""
    experiments: tuple[str, ...] = ()
    """Experiments of the value as `suite/name`, each once; empty for a closed form."""
    libraries: tuple[str, ...] = ()
    """Measured libraries other than this suite's own step: `DeepSpeed 0.19.8`."""
    measured_on: str = ""
    """Device of measurements of one device, and device and day of reference records; otherwise empty."""
    is_reference: bool = False
    """Whether the value comes from reference records and not from the reader's own."""
    doubt: InputUncertainty | None = None
    """Uncertainty of a predicted time from unknown inputs, in the row's unit."""
    margin: tuple[float, float] | None = None
    """Distance of an agreeing number to the low and the high end of the accepted values, relative to the expected
    number; None for words."""
    deciding: tuple[str, ...] = ()
    """Unknown that alone explains the published value, or the two with the largest effects; for `possible` only."""

    @property
    def machine(self) -> str:
        """Return `as measured on` a device of reference records, `on` an own device, or an empty text."""
        if not self.measured_on:
            return ""
        return f"{'as measured on' if self.is_reference else 'on'} {self.measured_on}"

    @property
    def scale_parts(self) -> tuple[str, ...]:
        """Return the scale of a measurement, the measured libraries, and the machine if it is part of the evidence."""
        return tuple(part for part in (self.scale, *self.libraries, self.machine) if part)

    @property
    def scale_label(self) -> str:
        """Return the parts of the scale as one text."""
        return ", ".join(self.scale_parts)

    @property
    def decided(self) -> bool:
        """Return whether a value was judged."""
        return self.verdict in (*GOOD, POSSIBLE, *BAD)

    @property
    def itself(self) -> bool:
        """Return whether it only compares a source with its own formulas and numbers, which is no test."""
        return self.origin in (CLOSED_FORM, ITSELF)


@dataclass(frozen=True)
class RowResult:
    """One published value and all evidence for or against it."""

    row: Row
    findings: tuple[Finding, ...]
    """Strongest first."""
    verdict: str
    basis: str
    """Kind and scale of the deciding evidence; empty when nothing is decided."""
    reason: str
    margin: tuple[float, float] | None = None
    """Smallest margins down and up of the tests that decide a `reproduced` row; None for words and other verdicts."""
    mutations: tuple[str, ...] | None = None
    """Mutations of the simulated system that change the verdict; None if the committed table lacks the row."""

    @property
    def weakness(self) -> str:
        """Return why the test of a `reproduced` row is weak; empty if it is not."""
        finite = [one for one in self.margin or () if one < float("inf") or not self.row.bound]
        wide = f"may move by more than {MAX_MARGIN:.0%}" if max(finite, default=0) > MAX_MARGIN else ""
        return " and ".join(filter(None, (wide, "no mutation changes it" if self.mutations == () else "")))

    @property
    def disagrees(self) -> tuple[Finding, ...]:
        """Return weaker decided evidence whose verdict contradicts that of the row."""
        against = BAD if self.verdict in GOOD else GOOD if self.verdict in BAD else ()
        return tuple(f for f in self.findings if f.verdict in against and self.basis)

    def under(self, kind: str) -> tuple[Finding, ...]:
        """Return the comparable findings of one kind of evidence, or of the source against itself."""
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
    """Main rows of a claim under one kind of evidence; other rows do not count."""

    kind: str
    """`analytic`, `simulated`, `emulated`, `measured`; or `ledger.ITSELF`, which is separate from these."""
    scale: str
    """Every scale of measured evidence, joined by `, `."""
    verdict: str
    reproduced: int
    """Rows that agree."""
    decided: int
    rows: int
    """Rows that this kind of evidence can test."""


@dataclass(frozen=True)
class ClaimResult:
    """One claim, judged."""

    claim: Claim
    rows: tuple[RowResult, ...]
    kinds: tuple[KindResult, ...]
    """Kinds of evidence that can test a main row."""
    verdict: str
    basis: str
    """Bases of the main rows, strongest first, each with its agreeing rows."""
    reason: str
    disagreements: tuple[str, ...]

    @property
    def findings(self) -> list[Finding]:
        """All evidence for or against the claim's rows."""
        return [finding for row in self.rows for finding in row.findings]

    def kind(self, name: str) -> KindResult | None:
        """Return the summary for a kind of evidence or `ledger.ITSELF`; None if it can test none of the main rows."""
        return next((k for k in self.kinds if k.kind == name), None)
