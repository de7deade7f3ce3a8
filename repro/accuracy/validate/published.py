"""Errors of predicted throughput and peak memory against published values, by point and by family of systems.

A point is one published run, or two for a ratio, in its most direct unit. Calibration values, bounds and means of
several runs do not count.

The time model's own error is estimated by split conformal prediction with the score of conformalized quantile
regression (Romano, Patterson and Candes, arXiv:1905.03222): the margin of a point is the ceil((n + 1) 0.9)-th smallest
score of n points that share no report and no run with it. The nominal coverage of 90 % needs exchangeable points, so
`repro validate` counts the covered points. No prediction and no verdict uses the margin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, log
from statistics import median

from repro.claims.published import UNITS
from repro.claims.tolerance import AcceptedRange, published_range
from repro.claims.verdicts import ClaimResult, Finding, RowResult
from repro.results.metrics import DEVICE_FLOPS_PER_S
from repro.results.schema import SIMULATED, ExperimentRecord, Record
from repro.results.select import select
from repro.simulate.time.calibration import basis_of_record, weakest_basis

RATE, RATIO, MEMORY = "rate", "ratio", "memory"
TIMED = ("step_seconds", "samples_per_s", "tokens_per_s", "flops_per_s")
"""Metrics of step time and throughput. The error statistics include published values whose tests read one of them."""
TIMES = ("s", "ms", "min", "h", "days")
DIRECT = ("TFLOP/s", "samples/s", "tokens/s", *TIMES, "PFLOP/s")
"""Units of published rates and times, in order of preference for a run with several published values."""
PEAKS = ("memory.peak_bytes", "memory.reserved_bytes", "memory.used_bytes")
"""Metrics of peak memory: allocated, reserved by torch's allocator, and reserved plus CUDA context."""
BYTES = ("MB", "GB", "TB", "MiB", "GiB")
CLOSE_ERROR, CLOSE_MEMORY_ERROR = 0.25, 0.05
"""Maximum absolute relative error at which a prediction counts as close: for a rate or ratio, and for peak memory."""
COVERAGE = 0.9
"""Nominal coverage of the conformal intervals."""
CALIBRATION, BOUND, SEVERAL, SHARE, GAIN = (
    "calibration",
    "a bound",
    "several runs",
    "a share of peak FLOP/s; the FLOP/s of the same run count already",
    "a gain in percent, whose relative error is large because the gain is small",
)
"""Reasons why a published value does not count in the error statistics."""
V100_MEGATRON, V100_ZERO = "V100 Megatron-LM", "V100 ZeRO and DeepSpeed"
A100_MEGATRON, YUAN, OTHER = "A100 Megatron-LM", "Yuan 1.0", "other"
NODE, CLUSTER = "nodes of 2023 and later", "clusters of 2023 and later"
FAMILIES = (V100_MEGATRON, V100_ZERO, A100_MEGATRON, YUAN, NODE, CLUSTER, OTHER)
ALL_RATES, RATIOS, PEAK_MEMORY = "all rates", "ratios", "peak memory"
"""Names of the statistics over all rates, over all ratios, and over all peak memory values."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One published value and its prediction, in the unit of the published value."""

    claim: str
    label: str
    kind: str
    """`rate`, `ratio` or `memory`."""
    family: str
    """Group of this error: family of systems (for a rate or ratio), or key of the cited source (for peak memory)."""
    unit: str
    published: float
    predicted: float
    low: float
    """Lower end of the prediction's 90 % interval; the prediction itself without uncertain inputs."""
    high: float
    holds: bool
    """Whether the published value, with its own error, overlaps the prediction's 90 % interval."""
    factor: float
    """Ratio of the predicted rate or peak memory to the published one."""
    runs: tuple[str, ...]
    """Experiments that the prediction reads, as `suite/name`."""
    certainty: str
    device_flops: float
    """Predicted FLOP/s per device of the run, for rates; 0 for ratios and memory."""
    rests_on: str = ""
    """Calibration of the predicted time, such as by a published run; for a ratio, the less reliable of both."""
    left_out: str = ""
    """Reason why the published value does not count in the error statistics; empty if it counts."""
    note: str = ""
    stated: AcceptedRange | None = None
    """Range of the published value from its printed digits and its own error; None if the value has no range."""
    reports: frozenset[str] = frozenset()
    """Keys of the sources that the claim cites."""
    margin: float | None = None
    """Conformal margin: log of the factor that widens the 90 % interval at both ends; None: too few predictions."""

    @property
    def wider(self) -> tuple[float, float] | None:
        """Return the prediction's 90 % interval, widened by the margin for the time model's error; None without one."""
        if self.margin is None:
            return None
        return self.low * exp(-self.margin), self.high * exp(self.margin)

    @property
    def holds_wider(self) -> bool:
        """Return whether the published value, with its error, overlaps the prediction's widened 90 % interval."""
        return self.wider is not None and self.stated is not None and self.stated.meets(*self.wider)

    @property
    def error(self) -> float:
        """Return the relative error of the prediction; positive if the predicted rate or peak memory is too large."""
        return self.factor - 1

    @property
    def right_side(self) -> bool:
        """Return whether a predicted ratio is on the same side of 1 as the published one."""
        one = 1 / UNITS[self.unit]
        return (self.published - one) * (self.predicted - one) > 0

    @property
    def name(self) -> str:
        """Return the name of the published value, `claim/label`, with hyphens in place of spaces."""
        return f"{self.claim}/{self.label.replace(' ', '-')}"


