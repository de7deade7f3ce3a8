"""Parts of records: communication, memory, pipeline stages, checkpoints, emulated networks and pipeline roles."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeAlias

from repro.config import EmulatedNetwork
from repro.results.json_fields import RecordPart

Provenance: TypeAlias = dict[str, Any]
"""Facts about the machine, the software and the launcher (`slurm`) with which a record was measured."""
Bytes: TypeAlias = dict[str, int]
"""Bytes by memory category; for a memory peak, `total` is the number of bytes on the device."""
Software: TypeAlias = dict[str, Any]
"""Engine and libraries that executed an experiment, with the fields of `repro.engines.EngineReport`."""
KernelsRan: TypeAlias = dict[str, dict[str, int]]
"""Number of ranks, by operator and by the implementation that executed it: `cuda` or `torch: REASON`.

The only operator is `every operator` if torch is the only choice: on a CPU, or under `kernels = "reference"`.
"""


@dataclass(frozen=True, kw_only=True)
class TrafficRow(RecordPart):
    """Communication of one rank in one training step: one type of collective in one process group for one purpose."""

    op: str
    group: str
    purpose: str = ""
    size: int
    """Number of ranks of the process group."""
    link: str | None = None
    """Slowest class of links that the process group crosses in a simulation; None in a measurement."""
    calls: int
    payload_bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class LayerTraffic(RecordPart):
    """Communication of one transformer block for one micro-batch, averaged over the blocks of a rank."""

    op: str
    group: str
    calls: float
    sent_bytes: float


@dataclass(frozen=True, kw_only=True)
class RankMemory(RecordPart):
    """Memory of a rank, in bytes. Memory by category is missing for a rank whose loss diverged in its first steps."""

    states: Bytes | None = None
    """Bytes of model states after the first step: `parameters`, `gradients`, `optimizer`."""
    peak: Bytes | None = None
    """Bytes by memory category at the peak of the device memory."""
    most: Bytes | None = None
    """Maximum bytes of each memory category over the run."""
    peak_phase: str | None = None
    init_peak_bytes: int | None = None
    rss_peak_bytes: int = 0
    cuda: Bytes = field(default_factory=dict)
    """Peaks and retries of torch's caching allocator on CUDA; empty on a CPU."""
    beside_torch: Bytes | None = None
    """Bytes of GPU memory outside torch's allocator: before NCCL (`start`), at the `end`, and NCCL by process group."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTrial(RecordPart):
    """One trial run of `repro fit --measure`, which searches the largest model that fits in memory."""

    layers: int
    micro_batch: int
    parameters: int
    """Number of parameters of the full model over all ranks."""
    outcome: str
    reason: str = ""
    binding: str = ""
    """Cause of an out-of-memory failure (`allocation`, `fragmentation`, `host memory`), else outcome; empty if ok."""
    memory: RankMemory | None = None
    """Maximum of each memory statistic over the processes of the trial; None without statistics."""


@dataclass(frozen=True, kw_only=True)
class StageReport(RecordPart):
    """Pipeline stage of a rank: maximum number of micro-batches in flight, idle and compute time of each timed step."""

    stage: int
    in_flight: int
    idle_s: list[float]
    """Seconds of each timed step in which the pipeline stage waited for other stages."""
    busy_s: list[float]
    """Seconds of each timed step in which the pipeline stage computed."""
    core_s: list[float]
    """Processor time, in seconds, of the rank's process during the compute phases of each timed step."""


@dataclass(frozen=True, kw_only=True)
class SimulatedFailure(RecordPart):
    """Phase of a simulated step, and bytes in its caching allocator, when a memory request failed."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    """Bytes that the caching allocator had reserved on the device when a memory request failed."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRole(RecordPart):
    """Pipeline role: ranks of a simulated step that execute identical work, with the results of one of these ranks."""

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
    """Maximum bytes that the caching allocator reserves; None if the step does not fit in memory."""
    failure: SimulatedFailure | None = None
    """Out-of-memory failure of a simulated step; None if the step fits in memory."""
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class SimulatedOn(RecordPart):
    """Numbers of the system file that a simulation used.  A record is outdated if the file contains other numbers."""

    system: str
    memory_bytes: float | None
    context_bytes: int
    devices_per_node: float | None
    links: list[str]
    numbers: str
    """Hash of everything that determines the simulated time: numbers of system and calibration, simulator revision."""


@dataclass(frozen=True, kw_only=True)
class StepSeries(RecordPart):
    """Data series of a record: values for each training step of a run, or values over one simulated step."""

    loss: list[float | None] | None = None
    grad_norm: list[float | None] | None = None
    loss_scale: list[float | None] | None = None
    skipped_steps: list[int] | None = None
    step_seconds: list[list[float]] | None = None
    """Seconds of each timed step on the slowest rank, in one list per round."""
    resumed_from: list[int] | None = None
    """Numbers of the steps after which the run continued from a checkpoint."""
    phase_seconds: list[dict[str, float]] | None = None
    """Mean seconds of each phase of a training step over the timed steps, in one dictionary per rank."""
    pipeline: list[dict[str, Any]] | None = None
    """Report on the pipeline stage of each rank as JSON data; empty dictionaries without pipeline parallelism."""
    memory: dict[str, Any] | None = None
    """Live bytes during a simulated step, on a rank of the pipeline role that needs most memory."""
    seconds: dict[str, dict[str, float]] | None = None
    """Seconds of the slowest pipeline stage: `busy` by operator kind, `exposed` (no overlap) by communication kind."""


