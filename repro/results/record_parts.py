"""Parts of records: traffic, memory, stages, checkpoints, emulated networks and simulated roles of ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeAlias

from repro.config import EmulatedNetwork
from repro.results.json_fields import RecordPart

Provenance: TypeAlias = dict[str, Any]
"""Facts from `repro.measure.provenance`, and the entries of a launcher (`slurm`)."""
Bytes: TypeAlias = dict[str, int]
"""Bytes by category of memory; a peak also has the device's `total`."""
Software: TypeAlias = dict[str, Any]
"""Fields of `repro.engines.EngineReport`."""
KernelsRan: TypeAlias = dict[str, dict[str, int]]
"""Operator -> `cuda` or `torch: REASON` -> number of ranks that ran this implementation.

The only operator is `every operator` where no choice exists: on a CPU, or under `kernels = "reference"`.
"""


@dataclass(frozen=True, kw_only=True)
class TrafficRow(RecordPart):
    """Communication of a rank in one step by one operation, in one group, for one purpose."""

    op: str
    group: str
    purpose: str = ""
    size: int
    """Ranks of the group."""
    link: str | None = None
    """Slowest class of links that the group crosses, in a simulation."""
    calls: int
    payload_bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class LayerTraffic(RecordPart):
    """Communication of one block for one micro-batch, averaged over a rank's blocks."""

    op: str
    group: str
    calls: float
    sent_bytes: float


@dataclass(frozen=True, kw_only=True)
class RankMemory(RecordPart):
    """Memory of a rank, in bytes. A rank that diverged in its first steps has no categories."""

    states: Bytes | None = None
    """Bytes after the first step: `parameters`, `gradients`, `optimizer`."""
    peak: Bytes | None = None
    """Bytes at the moment of the device's largest total."""
    most: Bytes | None = None
    """Maximum of each category over the run."""
    peak_phase: str | None = None
    init_peak_bytes: int | None = None
    rss_peak_bytes: int = 0
    cuda: Bytes = field(default_factory=dict)
    """Statistics of the caching allocator."""
    beside_torch: Bytes | None = None
    """Bytes of a GPU in use outside torch: at the `start`, NCCL's bytes to connect each group, and at the `end`."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTrial(RecordPart):
    """One trial of `repro fit --measure`: its size, its outcome and the memory of its processes."""

    layers: int
    micro_batch: int
    parameters: int
    """Parameters of the full model, whatever share of them a rank holds."""
    outcome: str
    reason: str = ""
    binding: str = ""
    """Kind of the memory failure: `allocation`, `fragmentation` or `host memory`; else the outcome, or empty."""
    memory: RankMemory | None = None
    """Maximum of each number over the processes."""


@dataclass(frozen=True, kw_only=True)
class StageReport(RecordPart):
    """Pipeline stage of a rank: micro-batches in flight, and the seconds of each timed step."""

    stage: int
    in_flight: int
    idle_s: list[float]
    """Wait for other stages, in seconds."""
    busy_s: list[float]
    """Compute time, in seconds."""
    core_s: list[float]
    """Compute time during which the rank had a core, in seconds."""


@dataclass(frozen=True, kw_only=True)
class SimulatedFailure(RecordPart):
    """Moment at which a simulated step ran out of memory."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    """Bytes that the caching allocator had reserved when it could not meet a request."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRole(RecordPart):
    """Ranks of a simulated step with identical work."""

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
    """Bytes that the caching allocator reserves; None where the step does not fit."""
    failure: SimulatedFailure | None = None
    """Failure of a step that does not fit."""
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class SimulatedOn(RecordPart):
    """Inputs of a simulation from a system.  A record with other inputs is out of date."""

    system: str
    memory_bytes: float | None
    context_bytes: int
    devices_per_node: float | None
    links: list[str]
    numbers: str
    """Stands for all that its time depends on."""


@dataclass(frozen=True, kw_only=True)
class StepSeries(RecordPart):
    """Values per step, and the course of one simulated step."""

    loss: list[float | None] | None = None
    grad_norm: list[float | None] | None = None
    loss_scale: list[float | None] | None = None
    skipped_steps: list[int] | None = None
    step_seconds: list[list[float]] | None = None
    """Seconds of the slowest rank in each timed step, by round."""
    resumed_from: list[int] | None = None
    """Steps after which the run continued from a checkpoint."""
    phase_seconds: list[dict[str, float]] | None = None
    """Means over the timed steps, by rank."""
    pipeline: list[dict[str, Any]] | None = None
    """`StageReport` of each rank; empty without a pipeline."""
    memory: dict[str, Any] | None = None
    """Live bytes over a simulated step on its fullest role (`repro.simulate.memory.live_bytes`)."""
    seconds: dict[str, dict[str, float]] | None = None
    """Seconds of a simulation's slowest stage: `busy` by kind of operator, `exposed` by kind of communication."""


