"""Types of records: experiments, comparisons, searches for the largest model, times of kernels, evaluations.

A line of the store is one record, a JSON object whose keys are the fields here (`repro.results.json_fields`).
`read_record` accepts lines of all versions of this suite. Times are in seconds, sizes in bytes, work in FLOP.
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
"""Version of the JSON format of result records."""
MEASURED, SIMULATED = "measured", "simulated"
"""Kinds of evidence: a record contains either measured or simulated results."""
EMULATED = "emulated"
"""Label of measured records from a run on an emulated network, in tables and figures."""
CONCLUSIVE = ("ok", "oom", "diverged")
"""Outcomes of a run that a repetition would reproduce; an `error` is not conclusive."""


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
    """Base class of all records: versions, id, time of writing, kind and name."""

    schema: int = SCHEMA
    protocol: int | None = PROTOCOL
    """Version of the measurement protocol, or None if unknown; numbers of different versions are not comparable."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    written: str = field(default_factory=_now)
    """Time at which the record was written, UTC in ISO 8601."""
    sequence: int | None = None
    """Sort key of the record, which the store assigns in the order of writing; None in records of old versions."""
    kind: str = field(default="", init=False)
    suite: str
    name: str

    @property
    def order(self) -> int:
        """Return the sort key of records by age: `sequence`, or the microseconds of `written` in old records."""
        return _microseconds(self.written) if self.sequence is None else self.sequence

    @property
    def label(self) -> str:
        """Return the text `suite/name`, with which claims and captions cite the record."""
        return f"{self.suite}/{self.name}"


class ExperimentConditions:
    """Base class of records that contain the conditions of an experiment: model, layout, system and engine."""

    name: str
    conditions: dict[str, Any]

    @cached_property
    def experiment(self) -> Experiment:
        """Return the experiment that the record's conditions describe; raise `ConfigError` for unknown keys."""
        try:
            return from_dict(self.conditions)
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            right = f"an experiment whose keys this version knows: {error}"
            raise ConfigError("experiment", self.name, right) from None


@dataclass(frozen=True, kw_only=True)
class ExperimentRecord(RecordHead, ExperimentConditions):
    """Outcome and metrics of one measured or simulated run of an experiment."""

    kind: str = field(default="experiment", init=False)
    key: str
    conditions: dict[str, Any] = field(metadata={"key": "experiment"})
    """Conditions of the experiment (model, layout, system, engine and other settings), from `Experiment.as_dict`."""
    evidence: str
    outcome: str
    reason: str
    metrics: dict[str, float]
    """Value of each metric by its name; `repro.results.metrics` describes the names."""
    series: StepSeries
    checkpoints: CheckpointReport | None = None
    flops_formula: str = ""
    memory_by_rank: list[RankMemory] = field(default_factory=list)
    comm: list[TrafficRow] = field(default_factory=list)
    """Communication of rank 0 in one training step."""
    comm_per_layer: list[LayerTraffic] = field(default_factory=list)
    comm_by_rank: list[list[TrafficRow]] = field(default_factory=list)
    software: Software | None = None
    """Engine and libraries that executed a measured experiment."""
    kernels: KernelsRan | None = None
    """Number of ranks by operator and implementation (`cuda` or `torch: REASON`); None in a simulation."""
    network: NetworkReport | None = None
    """Report on the emulated network of a measurement; None if the run used no emulated network."""
    roles: list[SimulatedRole] | None = None
    """Results of a simulation by pipeline role, a set of ranks with identical work; None in a measurement."""
    simulated_on: SimulatedOn | None = None
    interval: StepInterval | None = None
    """Possible step times of a simulation on a system with uncertain inputs; None without uncertain inputs."""
    provenance: Provenance = field(default_factory=dict)
    wall_s: float = 0.0
    copy_of: str | None = None
    """Id of the original record, if this record is a copy for an equal experiment of another suite or name."""

    @property
    def shown_as(self) -> str:
        """Return the displayed kind of evidence: `measured`, `emulated` or `simulated`."""
        emulated = self.evidence == MEASURED and self.conditions.get("network")
        return EMULATED if emulated else self.evidence

    @property
    def conclusive(self) -> bool:
        """Return whether a repetition of the run would reproduce its outcome, which an `error` does not guarantee."""
        return self.outcome in CONCLUSIVE

    @property
    def original(self) -> str:
        """Return the id of the record that this record copies, or its own id if it is no copy."""
        return self.copy_of or self.id

    def copy(self, experiment: Experiment, suite: str) -> ExperimentRecord:
        """Return a copy of the record for an equal experiment of another suite."""
        return replace(
            self,
            id=uuid.uuid4().hex,
            suite=suite,
            name=experiment.name,
            conditions=experiment.as_dict(),
            copy_of=self.original,
        )


