"""Types of records: experiments, comparisons, searches for the largest model, times of kernels, evaluations.

A line of the store is one record, a JSON object whose keys are the fields here (`repro.results.json_fields`). A store
outlives the program that wrote it, and people merge, cut and edit files. `read_record` accepts lines of every version
since the first. For any other line it names the missing or wrong key. Times are in seconds, sizes in bytes, work in
FLOP.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import Any, TypeAlias

from repro.config import PROTOCOL, Experiment
from repro.config.errors import ConfigError
from repro.config.experiment import from_dict
from repro.results.interval import StepInterval
from repro.results.json_fields import RecordPart
from repro.results.record_parts import (
    CheckpointReport,
    KernelsRan,
    LayerTraffic,
    MeasuredTrial,
    NetworkReport,
    Provenance,
    RankMemory,
    SimulatedOn,
    SimulatedRole,
    Software,
    StepSeries,
    TrafficRow,
)

SCHEMA = 1
"""Version of the record's layout."""
MEASURED, SIMULATED = "measured", "simulated"
"""Kinds of evidence of a record."""
EMULATED = "emulated"
"""Name of evidence from an emulated network, whose rates are not the rates of a real machine."""
CONCLUSIVE = ("ok", "oom", "diverged")
"""Outcomes that a further run would only repeat."""


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def _microseconds(time: str) -> int:
    """Return an ISO 8601 time in microseconds since the epoch; 0 for any other text."""
    try:
        moment = datetime.fromisoformat(time.replace("Z", "+00:00"))
    except ValueError:
        return 0
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    return (moment.replace(tzinfo=moment.tzinfo or timezone.utc) - epoch) // timedelta(microseconds=1)


@dataclass(frozen=True, kw_only=True)
class RecordHead(RecordPart):
    """Common first fields of every record."""

    schema: int = SCHEMA
    protocol: int | None = PROTOCOL
    """Version of the measurement protocol; numbers of different versions are not comparable."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    written: str = field(default_factory=_now)
    """UTC, ISO 8601."""
    sequence: int | None = None
    """Position in the order of the store, which assigns it; None in records of versions without the field."""
    kind: str = field(default="", init=False)
    suite: str
    name: str

    @property
    def order(self) -> int:
        """Sort key of the order in which records were appended: `sequence`, else `written` in microseconds."""
        return _microseconds(self.written) if self.sequence is None else self.sequence

    @property
    def label(self) -> str:
        """`suite/name`, as claims and captions cite the record."""
        return f"{self.suite}/{self.name}"


class ExperimentConditions:
    """Base of records with the conditions of an experiment."""

    name: str
    conditions: dict[str, Any]

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment of the conditions. Raises `ConfigError` for unknown conditions of a newer program."""
        try:
            return from_dict(self.conditions)
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            right = f"conditions that this version knows: {error}"
            raise ConfigError("experiment", self.name, right) from None


@dataclass(frozen=True, kw_only=True)
class ExperimentRecord(RecordHead, ExperimentConditions):
    """Outcome and observations of one experiment. Measured and simulated evidence of one key are two records."""

    kind: str = field(default="experiment", init=False)
    key: str
    conditions: dict[str, Any] = field(metadata={"key": "experiment"})
    """Data from `Experiment.as_dict`."""
    evidence: str
    outcome: str
    reason: str
    metrics: dict[str, float]
    """Values by the names of `repro.results.metrics`."""
    series: StepSeries
    checkpoints: CheckpointReport | None = None
    flops_formula: str = ""
    memory_by_rank: list[RankMemory] = field(default_factory=list)
    comm: list[TrafficRow] = field(default_factory=list)
    """Communication of rank 0."""
    comm_per_layer: list[LayerTraffic] = field(default_factory=list)
    comm_by_rank: list[list[TrafficRow]] = field(default_factory=list)
    software: Software | None = None
    """Engine and libraries that executed a measured experiment."""
    kernels: KernelsRan | None = None
    """Implementation of each operator in a measured experiment."""
    network: NetworkReport | None = None
    """Emulated network of a measurement. Such an experiment is a scaled twin, whatever its sizes are."""
    roles: list[SimulatedRole] | None = None
    """Ranks with identical work, in a simulation."""
    simulated_on: SimulatedOn | None = None
    interval: StepInterval | None = None
    """Possible values of `step_seconds.median` in a simulation whose system has unknown numbers."""
    provenance: Provenance = field(default_factory=dict)
    wall_s: float = 0.0
    copy_of: str | None = None
    """Id of the record of the same experiment under another suite or another name."""

    @property
    def shown_as(self) -> str:
        """Displayed kind of evidence: `measured`, `emulated` or `simulated`."""
        emulated = self.evidence == MEASURED and self.conditions.get("network")
        return EMULATED if emulated else self.evidence

    @property
    def conclusive(self) -> bool:
        """Whether a further run would only repeat the outcome."""
        return self.outcome in CONCLUSIVE

    def copy(self, experiment: Experiment, suite: str) -> ExperimentRecord:
        """Return the record of an equal experiment under the names of another suite."""
        return replace(
            self,
            id=uuid.uuid4().hex,
            suite=suite,
            name=experiment.name,
            conditions=experiment.as_dict(),
            copy_of=self.id,
        )


@dataclass(frozen=True, kw_only=True)
class Side(RecordPart):
    """One of two compared experiments."""

    name: str
    key: str