@dataclass(frozen=True, kw_only=True)
class CheckpointReport(RecordPart):
    """Checkpoints that a training run loaded (`resumed`), wrote and failed to write."""

    resumed: list[dict[str, Any]]
    written: list[int]
    write_seconds: list[float]
    failures: list[dict[str, Any]]
    times: str | None = None
    """Description of the steps whose times the record contains, such as `of all steps`."""


@dataclass(frozen=True, kw_only=True)
class RankResult(RecordPart):
    """Measurements and outcome that one rank reports for one experiment."""

    rank: int
    outcome: str
    reason: str
    loss: list[float]
    grad_norm: list[float | None]
    loss_scale: list[float]
    skipped_steps: list[int]
    checkpoints: CheckpointReport | None = None
    rounds: list[list[float]]
    """Durations of the timed steps in seconds, in one list per round."""
    phase_seconds: dict[str, float]
    pipeline: StageReport | None = None
    software: Software | None = None
    """Engine and libraries that executed the experiment."""
    environment: dict[str, str] | None = None
    """Environment variables that the process of the rank set for its GPU; None on a CPU."""
    kernels: dict[str, list[str]] = field(default_factory=dict)
    """Implementations of each operator that the rank executed: `cuda` or `torch: REASON`."""
    memory: RankMemory
    comm: list[TrafficRow]
    """Communication of the rank in one training step."""
    comm_per_layer: list[LayerTraffic] = field(default_factory=list)
    network: RankOnNetwork | None = None
    """Measurements of the rank on an emulated network; None on a real network."""
    parameters: int
    padding: int = 0


@dataclass(frozen=True, kw_only=True)
class RankOnNetwork(RecordPart):
    """Measurements of a rank on an emulated network.  Bytes are means over the timed steps, headers included."""

    compute_flops_per_s: float
    """Measured FLOP/s of the rank's matrix products before the first training step, while all ranks compute."""
    core_share: float
    """Maximum share of a processor core that the rank may use."""
    sent_bytes: float
    received_bytes: float
    """Bytes that the rank's network interface receives in one step; `sent_bytes` is the number of sent bytes."""
    node_sent_bytes: float | None = None
    node_received_bytes: float | None = None
    """Bytes that the node receives from other nodes in one step; None except on the first rank of the node."""
    facts: dict[str, Any] | None = None
    """Properties and measured rates of the emulated network (`NetworkFacts`); None except on rank 0."""


@dataclass(frozen=True, kw_only=True)
class NetworkReport(RecordPart):
    """Properties of the emulated network on which an experiment ran, and measurements of its ranks and nodes."""

    mtu: int
    payload_share: float
    """Fraction of a link's bytes that is payload, under full load in both directions."""
    rates: dict[str, list[float]]
    """Bytes/s of all links, measured before the run, by kind of link and direction such as `node sends`."""
    round_trip_s: dict[str, float]
    """Round-trip time of one byte, in seconds, `within` a node and `between` nodes."""
    user_namespace: bool
    compute_flops_per_s: list[float]
    """Measured FLOP/s of each rank's matrix products before the first training step, while all ranks compute."""
    core_share: float
    """Maximum share of a processor core that a rank may use, even while other ranks wait."""
    sent_bytes: list[float]
    received_bytes: list[float]
    """Bytes that each rank receives in one step, with headers; `sent_bytes` is the number of sent bytes."""
    node_sent_bytes: list[float]
    node_received_bytes: list[float]
    """Bytes that each node receives from the other nodes in one step."""

    def made(self, network: EmulatedNetwork) -> EmulatedNetwork:
        """Return `network` with measured (median) link rates in place of requested rates, which are then not scaled."""
        within = median(self.rates["rank sends"]) if network.within else 0.0
        between = median(self.rates["node sends"]) if network.between else 0.0
        return replace(network, within=within, between=between, flops_per_s=0.0)

    @classmethod
    def from_ranks(cls, ranks: Sequence[RankOnNetwork]) -> NetworkReport | None:
        """Return the network measurements of all ranks as one report; None if no emulated network was used."""
        if not ranks or (facts := ranks[0].facts) is None:
            return None
        by_rank = ("compute_flops_per_s", "sent_bytes", "received_bytes")
        by_node = ("node_sent_bytes", "node_received_bytes")
        values = {name: [getattr(rank, name) for rank in ranks] for name in (*by_rank, *by_node)}
        known = {name: [one for one in found if one is not None] for name, found in values.items()}
        return cls.read({**facts, **known, "core_share": ranks[0].core_share})


def kernels_of_ranks(results: Sequence[RankResult]) -> KernelsRan:
    """Return the number of ranks that executed each implementation of each operator; empty without rank reports."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for name, hows in result.kernels.items():
            found[name].update(hows)
    return {name: dict(hows) for name, hows in sorted(found.items())}


def kernel_fallbacks(ran: KernelsRan) -> dict[str, list[str]]:
    """Return the operators that torch executed instead of a CUDA kernel, by reason."""
    found: dict[str, list[str]] = {}
    for name, hows in ran.items():
        for how in hows:
            if how != "cuda" and name != "every operator":
                found.setdefault(how.removeprefix("torch: "), []).append(name)
    return found
