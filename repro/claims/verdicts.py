"""Verdicts about published values, and results of one test, one published value, one kind of evidence and one claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from repro.claims.expression import Value
from repro.claims.ledger import CLOSED_FORM, ITSELF, Claim, Row
from repro.results.interval import possible_range

MAX_MARGIN = 0.25
"""Relative margin above which a test is weak. The margin is the largest change of the tested value, as a share of the
published number, that leaves the verdict unchanged."""
MIN_SHOWN_SHARE = 0.02
"""Minimum share of the total uncertainty that an uncertain input must cause to be listed."""


@dataclass(frozen=True)
class InputUncertainty:
    """Uncertainty of a simulated value: its values over the ranges of the simulation's uncertain inputs."""

    low: float
    """Lower end of a simulated value's 90 % interval over draws of uncertain inputs; contains the best estimate."""
    high: float
    least: float
    """Smallest simulated value over all draws and range ends of uncertain inputs; `most` is the largest such value."""
    most: float
    best: float
    alone: Mapping[str, tuple[float, float]]
    """Values at both ends of each uncertain input's range, with best values of the others, by decreasing effect."""

    def in_units_of(self, size: float) -> InputUncertainty:
        """Return the uncertainty with all its values divided by `size`, the size of a unit."""
        alone = {key: (low / size, high / size) for key, (low, high) in self.alone.items()}
        ends = {name: getattr(self, name) / size for name in ("low", "high", "least", "most", "best")}
        return replace(self, alone=alone, **ends)

    @property
    def shares(self) -> dict[str, float]:
        """Return the effect of each uncertain input on the value, as a share of the sum of all effects."""
        spans = {key: abs(high - low) for key, (low, high) in self.alone.items()}
        total = sum(spans.values()) or 1.0
        return {key: span / total for key, span in spans.items()}

    def largest_unknowns(self, count: int) -> list[tuple[str, float, float, float]]:
        """Return the `count` uncertain inputs of largest effect: key, value at both range ends, share of effects."""
        shares = self.shares
        return [
            (key, *ends, shares[key]) for key, ends in self.alone.items() if shares[key] >= MIN_SHOWN_SHARE
        ][:count]

    def deciding_unknowns(self, meets: Callable[[float, float], bool]) -> tuple[str, ...]:
        """Return the uncertain input whose range alone explains the published value, else the two of largest effect."""
        for key, ends in self.alone.items():
            if meets(*possible_range(ends, self.best)):
                return (key,)
        return tuple(list(self.alone)[:2])


REPRODUCED, NOT_REPRODUCED = "reproduced", "not reproduced"
FOLLOWS, INCONSISTENT = "follows", "inconsistent"
"""Verdicts of arithmetic: a formula or other numbers of the source give the published value, or contradict it."""
POSSIBLE = "possible"
"""Verdict of a prediction that misses the published value, although the ranges of uncertain inputs contain it."""
ERRATUM, DEPENDS = "erratum", "depends"
"""Verdicts of numbers that their own source contradicts, and of agreements that depend on an unpublished condition."""
NOT_COMPARABLE, NOT_RUN, NO_TEST = "not comparable", "not run", "no test"
TESTED = (REPRODUCED, POSSIBLE, DEPENDS, NOT_REPRODUCED)
"""Verdicts about published values that a simulation, a measurement or a count decides."""
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
    """Result of one test of a published value: the simulated, measured or calculated value, and its verdict."""

    kind: str
    scale: str
    origin: str
    """Origin of the tested value, such as `CLOSED_FORM` (formula), `TRACE` (simulation) or `RUN` (processes)."""
    verdict: str
    reason: str
    """Reason for the verdict: the tolerance rule that was applied, or the record that is missing."""
    reading: str = ""
    """Assumption of the test about an unpublished condition; empty without such an assumption."""
    value: Value | None = None
    """Tested value in the unit of the published value; None if the test was not run."""
    low: Value | None = None
    """Lower end of the interval of a value: 95 % confidence if measured, 90 % from uncertain inputs if simulated."""
    high: Value | None = None
    expected: Value | None = None
    """Value that a scaled-down run must have, in the unit of the published value; None: the published value."""
    text: str = ""
    """Displayed text of the tested value and its interval."""
    expression: str = ""
    tolerance: str = ""
    """Text of the values that agree with the published value, such as `29.83 to 32.97 GB: 5% (memory)`."""
    experiments: tuple[str, ...] = ()
    """Experiments from whose records a value is computed, as `suite/name`; empty for a closed form."""
    libraries: tuple[str, ...] = ()
    """Training libraries that ran instead of this suite's own engine, such as `DeepSpeed 0.19.8`."""
    measured_on: str = ""
    """GPU of a one-GPU measurement, or device and day of packaged records of another machine; otherwise empty."""
    is_reference: bool = False
    """Whether the value comes from packaged reference records and not from the user's own records."""
    uncertainty: InputUncertainty | None = None
    """Uncertainty of a simulated value from uncertain inputs, in the unit of the published value."""
    margin: tuple[float, float] | None = None
    """Relative decrease and increase that take an agreeing number to the ends of the accepted range; None for words."""
    deciding: tuple[str, ...] = ()
    """Uncertain inputs that explain the miss of a published value; empty unless the verdict is `possible`."""

    @property
    def machine(self) -> str:
        """Return the text `on DEVICE`, or `as measured on DEVICE` for reference records; empty without a device."""
        if not self.measured_on:
            return ""
        return f"{'as measured on' if self.is_reference else 'on'} {self.measured_on}"

    @property
    def scale_parts(self) -> tuple[str, ...]:
        """Return scale (such as published scale), training libraries and machine of a test, as separate texts."""
        return tuple(part for part in (self.scale, *self.libraries, self.machine) if part)

    @property
    def scale_label(self) -> str:
        """Return scale (such as published scale), training libraries and machine of a test, as one text."""
        return ", ".join(self.scale_parts)

    @property
    def decided(self) -> bool:
        """Return whether a test has a verdict: agrees with or contradicts the published value, or is `possible`."""
        return self.verdict in (*GOOD, POSSIBLE, *BAD)

    @property
    def itself(self) -> bool:
        """Return whether the evidence only compares a source with its own formulas and numbers, which is no test."""
        return self.origin in (CLOSED_FORM, ITSELF)


