"""The ledger: every published claim, as the TOML files beside this module have it.

A claim has rows; a row is one published value with the expressions that test it.  Rows are written one by
one (`rows`) or as a table like the source's (`[[claim.table]]`), whose `cells` say which columns are
claims and may use the other columns of the line by name.  `docs/claims.md` shows how to add one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from repro.claims.expression import Expression, Uncertain, Value
from repro.claims.published import PrintedNumber
from repro.config.errors import ConfigError
from repro.results.schema import EMULATED

KINDS = ("analytic", "simulated", EMULATED, "measured")
"""Of evidence, the weakest first.  `emulated`: real processes that train a small twin on this machine, behind links
that are as slow as its compute, so that the ratio of two runs can be held against the published one."""
CERTAINTIES = {
    "confirmed": "read in the primary text",
    "second-hand": "read in a source that quotes the primary one",
    "press only": "only in a press article",
    "digitised": "measured by pixel from a published figure; the error is stated",
    "derived": "arithmetic on confirmed numbers, not published as such",
    "unconfirmed": "remembered; no text found",
}
FAMILIES = (
    "memory",
    "limit",
    "communication",
    "throughput",
    "scaling",
    "time",
    "configuration",
    "quality",
    "harness",
)
PUBLISHED_SCALE, SCALED_TWIN, ONE_RANK = "published scale", "scaled twin", "one rank of "
EMULATED_NETWORK = "scaled twin, emulated network"
CLOSED_FORM, COUNT = "closed form", "count of what is committed"
ITSELF, TRACE, RUN = "the source against itself", "trace", "run"
"""Where evidence gets its inputs (`repro.claims.independence`): a formula of a paper and sizes; scripts of this
repository; other numbers of the same source, or an answer that was put in; a simulated step; real processes."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where claims were published; `[[source]]` in sources.toml."""

    key: str
    """What claims cite, for example `ZERO3`."""
    title: str
    where: str
    """arXiv number, repository and commit, or publisher."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One way to test a row."""

    kind: str
    """One of `KINDS`."""
    scale: str
    """`published scale`, `one rank of N`, `scaled twin`, `scaled twin, emulated network`; analytic: the same as
    `origin`."""
    origin: str
    """`CLOSED_FORM`, `COUNT`, `ITSELF`, `TRACE` or `RUN`."""
    value: Expression
    """In bytes, seconds, FLOP or plain numbers."""
    expect: Expression | None
    """What the same formula says at the twin's own scale; None: compare with the published value."""
    metric: str
    """Class of tolerance, a key of `tolerance.RELATIVE`."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published value."""

    label: str
    published: str
    """As printed, without the unit."""
    printed: PrintedNumber | None
    """`published` as a number; None where it is a formula or words."""
    unit: str
    """A key of `published.UNITS`."""
    metric: str
    """Class of tolerance, a key of `tolerance.RELATIVE`."""
    bound: str
    """How the source states it: empty (equal), `over`, `at least`, `under`, `at most`, `up to`."""
    error: float
    """Of digitisation, in `unit`; 0 where nothing was digitised."""
    certainty: str
    evidence: tuple[Evidence, ...]
    calibrates: str
    """What the time model takes from this value, a `name` of simulate/time/calibration_points.toml: a simulation that
    knows the answer is no evidence.  Empty: nothing."""
    blind: PrintedNumber | None
    """What the suite predicted, in `unit`, before anybody who worked on it knew `published`."""
    needs: str
    """Hardware and run that would measure it."""
    not_comparable: str
    """Why nothing can be compared with it; empty where something can."""
    note: str
    main: bool = True
    """Whether it is the claim.  A row that is not is shown and judged, and carries nothing."""
    given: str = ""
    """What of the answer is an input, of ours or of the suite; such a row can be consistent and no more."""
    variables: Mapping[str, Value | Uncertain] = field(default_factory=dict, compare=False)
    """The other columns of the row's line, for its expressions."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim of one source."""

    id: str
    title: str
    """The claim in one sentence."""
    family: str
    """One of `FAMILIES`; suites and the report group by it."""
    published: str
    """The published value for a person, in one line."""
    conditions: str
    source: tuple[str, ...]
    """Each is a source key and a place in it: `ZERO3 sec. 3.1 p.8`."""
    certainty: str
    """A key of `CERTAINTIES`."""
    contradictions: tuple[str, ...]
    """Where sources disagree with each other or with themselves."""
    note: str
    needs: str
    steps: tuple[float, ...]
    """Model sizes that the source tried, for class `limit`."""
    rows: tuple[Row, ...]
    file: str
    """Name of the ledger file."""
    predicted_blind: str = ""
    """Day and commit of the predictions in its rows' `blind`; empty where there are none."""

    @property
    def prediction(self) -> str:
        """When its rows were predicted blind, and the median of |predicted / published - 1|; else empty."""
        errors = [
            abs(row.blind.value / row.printed.value - 1) for row in self.rows if row.blind and row.printed
        ]
        if not errors:
            return ""
        return f"blind on {self.predicted_blind}: {len(errors)} values, median error {median(errors):.1%}"


@dataclass(frozen=True)
class Ledger:
    """All claims, in the order of the files; and their sources by key."""

    claims: tuple[Claim, ...]
    sources: Mapping[str, Source]
    titles: Mapping[str, str]
    """Title of each ledger file, by file name."""
    about: Mapping[str, str]
    """Whose claims a ledger file has, by file name: `ZeRO`, `Megatron`."""

    def claim(self, claim_id: str) -> Claim:
        """The claim of that id.  Raises `ConfigError` with near matches."""
        for claim in self.claims:
            if claim.id == claim_id:
                return claim
        import difflib

        known = [claim.id for claim in self.claims]
        near = difflib.get_close_matches(claim_id, known, n=3, cutoff=0.4)
        near += [k for k in known if claim_id and claim_id in k and k not in near][: 3 - len(near)]
        hint = (
            f"no such claim; did you mean {' or '.join(near)}?"
            if near
            else "must be a claim's id; `repro claims` lists them"
        )
        raise ConfigError("claim", claim_id, says=hint)
