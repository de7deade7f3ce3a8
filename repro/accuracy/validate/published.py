"""What `repro validate` counts: published throughput against what is predicted, point by point and by family.

A point is a run that was published: one experiment, or a pair of them for a ratio.  A source often prints one
run several ways (milliseconds, TFLOP/s, a share of the peak); the most direct one counts and the others are
listed.  What calibrates the time model, what is stated as a bound, and means of several runs count for
nothing.  Errors are of rates: a time that is predicted 10 % short is a rate 11 % too high.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp
from statistics import median

from repro.accuracy.validate.conformal import Residual, margins, score
from repro.claims.published import UNITS
from repro.claims.tolerance import AcceptedRange, published_range
from repro.claims.verdicts import ClaimResult, Finding, RowResult
from repro.results.metrics import DEVICE_FLOPS_PER_S
from repro.results.schema import SIMULATED, ExperimentRecord, Record
from repro.results.select import select
from repro.simulate.time.calibration import basis_of_record, weakest_basis

RATE, RATIO = "rate", "ratio"
TIMED = ("step_seconds", "samples_per_s", "tokens_per_s", "flops_per_s")
"""An expression that reads one of these metrics is about time."""
TIMES = ("s", "ms", "min", "h", "days")
DIRECT = ("TFLOP/s", "samples/s", "tokens/s", *TIMES, "PFLOP/s")
"""Units of rates and times; of one run the first that is printed counts."""
CLOSE = 0.25
CALIBRATION, BOUND, SEVERAL, SHARE, GAIN = (
    "calibration",
    "a bound",
    "several runs",
    "the same run, as a share of peak",
    "a gain: the small difference of a ratio from 1",
)
V100_MEGATRON, V100_ZERO = "V100 Megatron-LM", "V100 ZeRO and DeepSpeed"
A100_MEGATRON, YUAN, OTHER = "A100 Megatron-LM", "Yuan 1.0", "other"
NODE, CLUSTER = "nodes of 2023 and later", "clusters of 2023 and later"
FAMILIES = (V100_MEGATRON, V100_ZERO, A100_MEGATRON, YUAN, NODE, CLUSTER, OTHER)


ALL_RATES, RATIOS = "all rates", "ratios"
"""The families of all points of a kind."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One row of the ledger and its prediction, in the row's unit."""

    claim: str
    label: str
    kind: str
    """`rate` or `ratio`."""
    family: str
    unit: str
    published: float
    predicted: float
    low: float
    """With `high` the 90 % interval of the prediction; both are `predicted` where nothing is unknown."""
    high: float
    holds: bool
    """Whether the published value, with its own error, lies in that interval."""
    factor: float
    """Predicted over published rate."""
    runs: tuple[str, ...]
    """`suite/name` of the experiments that it reads."""
    certainty: str
    device_flops: float
    """Predicted FLOP/s of one device of a rate's run; 0 for ratios."""
    rests_on: str = ""
    """One of `repro.simulate.time.calibration.BASES`: of a ratio the weaker of its runs'."""
    left_out: str = ""
    """Why it enters no statistics; empty if it does."""
    note: str = ""
    stated: AcceptedRange | None = None
    """The published value with its own error."""
    reports: frozenset[str] = frozenset()
    """Keys of the sources that its claim cites."""
    margin: float | None = None
    """What the model's error in other reports' rows adds to the logarithm of the interval on either side; None where
    these are too few, and of what enters no statistics."""

    @property
    def wider(self) -> tuple[float, float] | None:
        """The interval with that error; None without one."""
        if self.margin is None:
            return None
        return self.low * exp(-self.margin), self.high * exp(self.margin)

    @property
    def holds_wider(self) -> bool:
        """Whether the published value, with its own error, lies in `wider`."""
        return self.wider is not None and self.stated is not None and self.stated.meets(*self.wider)

    @property
    def error(self) -> float:
        """Relative, of the rate; positive where the prediction is too fast."""
        return self.factor - 1

    @property
    def right_side(self) -> bool:
        """Of a ratio: whether the prediction says faster where the source does."""
        one = 1 / UNITS[self.unit]
        return (self.published - one) * (self.predicted - one) > 0

    @property
    def name(self) -> str:
        """`claim/label`, one word for a line of a file."""
        return f"{self.claim}/{self.label.replace(' ', '-')}"


@dataclass(frozen=True, kw_only=True)
class Family:
    """The points of one family that count."""

    name: str
    points: int
    median: float
    """Of the absolute errors."""
    worst: Point
    close: int
    """Points within 25 %."""
    held: int
    """Points whose published value lies in the 90 % interval that inputs leave."""
    wider: int
    """Points that have an interval with the model's error in other reports' rows."""
    held_wider: int
    """Those of them whose published value lies in it."""


def points(judged: Iterable[ClaimResult], records: Iterable[Record]) -> list[Point]:
    """Every row about time that has a simulated value, in the ledger's order."""
    seen = {record.at: record for record in select(records).simulated if record.conclusive}
    found = []
    for result in judged:
        for row in result.rows:
            for finding in row.findings:
                if finding.kind == SIMULATED and any(name in finding.expression for name in TIMED):
                    point = _point(result, row, finding, seen)
                    if point is not None:
                        found.append(point)
    return _with_margins(_once(found))