@dataclass(frozen=True, kw_only=True)
class FamilyStatistics:
    """Statistics of prediction errors over one group of published values, such as all ratios, without exclusions."""

    name: str
    points: int
    median: float
    """Median absolute relative error of the predictions."""
    worst: Point
    close: int
    """Number of predictions with absolute errors up to `CLOSE_ERROR`, for peak memory `CLOSE_MEMORY_ERROR`."""
    held: int
    """Number of published values that overlap the prediction's 90 % interval from uncertain inputs."""
    wider: int
    """Number of published values whose predictions have a conformal margin for the time model's own error."""
    held_wider: int
    """Number of published values that overlap the 90 % interval widened by the margin for the time model's error."""


def points(judged: Iterable[ClaimResult], records: Iterable[Record]) -> list[Point]:
    """Return published value and prediction of every simulated rate, time, ratio or peak memory, in order of claims."""
    seen = {record.label: record for record in select(records).simulated if record.conclusive}
    found = []
    for result, row in ((claim, row) for claim in judged for row in claim.rows):
        names = PEAKS if row.row.unit in BYTES else TIMED
        for finding in row.findings:
            if finding.kind == SIMULATED and any(name in finding.expression for name in names):
                found.append(_point(result, row, finding, seen))
    return _with_margins(_once([point for point in found if point is not None]))


def _with_margins(found: list[Point]) -> list[Point]:
    """Return `found` with a conformal margin for each prediction that counts in the error statistics."""
    counted = [point for point in found if not point.left_out]
    scores = (conformity_score(one.low, one.high, one.published) for one in counted)
    keys = ((one.kind, one.reports, frozenset(one.runs)) for one in counted)
    residuals = [Residual(*key, score) for key, score in zip(keys, scores, strict=True)]
    margin = {id(point): one for point, one in zip(counted, conformal_margins(residuals), strict=True)}
    return [replace(point, margin=margin.get(id(point))) for point in found]


def claim_statistics(found: Sequence[Point]) -> list[FamilyStatistics]:
    """Return prediction-error statistics of each claim, without published values that are left out."""
    counted = [point for point in found if not point.left_out]
    names = dict.fromkeys(point.claim for point in counted)
    return [_family(name, [point for point in counted if point.claim == name]) for name in names]


def source_statistics(found: Sequence[Point]) -> list[FamilyStatistics]:
    """Return statistics of peak-memory prediction errors by cited source; a claim counts for its first source."""
    memory = [point for point in found if point.kind == MEMORY and not point.left_out]
    names = dict.fromkeys(point.family for point in memory)
    return [_family(name, [point for point in memory if point.family == name]) for name in names]


def family_statistics(found: Sequence[Point]) -> list[FamilyStatistics]:
    """Return error statistics of rates by family of systems, of all rates, ratios and peak memory; no empty groups."""
    counted = [point for point in found if not point.left_out]
    rates = [point for point in counted if point.kind == RATE]
    groups = [(name, [point for point in rates if point.family == name]) for name in FAMILIES]
    groups += [(ALL_RATES, rates), (RATIOS, [point for point in counted if point.kind == RATIO])]
    groups += [(PEAK_MEMORY, [point for point in counted if point.kind == MEMORY])]
    return [_family(name, group) for name, group in groups if group]


def _family(name: str, group: Sequence[Point]) -> FamilyStatistics:
    return FamilyStatistics(
        name=name,
        points=len(group),
        median=median(abs(point.error) for point in group),
        worst=max(group, key=lambda point: abs(point.error)),
        close=sum(abs(point.error) <= close_error(point.kind) for point in group),
        held=sum(point.holds for point in group),
        wider=sum(point.margin is not None for point in group),
        held_wider=sum(point.holds_wider for point in group),
    )


