"""Parts of records: communication, memory, pipeline stages, checkpoints, emulated networks and simulated roles."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeAlias

from repro.config import EmulatedNetwork
from repro.results.json_fields import RecordPart

Provenance: TypeAlias = dict[str, Any]
"""Facts about machine and software from `repro.measure.provenance`, and facts of a launcher (`slurm`)."""
Bytes: TypeAlias = dict[str, int]
"""Bytes by category of memory; a peak also has their `total` on the device."""
Software: TypeAlias = dict[str, Any]
"""Fields of `repro.engines.EngineReport`."""
KernelsRan: TypeAlias = dict[str, dict[str, int]]
"""Number of ranks that ran an implementation, `cuda` or `torch: REASON`, by operator and implementation.

The only operator is `every operator` if torch is the only choice: on a CPU, or under `kernels = "reference"`.
"""


@dataclass(frozen=True, kw_only=True)
class TrafficRow(RecordPart):
    """Communication of a rank in one step by one collective, in one group, for one purpose."""

    op: str
    group: str
    purpose: str = ""
    size: int
    """Number of ranks of the group."""
    link: str | None = None
    """Slowest class of links that the group crosses in a simulation; None in a measurement."""
    calls: int
    payload_bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class LayerTraffic(RecordPart):
    """Communication of a transformer block for one micro-batch, averaged over a rank's blocks."""

    op: str
    group: str
    calls: float
    sent_bytes: float


@dataclass(frozen=True, kw_only=True)
class RankMemory(RecordPart):
    """Memory of a rank, in bytes. A rank that diverged in its first steps has no `states`, `peak` and `most`."""

    states: Bytes | None = None
    """Bytes of model states after the first step: `parameters`, `gradients`, `optimizer`."""
    peak: Bytes | None = None
    """Bytes by category when their total on the device was largest."""
    most: Bytes | None = None
    """Maximum bytes of each category over the run."""
    peak_phase: str | None = None
    init_peak_bytes: int | None = None
    rss_peak_bytes: int = 0
    cuda: Bytes = field(default_factory=dict)
    """Statistics of torch's caching allocator on CUDA; empty on a CPU."""
    beside_torch: Bytes | None = None
    """GPU memory outside torch's allocator: at the `start`, at the `end`, and NCCL's memory of each group."""


@dataclass(frozen=True, kw_only=True)
class MeasuredTrial(RecordPart):
    """One trial of `repro fit --measure`: its size, its outcome and the memory of its processes."""

    layers: int
    micro_batch: int
    parameters: int
    """Number of parameters of the full model over all ranks."""
    outcome: str
    reason: str = ""
    binding: str = ""
    """Cause of a memory failure: `allocation`, `fragmentation` or `host memory`; otherwise the outcome, or empty."""
    memory: RankMemory | None = None
    """Maximum over the processes of each number of their memory."""


@dataclass(frozen=True, kw_only=True)
class StageReport(RecordPart):
    """Pipeline stage of a rank: maximum number of micro-batches in flight, and its times in each timed step."""

    stage: int
    in_flight: int
    idle_s: list[float]
    """Seconds of each timed step in which the stage waited for other stages."""
    busy_s: list[float]
    """Seconds of each timed step in which the stage computed."""
    core_s: list[float]
    """Seconds of `busy_s` in which the rank's process ran on a core."""


@dataclass(frozen=True, kw_only=True)
class SimulatedFailure(RecordPart):
    """Phase and memory of a simulated step when it ran out of memory."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    """Bytes that the caching allocator had reserved when a request failed."""


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
    """Maximum bytes that the caching allocator reserves; None if the step does not fit."""
    failure: SimulatedFailure | None = None
    """Out-of-memory failure of a step that does not fit; None if it fits."""
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class SimulatedOn(RecordPart):
    """Inputs of a simulation from a system file.  A record whose inputs differ from the file is out of date."""

    system: str
    memory_bytes: float | None
    context_bytes: int
    devices_per_node: float | None
    links: list[str]
    numbers: str
    """Digest of all numbers and the simulator version on which the simulated time depends."""


@dataclass(frozen=True, kw_only=True)
class StepSeries(RecordPart):
    """Series of a record: values per training step of a run, or values over one simulated step."""

    loss: list[float | None] | None = None
    grad_norm: list[float | None] | None = None
    loss_scale: list[float | None] | None = None
    skipped_steps: list[int] | None = None
    step_seconds: list[list[float]] | None = None
    """Seconds of each timed step on the slowest rank, in one list per round."""
    resumed_from: list[int] | None = None
    """Numbers of the steps after which the run continued from a checkpoint."""
    phase_seconds: list[dict[str, float]] | None = None
    """Mean seconds of each phase over the timed steps, one dictionary per rank."""
    pipeline: list[dict[str, Any]] | None = None
    """`StageReport` of each rank as JSON data; empty without pipeline stages."""
    memory: dict[str, Any] | None = None
    """Live bytes during a simulated step, on the role with most memory (`repro.simulate.memory.live_bytes`)."""
    seconds: dict[str, dict[str, float]] | None = None
    """Seconds of a simulation's slowest stage: `busy` by kind of operator, `exposed` by kind of communication."""