def _with_margins(found: list[Point]) -> list[Point]:
    """Those that count with what other reports' rows say of the model's error."""
    counted = [point for point in found if not point.left_out]
    residuals = [
        Residual(
            point.kind, point.reports, frozenset(point.runs), score(point.low, point.high, point.published)
        )
        for point in counted
    ]
    margin = {id(point): one for point, one in zip(counted, margins(residuals), strict=True)}
    return [replace(point, margin=margin.get(id(point))) for point in found]


def claims(found: Sequence[Point]) -> list[Family]:
    """The points that count, by claim: of a figure, or of a table."""
    counted = [point for point in found if not point.left_out]
    names = dict.fromkeys(point.claim for point in counted)
    return [_family(name, [point for point in counted if point.claim == name]) for name in names]


def families(found: Sequence[Point]) -> list[Family]:
    """Rates by family, all of them, then ratios; families without a point are left out."""
    counted = [point for point in found if not point.left_out]
    rates = [point for point in counted if point.kind == RATE]
    groups = [(name, [point for point in rates if point.family == name]) for name in FAMILIES]
    groups += [(ALL_RATES, rates), (RATIOS, [point for point in counted if point.kind == RATIO])]
    return [_family(name, group) for name, group in groups if group]


def _family(name: str, group: Sequence[Point]) -> Family:
    return Family(
        name=name,
        points=len(group),
        median=median(abs(point.error) for point in group),
        worst=max(group, key=lambda point: abs(point.error)),
        close=sum(abs(point.error) <= CLOSE for point in group),
        held=sum(point.holds for point in group),
        wider=sum(point.margin is not None for point in group),
        held_wider=sum(point.holds_wider for point in group),
    )


def _point(
    result: ClaimResult, row: RowResult, finding: Finding, seen: Mapping[str, ExperimentRecord]
) -> Point | None:
    value, unit = finding.value, row.row.unit
    if not isinstance(value, int | float) or row.row.printed is None or not value:
        return None
    runs = finding.experiments
    predicted, published = float(value), row.row.printed.value
    left_out = CALIBRATION if row.row.calibrates else BOUND if row.row.bound else ""
    if unit in DIRECT:
        kind = RATE
        left_out = left_out or (SEVERAL if len(runs) != 1 else "")
    else:
        kind = RATIO
        left_out = left_out or (SHARE if len(runs) == 1 else SEVERAL if len(runs) != 2 else "")
        left_out = left_out or (GAIN if row.row.metric == "share" else "")
    record = seen.get(runs[0]) if runs else None
    low, high = (predicted if end is None else float(end) for end in (finding.low, finding.high))
    published_as = published_range(row.row, result.claim)
    return Point(
        claim=result.claim.id,
        label=row.row.label,
        kind=kind,
        family=_family_of_all([seen[run] for run in runs if run in seen]),
        unit=unit,
        published=published,
        predicted=predicted,
        low=low,
        high=high,
        holds=published_as is not None and published_as.meets(low, high),
        stated=published_as,
        reports=frozenset(text.partition(" ")[0] for text in result.claim.source),
        factor=published / predicted if unit in TIMES else predicted / published,
        runs=runs,
        certainty=row.row.certainty,
        device_flops=float(record.metrics.get(DEVICE_FLOPS_PER_S, 0)) if record and kind == RATE else 0.0,
        rests_on=weakest_basis(basis_of_record(seen[run]) for run in runs if run in seen),
        left_out=left_out,
        note=row.row.note,
    )


def family_of(record: ExperimentRecord) -> str:
    """By device, software and size: which machine it is simulated on, and whether ZeRO runs there."""
    from repro.measure.local_system import load_system

    experiment = record.experiment
    if experiment.system == "yuan":
        return YUAN
    system = load_system(experiment.system)
    capability = system.device.compute_capability
    if capability == "7.0":
        return V100_ZERO if experiment.layout.zero else V100_MEGATRON
    if not experiment.layout.kernels.writes_scores:
        return NODE if experiment.layout.world <= (system.devices_per_node.value or 0) else CLUSTER
    return A100_MEGATRON if capability == "8.0" else OTHER


def _family_of_all(records: Sequence[ExperimentRecord]) -> str:
    """Of a ratio that of its subject: the run with ZeRO, if one has it."""
    found = [family_of(record) for record in records]
    return V100_ZERO if V100_ZERO in found else found[0] if found else OTHER


def _once(found: list[Point]) -> list[Point]:
    """Of several rows about the same runs, the most direct one counts: printed before derived, then by unit."""

    def directness(point: Point) -> tuple[bool, int]:
        unit = DIRECT.index(point.unit) if point.unit in DIRECT else 0
        return point.certainty == "derived", unit

    best: dict[tuple[str, tuple[str, ...]], Point] = {}
    for point in found:
        at = (point.kind, tuple(sorted(set(point.runs))))
        if not point.left_out and (at not in best or directness(point) < directness(best[at])):
            best[at] = point
    chosen = {id(point) for point in best.values()}
    return [
        point
        if point.left_out or id(point) in chosen
        else replace(
            point, left_out=f"the same run as {best[point.kind, tuple(sorted(set(point.runs)))].name}"
        )
        for point in found
    ]
