"""What ranks and simulations found, the parts of a record: traffic, memory, stages, checkpoints, simulated roles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from repro.results.network import RankOnNetwork
from repro.results.parts import RecordPart

Provenance: TypeAlias = dict[str, Any]
"""As `repro.measure.provenance` says it, and what a launcher adds (`slurm`)."""
Bytes: TypeAlias = dict[str, int]
"""By category of memory; a peak has the device's `total` too."""
Software: TypeAlias = dict[str, Any]
"""As `repro.engines.about.EngineReport` says it."""
KernelsRan: TypeAlias = dict[str, dict[str, int]]
"""Operator -> `cuda` or `torch: why` -> ranks on which it ran so.

The one operator is `every operator` where there was no choice: on a CPU, or under `kernels = "reference"`.
"""


@dataclass(frozen=True, kw_only=True)
class TrafficRow(RecordPart):
    """What a rank communicates in one step by one operation, in one group, for one purpose."""

    op: str
    group: str
    purpose: str = ""
    size: int
    """Ranks of the group."""
    link: str | None = None
    """Of a simulation: the slowest class of links that the group crosses."""
    calls: int
    payload_bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class LayerTraffic(RecordPart):
    """What one block communicates for one micro-batch, on average over a rank's blocks."""

    op: str
    group: str
    calls: float
    sent_bytes: float


@dataclass(frozen=True, kw_only=True)
class RankMemory(RecordPart):
    """What a rank held.  A rank that diverged in its first steps knows no categories."""

    states: Bytes | None = None
    """After the first step: `parameters`, `gradients`, `optimizer`."""
    peak: Bytes | None = None
    """When the device's total was largest."""
    most: Bytes | None = None
    """The most of each category at any moment."""
    peak_phase: str | None = None
    init_peak_bytes: int | None = None
    rss_peak_bytes: int = 0
    cuda: Bytes = field(default_factory=dict)
    """What the caching allocator says."""
    beside_torch: Bytes | None = None
    """Of a GPU, in use but not by torch: at the `start`, what NCCL took to connect each group, and at the `end`."""


@dataclass(frozen=True, kw_only=True)
class StageReport(RecordPart):
    """A rank's pipeline stage: micro-batches in flight, and of each timed step its seconds."""

    stage: int
    in_flight: int
    idle_s: list[float]
    """Waiting for other stages."""
    busy_s: list[float]
    """Computing."""
    core_s: list[float]
    """Computing and in possession of a core."""


@dataclass(frozen=True, kw_only=True)
class SimulatedFailure(RecordPart):
    """The moment at which a simulated step ran out of memory."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    """By the caching allocator, when it could not meet a request."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRole(RecordPart):
    """Ranks of a simulated step that do the same."""

    name: str
    stage: int
    ranks: int
    parameters: int
    states: Bytes
    peak: Bytes
    most: Bytes
    peak_phase: str
    peak_line: str
    peak_operator: str
    reserved_bytes: int | None
    """By the caching allocator; None where the step does not fit."""
    failure: SimulatedFailure | None = None
    """Of a step that does not fit."""
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class SimulatedOn(RecordPart):
    """What a simulation takes from a system: with other numbers, an older record is out of date."""

    system: str
    memory_bytes: float | None
    context_bytes: int
    devices_per_node: float | None
    links: list[str]
    numbers: str
    """Stands for all that its time depends on."""


@dataclass(frozen=True, kw_only=True)
class StepSeries(RecordPart):
    """What was seen step by step, and over a step."""

    loss: list[float | None] | None = None
    grad_norm: list[float | None] | None = None
    loss_scale: list[float | None] | None = None
    skipped_steps: list[int] | None = None
    step_seconds: list[list[float]] | None = None
    """Of each timed step, by round: those of its slowest rank."""
    resumed_from: list[int] | None = None
    """Steps after which the run went on from a checkpoint."""
    phase_seconds: list[dict[str, float]] | None = None
    """By rank: means over the timed steps."""
    pipeline: list[dict[str, Any]] | None = None
    """By rank: a `StageReport`; empty without a pipeline."""
    memory: dict[str, Any] | None = None
    """Of a simulation, over the step on its fullest role (`repro.simulate.memory.timeline`)."""
    seconds: dict[str, dict[str, float]] | None = None
    """Of a simulation: the slowest stage's, `busy` by kind of operator, `exposed` by kind of communication."""


@dataclass(frozen=True, kw_only=True)
class CheckpointReport(RecordPart):
    """What a run with checkpoints read, wrote and could not write."""

    resumed: list[dict[str, Any]]
    written: list[int]
    write_seconds: list[float]
    failures: list[dict[str, Any]]
    times: str | None = None
    """Of which steps the record's times are."""


@dataclass(frozen=True, kw_only=True)
class RankResult(RecordPart):
    """What one rank hands in of one experiment."""

    rank: int
    outcome: str
    reason: str
    loss: list[float]
    grad_norm: list[float | None]
    loss_scale: list[float]
    skipped_steps: list[int]
    checkpoints: CheckpointReport | None = None
    rounds: list[list[float]]
    """Seconds of the timed steps."""
    phase_seconds: dict[str, float]
    pipeline: StageReport | None = None
    software: Software | None = None
    """Who executed it."""
    environment: dict[str, str] | None = None
    """On a GPU, what of the process's environment its launcher did not know (`repro.launch.rank.device_settings`)."""
    kernels: dict[str, list[str]] = field(default_factory=dict)
    """Operator -> `cuda` or `torch: why`, each once."""
    memory: RankMemory
    comm: list[TrafficRow]
    """Of one ordinary step."""
    comm_per_layer: list[LayerTraffic] = field(default_factory=list)
    network: RankOnNetwork | None = None
    """Of a run on an emulated network."""
    tokens_per_step: int
    samples_per_step: int
    model_flops_per_step: float
    hardware_flops_per_step: float
    flops_formula: str
    parameters: int
    padding: int = 0