def close_error(kind: str) -> float:
    """Return the absolute relative error up to which a prediction of this kind counts as close."""
    return CLOSE_MEMORY_ERROR if kind == MEMORY else CLOSE_ERROR


def _point(
    result: ClaimResult, row: RowResult, finding: Finding, seen: Mapping[str, ExperimentRecord]
) -> Point | None:
    value, unit = finding.value, row.row.unit
    if not isinstance(value, int | float) or row.row.printed is None or not value:
        return None
    runs = finding.experiments
    predicted, published = float(value), row.row.printed.value
    left_out = CALIBRATION if row.row.calibrates else BOUND if row.row.bound else ""
    if unit in (*DIRECT, *BYTES):
        kind = MEMORY if unit in BYTES else RATE
        left_out = left_out or (SEVERAL if len(runs) != 1 else "")
    else:
        kind = RATIO
        left_out = left_out or (SHARE if len(runs) == 1 else SEVERAL if len(runs) != 2 else "")
        left_out = left_out or (GAIN if row.row.metric == "share" else "")
    record = seen.get(runs[0]) if runs else None
    low, high = (predicted if end is None else float(end) for end in (finding.low, finding.high))
    published_as = published_range(row.row, result.claim)
    reports = [text.partition(" ")[0] for text in result.claim.source]
    return Point(
        claim=result.claim.id,
        label=row.row.label,
        kind=kind,
        family=reports[0] if kind == MEMORY else _family_of_all([seen[run] for run in runs if run in seen]),
        unit=unit,
        published=published,
        predicted=predicted,
        low=low,
        high=high,
        holds=published_as is not None and published_as.meets(low, high),
        stated=published_as,
        reports=frozenset(reports),
        factor=published / predicted if unit in TIMES else predicted / published,
        runs=runs,
        certainty=row.row.certainty,
        device_flops=float(record.metrics.get(DEVICE_FLOPS_PER_S, 0)) if record and kind == RATE else 0.0,
        rests_on=weakest_basis(basis_of_record(seen[run]) for run in runs if run in seen),
        left_out=left_out,
        note=row.row.note,
    )


def _family_of(record: ExperimentRecord) -> str:
    """Return the family of a simulated run, such as `A100 Megatron-LM`, from device, software and number of nodes."""
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
    """Return the family of a prediction's runs: ZeRO on V100 if any run belongs to it, else that of the first run."""
    found = [_family_of(record) for record in records]
    return V100_ZERO if V100_ZERO in found else found[0] if found else OTHER


def _once(found: list[Point]) -> list[Point]:
    """Return all published values; of several about the same runs, all but the most direct are marked as left out."""

    def directness(point: Point) -> tuple[bool, int]:
        unit = DIRECT.index(point.unit) if point.unit in DIRECT else 0
        return point.certainty == "derived", unit

    best: dict[tuple[str, tuple[str, ...]], Point] = {}
    for point in found:
        at = (point.kind, tuple(sorted(set(point.runs))))
        if not point.left_out and (at not in best or directness(point) < directness(best[at])):
            best[at] = point
    once = []
    for point in found:
        chosen = best.get((point.kind, tuple(sorted(set(point.runs)))), point)
        again = not point.left_out and chosen is not point
        once.append(replace(point, left_out=f"same run as {chosen.name}, which counts") if again else point)
    return once


@dataclass(frozen=True)
class Residual:
    """Conformity score of one prediction, with the sources and runs by which `apart` tests its independence."""

    kind: str
    """Kind of the predicted value, `rate`, `ratio` or `memory`; only scores of one kind are compared."""
    reports: frozenset[str]
    """Keys of the sources that the claim cites."""
    runs: frozenset[str]
    """Experiments that the prediction reads, because two sources may report the same experiment."""
    score: float

    def apart(self, other: Residual) -> bool:
        """Return whether two predictions share no source and no run."""
        return not (self.reports & other.reports or self.runs & other.runs)


def conformity_score(low: float, high: float, published: float) -> float:
    """Return the distance of log(published) outside the interval [log(low), log(high)]; inside, it is negative."""
    return max(log(low) - log(published), log(published) - log(high))


def conformal_margins(residuals: Sequence[Residual]) -> list[float | None]:
    """Return the conformal margin of each prediction from the scores of independent ones; None if these are too few."""
    return [
        conformal_margin([other.score for other in residuals if other.kind == own.kind and own.apart(other)])
        for own in residuals
    ]


def conformal_margin(scores: Sequence[float]) -> float | None:
    """Return the conformal quantile of `scores` for the coverage `COVERAGE`, at least 0; None for too few scores."""
    rank = ceil((len(scores) + 1) * COVERAGE)
    return max(0.0, sorted(scores)[rank - 1]) if rank <= len(scores) else None