@dataclass(frozen=True, kw_only=True)
class ComparisonRecord(RecordHead):
    """Ratio subject/baseline of two experiments that ran in alternating rounds."""

    kind: str = field(default="comparison", init=False)
    baseline: Side
    subject: Side
    metric: str
    ratio: float
    low: float | None
    """Lower end of the 95 % interval, whose upper end is `high`; None with too few rounds."""
    high: float | None
    rounds: int
    pairs: list[list[float]] = field(default_factory=list)
    """Baseline's value and subject's value of each round."""
    provenance: Provenance = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FitRecord(RecordHead, ExperimentConditions):
    """Largest model or micro-batch that trains in a device's memory, and the smallest that does not.

    `repro fit --measure` writes it. The record has no rate and no step time, because a trial has two steps. It is no
    `ExperimentRecord`, so that one rank of a layout never counts as a run of the layout.
    """

    kind: str = field(default="fit", init=False)
    conditions: dict[str, Any] = field(metadata={"key": "experiment"})
    """Data from `Experiment.as_dict` of the largest trial that fits, or else of the smallest that does not."""
    evidence: str
    search: str
    """Searched quantity: `layers` or `micro-batch`."""
    device: str
    limit_bytes: int
    """Memory limit of a device, context included."""
    allocator_limit_bytes: int | None = None
    """Limit of a process's allocator; 0 without a limit, None in a record from notes."""
    ranks: int
    """Ranks of the layout."""
    one_rank: bool
    """Whether one process ran as one of the `ranks`; otherwise there was one process per rank."""
    rank: int | None = None
    """Rank of that process; None if unknown, or with one process per rank."""
    collectives: str
    """`no data`: collectives allocated their buffers and moved no data; `data`: collectives between processes."""
    largest: MeasuredTrial | None = None
    """Largest trial that fits; None: none fits."""
    first_failing: MeasuredTrial | None = None
    """Smallest trial that does not fit; None: all fit."""
    note: str = ""
    provenance: Provenance = field(default_factory=dict)
    wall_s: float | None = None

    @property
    def conclusive(self) -> bool:
        """Whether a size that fits is next to a size that runs out of memory."""
        failing = self.first_failing
        return self.largest is not None and failing is not None and failing.outcome == "oom"


@dataclass(frozen=True, kw_only=True)
class KernelsRecord(RecordHead):
    """Times of kernels on a device (`make bench-gpu`)."""

    kind: str = field(default="kernels", init=False)
    evidence: str
    device: str
    copy_bytes_per_s: float
    rows: list[dict[str, Any]]
    provenance: Provenance = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(RecordHead):
    """Score of weights on a text under one published evaluation protocol (`repro evaluate`)."""

    kind: str = field(default="evaluation", init=False)
    model: dict[str, Any]
    """Sizes with the names of `repro.config.Model`."""
    weights: dict[str, Any]
    """Format of the weight files (`kind`), and the SHA-256 of each file (`files`)."""
    task: str
    way: dict[str, Any]
    """Fields of `repro.quality.evaluate.samples.EvaluationProtocol`: `name`, `source`, rules and unspecified rules."""
    data: dict[str, Any]
    """`name`, `bytes` and `sha256` of the text."""
    tokenizer: dict[str, Any]
    layout: dict[str, Any]
    system: str
    outcome: str
    reason: str
    metrics: dict[str, float]
    """See `repro.quality.evaluate.run`."""
    provenance: Provenance = field(default_factory=dict)
    wall_s: float = 0.0


Record: TypeAlias = ExperimentRecord | ComparisonRecord | FitRecord | KernelsRecord | EvaluationRecord
_KINDS: dict[str, type[Record]] = {
    record.kind: record
    for record in (ExperimentRecord, ComparisonRecord, FitRecord, KernelsRecord, EvaluationRecord)
}
_CONDITIONS = ("model", "layout", "system", "engine")
"""Conditions of every experiment in all versions of the record."""


class NotARecord(ValueError):
    """JSON data that is not a complete record; `str` names the error in a few words."""


def read_record(document: Mapping[str, Any]) -> Record:
    """Return the record of a line of the store. Raises `NotARecord` if a key is missing or wrong."""
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise NotARecord("kind: a kind of record, such as experiment")
    record = _KINDS[kind]
    lacking = record.wrong(document)
    if not lacking and "written" not in document:
        lacking = "written: missing"
    if not lacking and not isinstance(document.get("sequence", 0), int):
        lacking = "sequence: of another type"
    if not lacking and record in (ExperimentRecord, FitRecord):
        missing = [key for key in _CONDITIONS if key not in document["experiment"]]
        lacking = f"experiment.{missing[0]}: missing" if missing else _unknown(document)
    if lacking:
        raise NotARecord(f"{lacking} in a record of kind {kind}")
    return record.read({"protocol": None, "id": "", **document})


def _unknown(document: Mapping[str, Any]) -> str:
    """Return the unknown kind of evidence, or the first metric that is not a number; else an empty string."""
    if document["evidence"] not in (MEASURED, SIMULATED):
        return f"evidence: {document['evidence'][:20]!r}"
    wrong = [name for name, value in document.get("metrics", {}).items() if type(value) not in (int, float)]
    return f"metrics.{wrong[0]}: of another type" if wrong else ""