@dataclass(frozen=True, kw_only=True)
class Side(RecordPart):
    """One of the two experiments of a comparison: its name and its key (hash of its conditions)."""

    name: str
    key: str


@dataclass(frozen=True, kw_only=True)
class ComparisonRecord(RecordHead):
    """Ratio (subject over baseline) of a metric of two experiments that one launch ran in alternating rounds."""

    kind: str = field(default="comparison", init=False)
    baseline: Side
    subject: Side
    metric: str
    ratio: float
    low: float | None
    """Lower end of the ratio's 95 % interval, whose upper end is `high`; None with too few rounds."""
    high: float | None
    rounds: int
    pairs: list[list[float]] = field(default_factory=list)
    """Values [baseline, subject] of the compared metric in each round."""
    provenance: Provenance = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FitRecord(RecordHead, ExperimentConditions):
    """Result of `repro fit --measure`: the largest model or micro-batch that fits a device, and the smallest that
    fails.

    The record has no rate and no step time, because a trial has two steps. It is no `ExperimentRecord`, so that one
    rank of a layout never counts as a run of the layout.
    """

    kind: str = field(default="fit", init=False)
    conditions: dict[str, Any] = field(metadata={"key": "experiment"})
    """Conditions of the largest trial that fits in memory, or of the smallest failed trial if none fits."""
    evidence: str
    search: str
    """Quantity whose maximum the search finds: `layers` or `micro-batch`."""
    device: str
    limit_bytes: int
    """Memory limit of a device in bytes, including the CUDA context."""
    allocator_limit_bytes: int | None = None
    """Limit of the caching allocator of each process in bytes; 0 without a limit, None if unknown."""
    ranks: int
    """Number of ranks of the parallel layout."""
    one_rank: bool
    """Whether each trial ran a single process with the memory of one rank; otherwise each rank had a process."""
    rank: int | None = None
    """Rank whose memory the single process allocated; None if unknown, or with one process per rank."""
    collectives: str
    """`data` if collectives moved data between processes; `no data` if collectives only allocated their buffers."""
    largest: MeasuredTrial | None = None
    """Trial of the largest size that fits in memory; None if no trial fits."""
    first_failing: MeasuredTrial | None = None
    """Trial of the smallest size that does not fit in memory; None if all trials fit."""
    note: str = ""
    provenance: Provenance = field(default_factory=dict)
    wall_s: float | None = None

    @property
    def conclusive(self) -> bool:
        """Return whether the search found a size that fits and a larger size that runs out of memory."""
        failing = self.first_failing
        return self.largest is not None and failing is not None and failing.outcome == "oom"


@dataclass(frozen=True, kw_only=True)
class KernelsRecord(RecordHead):
    """Measured times of kernels on a device, from `make bench-gpu`."""

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
    """Sizes of the model, with the field names of `repro.config.Model`."""
    weights: dict[str, Any]
    """Format of the weight files (`kind`), and the SHA-256 of each file (`files`)."""
    task: str
    way: dict[str, Any]
    """Evaluation protocol: `name`, `source`, rules that the source specifies, and rules that it leaves open."""
    data: dict[str, Any]
    """Keys `name`, `bytes` and `sha256` (name, size and hash) of the evaluated text file."""
    tokenizer: dict[str, Any]
    layout: dict[str, Any]
    system: str
    outcome: str
    reason: str
    metrics: dict[str, float]
    """Scores of the evaluated weights by metric name; `repro.quality.evaluate.run` describes the names."""
    provenance: Provenance = field(default_factory=dict)
    wall_s: float = 0.0


Record: TypeAlias = ExperimentRecord | ComparisonRecord | FitRecord | KernelsRecord | EvaluationRecord
_KINDS: dict[str, type[Record]] = {
    record.kind: record
    for record in (ExperimentRecord, ComparisonRecord, FitRecord, KernelsRecord, EvaluationRecord)
}
_CONDITIONS = ("model", "layout", "system", "engine")
"""Keys of an experiment's conditions that records of all versions have."""


class NotARecord(ValueError):
    """Error for JSON data that is not a complete record; `str` names the missing or wrong key."""


def read_record(document: Mapping[str, Any]) -> Record:
    """Return the record that a JSON object of the store describes. Raises `NotARecord` if a key is missing or wrong."""
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise NotARecord(f"kind: must be one of {', '.join(_KINDS)}")
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
    """Return an error text if the kind of evidence is unknown or a metric is not a number; else an empty string."""
    if document["evidence"] not in (MEASURED, SIMULATED):
        return f"evidence: {document['evidence'][:20]!r}"
    wrong = [name for name, value in document.get("metrics", {}).items() if type(value) not in (int, float)]
    return f"metrics.{wrong[0]}: of another type" if wrong else ""