@dataclass(frozen=True, kw_only=True)
class CheckpointReport(RecordPart):
    """Checkpoints that a run read, wrote and failed to write."""

    resumed: list[dict[str, Any]]
    written: list[int]
    write_seconds: list[float]
    failures: list[dict[str, Any]]
    times: str | None = None
    """Steps from which the record's times come."""


@dataclass(frozen=True, kw_only=True)
class RankResult(RecordPart):
    """The result of one rank of one experiment."""

    rank: int
    outcome: str
    reason: str
    loss: list[float]
    grad_norm: list[float | None]
    loss_scale: list[float]
    skipped_steps: list[int]
    checkpoints: CheckpointReport | None = None
    rounds: list[list[float]]
    """Duration of the timed steps by round, in seconds."""
    phase_seconds: dict[str, float]
    pipeline: StageReport | None = None
    software: Software | None = None
    """Engine and libraries that executed the experiment."""
    environment: dict[str, str] | None = None
    """Environment variables of a GPU's process that the launcher did not set (`repro.launch.rank.device_settings`)."""
    kernels: dict[str, list[str]] = field(default_factory=dict)
    """Operator -> `cuda` or `torch: REASON`, without duplicates."""
    memory: RankMemory
    comm: list[TrafficRow]
    """Communication of one ordinary step."""
    comm_per_layer: list[LayerTraffic] = field(default_factory=list)
    network: RankOnNetwork | None = None
    """Measurements on an emulated network; None on other networks."""
    parameters: int
    padding: int = 0


@dataclass(frozen=True, kw_only=True)
class RankOnNetwork(RecordPart):
    """Measurements of a rank on an emulated network.  Bytes are means over the timed steps, headers included."""

    compute_flops_per_s: float
    """Rate of matrix products before the first step, while all ranks compute."""
    core_share: float
    """Maximum processor time of the rank per second, in seconds."""
    sent_bytes: float
    received_bytes: float
    """Bytes of one step at the rank's own interface."""
    node_sent_bytes: float | None = None
    node_received_bytes: float | None = None
    """Bytes of one step at the node's interface, on the first rank of each node; else None."""
    facts: dict[str, Any] | None = None
    """Fields of `repro.emulate.network.NetworkFacts`, on rank 0."""


@dataclass(frozen=True, kw_only=True)
class NetworkReport(RecordPart):
    """Emulated network of a measurement, as created and measured. The conditions have the requested network."""

    mtu: int
    payload_share: float
    """Fraction of a link's bytes that is payload, under full load in both directions."""
    rates: dict[str, list[float]]
    """Measured bytes/s of every link before the run, by kind and direction."""
    round_trip_s: dict[str, float]
    """Round trip of one byte `within` a node and `between` nodes, in seconds."""
    user_namespace: bool
    compute_flops_per_s: list[float]
    """Rate of matrix products by rank, before the first step, while all ranks compute."""
    core_share: float
    """Maximum processor time of a rank per second, in seconds, also while other ranks wait."""
    sent_bytes: list[float]
    received_bytes: list[float]
    """Bytes of one step by rank, headers included: means over the timed steps from the interfaces' counters."""
    node_sent_bytes: list[float]
    node_received_bytes: list[float]
    """Bytes of one step by node, over the node's link to the other nodes."""

    def made(self, network: EmulatedNetwork) -> EmulatedNetwork:
        """Return `network` with the link rates that were measured before the run, and no compute rate."""
        within = median(self.rates["rank sends"]) if network.within else 0.0
        between = median(self.rates["node sends"]) if network.between else 0.0
        return replace(network, within=within, between=between, flops_per_s=0.0)

    @classmethod
    def from_ranks(cls, ranks: Sequence[RankOnNetwork]) -> NetworkReport | None:
        """Combine the reports of all ranks; return None without ranks on an emulated network."""
        if not ranks or (facts := ranks[0].facts) is None:
            return None
        by_rank = ("compute_flops_per_s", "sent_bytes", "received_bytes")
        by_node = ("node_sent_bytes", "node_received_bytes")
        values = {name: [getattr(rank, name) for rank in ranks] for name in (*by_rank, *by_node)}
        known = {name: [one for one in found if one is not None] for name, found in values.items()}
        return cls.read({**facts, **known, "core_share": ranks[0].core_share})


def kernels_of_ranks(results: Sequence[RankResult]) -> KernelsRan:
    """Return the kernels of all ranks; empty for records of older versions."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for name, hows in result.kernels.items():
            found[name].update(hows)
    return {name: dict(hows) for name, hows in sorted(found.items())}


def kernel_fallbacks(ran: KernelsRan) -> dict[str, list[str]]:
    """Return the operators that ran in torch instead of a CUDA kernel, by reason."""
    found: dict[str, list[str]] = {}
    for name, hows in ran.items():
        for how in hows:
            if how != "cuda" and name != "every operator":
                found.setdefault(how.removeprefix("torch: "), []).append(name)
    return found