@dataclass(frozen=True, kw_only=True)
class CheckpointReport(RecordPart):
    """Checkpoints that a run loaded (`resumed`), wrote and failed to write."""

    resumed: list[dict[str, Any]]
    written: list[int]
    write_seconds: list[float]
    failures: list[dict[str, Any]]
    times: str | None = None
    """Description of the steps whose times the record contains, such as `of all steps`."""


@dataclass(frozen=True, kw_only=True)
class RankResult(RecordPart):
    """Result of one rank of one experiment."""

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
    """Environment variables that the rank set for its GPU (`repro.launch.rank.device_settings`)."""
    kernels: dict[str, list[str]] = field(default_factory=dict)
    """Implementations that ran, `cuda` or `torch: REASON`, by operator."""
    memory: RankMemory
    comm: list[TrafficRow]
    """Communication of one step."""
    comm_per_layer: list[LayerTraffic] = field(default_factory=list)
    network: RankOnNetwork | None = None
    """Measurements on an emulated network; None on other networks."""
    parameters: int
    padding: int = 0


@dataclass(frozen=True, kw_only=True)
class RankOnNetwork(RecordPart):
    """Measurements of a rank on an emulated network.  Bytes are means over the timed steps, headers included."""

    compute_flops_per_s: float
    """FLOP/s of matrix products before the first step, while all ranks compute."""
    core_share: float
    """Maximum share of a processor core that the rank may use."""
    sent_bytes: float
    received_bytes: float
    """Bytes that the network interface of the rank receives in one step; `sent_bytes` are those that it sends."""
    node_sent_bytes: float | None = None
    node_received_bytes: float | None = None
    """Bytes that the node receives from other nodes in one step; None except on the first rank of the node."""
    facts: dict[str, Any] | None = None
    """Fields of `repro.emulate.network.NetworkFacts`; None except on rank 0."""


@dataclass(frozen=True, kw_only=True)
class NetworkReport(RecordPart):
    """Properties and measurements of the emulated network on which a measurement ran."""

    mtu: int
    payload_share: float
    """Fraction of a link's bytes that is payload, under full load in both directions."""
    rates: dict[str, list[float]]
    """Measured bytes/s of all links before the run, by kind of link and direction."""
    round_trip_s: dict[str, float]
    """Round-trip time of one byte, in seconds, `within` a node and `between` nodes."""
    user_namespace: bool
    compute_flops_per_s: list[float]
    """FLOP/s of matrix products of each rank before the first step, while all ranks compute."""
    core_share: float
    """Maximum share of a processor core that a rank may use, even while other ranks wait."""
    sent_bytes: list[float]
    received_bytes: list[float]
    """Bytes that each rank receives in one step, headers included; `sent_bytes` are those that each rank sends."""
    node_sent_bytes: list[float]
    node_received_bytes: list[float]
    """Bytes that each node receives from the other nodes in one step."""

    def made(self, network: EmulatedNetwork) -> EmulatedNetwork:
        """Return `network` with the median link rates that were measured before the run, and no compute rate."""
        within = median(self.rates["rank sends"]) if network.within else 0.0
        between = median(self.rates["node sends"]) if network.between else 0.0
        return replace(network, within=within, between=between, flops_per_s=0.0)

    @classmethod
    def from_ranks(cls, ranks: Sequence[RankOnNetwork]) -> NetworkReport | None:
        """Return the combined report of all ranks; None if they did not run on an emulated network."""
        if not ranks or (facts := ranks[0].facts) is None:
            return None
        by_rank = ("compute_flops_per_s", "sent_bytes", "received_bytes")
        by_node = ("node_sent_bytes", "node_received_bytes")
        values = {name: [getattr(rank, name) for rank in ranks] for name in (*by_rank, *by_node)}
        known = {name: [one for one in found if one is not None] for name, found in values.items()}
        return cls.read({**facts, **known, "core_share": ranks[0].core_share})


def kernels_of_ranks(results: Sequence[RankResult]) -> KernelsRan:
    """Return the number of ranks that ran each implementation of each operator; empty if ranks report none."""
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
