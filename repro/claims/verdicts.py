"""Verdicts, and the results of single tests, rows, kinds of evidence and claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from repro.claims.expression import Value
from repro.claims.ledger import CLOSED_FORM, ITSELF, Claim, Row
from repro.results.interval import possible_range

MAX_MARGIN = 0.25
"""Margin, relative to the published number, above which a test counts as weak."""
MIN_SHOWN_SHARE = 0.02
"""Minimum share of the total uncertainty for an unknown input to be listed."""


@dataclass(frozen=True)
class InputUncertainty:
    """Range of one expression over the ranges of its unknown inputs."""

    low: float
    """Lower end of the 90 % interval of joint draws. The interval includes the best value."""
    high: float
    least: float
    """Smallest possible value; `most` is the largest."""
    most: float
    best: float
    alone: Mapping[str, tuple[float, float]]
    """Values of the expression at both ends of the range of one unknown input, by input; largest effect first."""

    def in_units_of(self, size: float) -> InputUncertainty:
        """Return a copy with every value divided by `size`."""
        alone = {key: (low / size, high / size) for key, (low, high) in self.alone.items()}
        ends = {name: getattr(self, name) / size for name in ("low", "high", "least", "most", "best")}
        return replace(self, alone=alone, **ends)

    @property
    def shares(self) -> dict[str, float]:
        """Return the effect of each unknown input, as a share of the summed effects of all of them."""
        spans = {key: abs(high - low) for key, (low, high) in self.alone.items()}
        total = sum(spans.values()) or 1.0
        return {key: span / total for key, span in spans.items()}

    def largest_unknowns(self, count: int) -> list[tuple[str, float, float, float]]:
        """Return (unknown, value at the low end, value at the high end, share) of the `count` largest effects."""
        shares = self.shares
        return [
            (key, *ends, shares[key]) for key, ends in self.alone.items() if shares[key] >= MIN_SHOWN_SHARE
        ][:count]

    def deciding_unknowns(self, meets: Callable[[float, float], bool]) -> tuple[str, ...]:
        """Return the unknown input whose range alone reaches the published value, else the two with largest effects.

        `meets` returns whether an interval contains the published value.
        """
        for key, ends in self.alone.items():
            if meets(*possible_range(ends, self.best)):
                return (key,)
        return tuple(list(self.alone)[:2])


REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
FOLLOWS, INCONSISTENT = "follows", "inconsistent"
"""Verdicts of arithmetic: formulas or other numbers of the source give the published value, or contradict it."""
POSSIBLE = "possible"
"""Verdict of a prediction that misses the published value, which is inside the interval from unknown inputs."""
ERRATUM, DEPENDS = "erratum", "depends"
"""Verdicts of a printed number that its source corrects, and of a value that agrees under some readings only."""
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
    """Result of one piece of evidence for one row: its value and its own verdict."""

    kind: str
    scale: str
    origin: str
    """Origin of the value: `ledger.CLOSED_FORM`, `COUNT`, `ITSELF`, `TRACE` or `RUN`."""
    verdict: str
    reason: str
    """Tolerance rule that decided, or the missing record."""
    reading: str = ""
    """Unpublished condition that the evidence assumes, if the row tests several conditions; otherwise empty."""
    value: Value | None = None
    """Value in the row's unit; None if not run."""
    low: Value | None = None
    """Lower end of the value's interval: 95 % if measured, 90 % from unknown inputs if simulated."""
    high: Value | None = None
    expected: Value | None = None
    """Expected value at the scale of a scaled-down twin, in the row's unit; None: the published value."""
    text: str = ""
    """Value as displayed, with its interval."""
    expression: str = ""
    tolerance: str = ""
    """Accepted values in words, independent of any run."""
    experiments: tuple[str, ...] = ()
    """Experiments that the value reads, as `suite/name`; empty for a closed form."""
    libraries: tuple[str, ...] = ()
    """Training libraries that ran instead of this suite's own engine, such as `DeepSpeed 0.19.8`."""
    measured_on: str = ""
    """Device of a one-GPU measurement, or device and day of reference records; otherwise empty."""
    is_reference: bool = False
    """Whether the value comes from packaged reference records and not from the user's own records."""
    uncertainty: InputUncertainty | None = None
    """Uncertainty of a simulated value from unknown inputs, in the row's unit."""
    margin: tuple[float, float] | None = None
    """Distance of an agreeing number to the low and the high end of the accepted values, relative to the expected
    number; None for words."""
    deciding: tuple[str, ...] = ()
    """Unknown inputs that explain the distance to the published value; for the verdict `possible` only."""

    @property
    def machine(self) -> str:
        """Return `on DEVICE`, or `as measured on DEVICE` for reference records; empty without a device."""
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
        """Return whether the evidence agrees with or contradicts the published value, or is `possible`."""
        return self.verdict in (*GOOD, POSSIBLE, *BAD)

    @property
    def itself(self) -> bool:
        """Return whether the evidence only compares a source with its own formulas and numbers, which is no test."""
        return self.origin in (CLOSED_FORM, ITSELF)


@dataclass(frozen=True)
class RowResult:
    """One published value and all evidence for or against it."""

    row: Row
    findings: tuple[Finding, ...]
    """Results of all evidence, strongest evidence first."""
    verdict: str
    basis: str
    """Kind and scale of the deciding evidence; empty if no evidence decides."""
    reason: str
    margin: tuple[float, float] | None = None
    """Smallest margins down and up of the tests that decide a `reproduced` row; None for words and other verdicts."""
    mutations: tuple[str, ...] | None = None
    """Faults of the simulator that change the verdict; None if data/mutations.json does not contain the row."""

    @property
    def weakness(self) -> str:
        """Return why the test of a `reproduced` row is weak; empty if it is not."""
        finite = [one for one in self.margin or () if one < float("inf") or not self.row.bound]
        wide = (
            f"value may change by more than {MAX_MARGIN:.0%}" if max(finite, default=0) > MAX_MARGIN else ""
        )
        return " and ".join(filter(None, (wide, "no mutation changes it" if self.mutations == () else "")))

    @property
    def disagrees(self) -> tuple[Finding, ...]:
        """Return the evidence whose verdict contradicts that of the row; it is weaker than the deciding evidence."""
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
    """Verdict and counts of a claim's main rows under one kind of evidence."""

    kind: str
    """`analytic`, `simulated`, `emulated`, `measured`, or `ledger.ITSELF` for comparisons of a source with itself."""
    scale: str
    """Scales of the evidence, joined by `, `."""
    verdict: str
    reproduced: int
    """Number of rows whose evidence agrees."""
    decided: int
    rows: int
    """Number of rows that this kind of evidence can test."""


@dataclass(frozen=True)
class ClaimResult:
    """Verdict of one claim, and the results of its rows."""

    claim: Claim
    rows: tuple[RowResult, ...]
    kinds: tuple[KindResult, ...]
    """Kinds of evidence that can test a main row."""
    verdict: str
    basis: str
    """Kinds of evidence that decide the main rows, strongest first, each with its agreeing and decided rows."""
    reason: str
    disagreements: tuple[str, ...]

    @property
    def findings(self) -> list[Finding]:
        """Results of all evidence for the claim's rows."""
        return [finding for row in self.rows for finding in row.findings]

    def kind(self, name: str) -> KindResult | None:
        """Return the summary for a kind of evidence or `ledger.ITSELF`; None if it can test none of the main rows."""
        return next((k for k in self.kinds if k.kind == name), None)