@dataclass(frozen=True)
class RowResult:
    """Verdict about one published value, and the results of all its tests."""

    row: Row
    findings: tuple[Finding, ...]
    """Results of all tests of a published value, strongest evidence first."""
    verdict: str
    basis: str
    """Kind and scale of the evidence that decides the verdict, such as `one rank of 64`; empty if none decides."""
    reason: str
    margin: tuple[float, float] | None = None
    """Smallest relative decrease and increase of a `reproduced` number that change its verdict; otherwise None."""
    mutations: tuple[str, ...] | None = None
    """Simulator faults, injected as a test, that would change the verdict; None if data/mutations.json has no entry."""

    @property
    def weakness(self) -> str:
        """Return why the test of a reproduced value is weak (tolerates large changes or faults); empty if it is not."""
        finite = [one for one in self.margin or () if one < float("inf") or not self.row.bound]
        is_wide = max(finite, default=0) > MAX_MARGIN
        wide = f"the verdict also holds for values that are more than {MAX_MARGIN:.0%} off" if is_wide else ""
        blind = "no injected simulator fault changes the verdict" if self.mutations == () else ""
        return " and ".join(filter(None, (wide, blind)))

    @property
    def disagrees(self) -> tuple[Finding, ...]:
        """Return the results of weaker evidence that contradict the verdict, which stronger evidence has decided."""
        against = BAD if self.verdict in GOOD else GOOD if self.verdict in BAD else ()
        return tuple(f for f in self.findings if f.verdict in against and self.basis)

    def under(self, kind: str) -> tuple[Finding, ...]:
        """Return comparable results of one kind of evidence; `ITSELF`: comparisons of a source with its own numbers."""
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
    """Verdict about a claim under one kind of evidence, with counts of the published values that decide about it."""

    kind: str
    """Kind of evidence, one of `ledger.KINDS`, or `ledger.ITSELF`: comparisons of a source with its own numbers."""
    scale: str
    """Scales of the evidence, such as `published scale` or `one rank of 64`, joined by `, `."""
    verdict: str
    reproduced: int
    """Number of published values with which this kind of evidence agrees."""
    decided: int
    rows: int
    """Number of published values that this kind of evidence can test."""


@dataclass(frozen=True)
class ClaimResult:
    """Verdict of one claim, and the results of its rows."""

    claim: Claim
    rows: tuple[RowResult, ...]
    kinds: tuple[KindResult, ...]
    """Result for each kind of evidence that can test a published value which counts for the claim's verdict."""
    verdict: str
    basis: str
    """Text of the kinds of evidence that decide, strongest first, with their counts of agreeing and tested values."""
    reason: str
    disagreements: tuple[str, ...]

    @property
    def findings(self) -> list[Finding]:
        """Return the results of all tests of the claim's published values."""
        return [finding for row in self.rows for finding in row.findings]

    def kind(self, name: str) -> KindResult | None:
        """Return the claim's result under a kind of evidence; None if this kind tests no value that counts."""
        return next((k for k in self.kinds if k.kind == name), None)
