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
"""As `repro.measure.provenance` says it, and what a launcher adds (`slurm`)."""
Bytes: TypeAlias = dict[str, int]
"""By category of memory; a peak has the device's `total` too."""
Software: TypeAlias = dict[str, Any]
"""As `repro.engines.EngineReport` says it."""
KernelsRan: TypeAlias = dict[str, dict[str, int]]
"""Operator -> `cuda` or `torch: why` -> ranks on which it ran so.

The one operator is `every operator` where there was no choice: on a CPU, or under `kernels = "reference"`.
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
    """Of a simulation: the slowest class of links that the group crosses."""
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
    """Memory of a rank.  A rank that diverged in its first steps has no categories."""

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
    """By the caching allocator; None where the step does not fit."""
    failure: SimulatedFailure | None = None
    """Of a step that does not fit."""
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
    """Series over steps, and over one step."""

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
    """Of a simulation, over the step on its fullest role (`repro.simulate.memory.live_bytes`)."""
    seconds: dict[str, dict[str, float]] | None = None
    """Of a simulation: the slowest stage's, `busy` by kind of operator, `exposed` by kind of communication."""


@dataclass(frozen=True, kw_only=True)
class CheckpointReport(RecordPart):
    """Checkpoints that a run read, wrote and failed to write."""

    resumed: list[dict[str, Any]]
    written: list[int]
    write_seconds: list[float]
    failures: list[dict[str, Any]]
    times: str | None = None
    """Of which steps the record's times are."""


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


@dataclass(frozen=True, kw_only=True)
class RankOnNetwork(RecordPart):
    """Measurements of a rank on an emulated network.  Bytes are means over the timed steps, headers included."""

    compute_flops_per_s: float
    """Of matrix products before the first step, while all ranks computed."""
    core_share: float
    """Seconds of processor time that the rank computes in each second, at most."""
    sent_bytes: float
    received_bytes: float
    """Of one step, by the rank's own interface."""
    node_sent_bytes: float | None = None
    node_received_bytes: float | None = None
    """Of one step, by its node's interface: of the first rank of each node."""
    facts: dict[str, Any] | None = None
    """As `repro.emulate.network.NetworkFacts` says it: of rank 0."""


@dataclass(frozen=True, kw_only=True)
class NetworkReport(RecordPart):
    """The emulated network that a measurement ran on; what was asked is in the conditions."""

    mtu: int
    payload_share: float
    """Fraction of a link's bytes that is payload, under full load in both directions."""
    rates: dict[str, list[float]]
    """Measured bytes/s of every link before the run, by kind and direction."""
    round_trip_s: dict[str, float]
    """Of one byte, `within` a node and `between` nodes."""
    user_namespace: bool
    compute_flops_per_s: list[float]
    """By rank, of matrix products before the first step, while all ranks computed."""
    core_share: float
    """Seconds of processor time that a rank computes in each second, at most: also while others wait."""
    sent_bytes: list[float]
    received_bytes: list[float]
    """By rank, of one step, headers included: means over the timed steps by the interfaces' counters."""
    node_sent_bytes: list[float]
    node_received_bytes: list[float]
    """By node, over its link to the others."""

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
        return cls(
            mtu=facts["mtu"],
            payload_share=facts["payload_share"],
            rates=facts["rates"],
            round_trip_s=facts["round_trip_s"],
            user_namespace=facts["user_namespace"],
            compute_flops_per_s=[rank.compute_flops_per_s for rank in ranks],
            core_share=ranks[0].core_share,
            sent_bytes=[rank.sent_bytes for rank in ranks],
            received_bytes=[rank.received_bytes for rank in ranks],
            node_sent_bytes=[rank.node_sent_bytes for rank in ranks if rank.node_sent_bytes is not None],
            node_received_bytes=[r.node_received_bytes for r in ranks if r.node_received_bytes is not None],
        )


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
