"""Metrics of measured and simulated steps. Claims refer to metrics by name, so the names are fixed.

Times are in seconds, sizes in bytes, work in FLOP. The step time is that of the slowest rank, memory the maximum over
ranks, and communication that of rank 0 in one step.

- `memory.activations_bytes` are the activations at the device's peak, checkpoints included.
- `memory.checkpoints_bytes` (on the device), `memory.host_bytes` (checkpoints in host memory) and
  `memory.communication_bytes` (communication buffers) are maxima over the step. `memory.gathered_bytes` is the maximum
  of gathered parameters of other ranks under stage 3.
- `memory.reserved_bytes` is the predicted reservation of the caching allocator on the device with most memory, and
  `memory.used_bytes` the sum of reservation and context.
- `memory.context_bytes` is device memory outside torch's allocator (CUDA, libraries, NCCL's buffers). A simulation
  reads it from the system file. A measurement takes the maximum over ranks after the run, which includes NCCL
  connections of earlier experiments of the same launch.
- `comm.purpose.GROUP.PURPOSE.*` are sums over all ranks. `comm.link.CLASS.sent_bytes` are the bytes that cross a class
  of links. `comm.per_layer.*` is the communication of one block for one micro-batch.
- `pipeline.bubble` is the time in which the busiest rank of a step waits for other stages, over its compute time
  (2104.04473 sec. 2.2). It is the median over the undisturbed timed steps, with the 95 % bootstrap interval `.low` to
  `.high`. A step is disturbed if other processes used the core of a computing rank. With fewer than three undisturbed
  steps, there is no bubble, nor for libraries whose stages also have tp or dp.
- `model_flops_per_s` counts attention in full, as 2104.04473 does, and `causal_flops_per_s` only its causal half.
- A step that does not fit in memory has no time: `shown` omits its metrics that begin with an entry of `SPEED`.
- `time.*` are the parts of the slowest stage's time in a simulation. `trace_seconds` is the duration of the simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TypeAlias

from repro.config import Experiment
from repro.measure.statistics import ratio_interval
from repro.model import counts
from repro.parallel.pipeline.schedule import peak_in_flight
from repro.results.record_parts import LayerTraffic, StageReport, TrafficRow

Metrics: TypeAlias = dict[str, float]
STEP_SECONDS = "step_seconds.median"
DEVICE_FLOPS_PER_S = "hardware_flops_per_s.device"
UNDISTURBED = 0.95
"""Minimum share of its compute time in which each rank has its core, for a step to count as undisturbed."""
STATES = ("parameters", "gradients", "optimizer")
RATES = ("tokens_per_s", "samples_per_s", "model_flops_per_s", "causal_flops_per_s", "hardware_flops_per_s")
"""Prefixes of the names of rate metrics, which divide an amount per step by the step time."""
SPEED = ("step_seconds.", *RATES, "time.")
"""Prefixes of the names of all metrics that depend on the step time: times and rates."""


@dataclass(frozen=True)
class Held:
    """Memory by category on one rank, or on each rank of a pipeline role (ranks with equal work), in bytes."""

    states: Mapping[str, int]
    """Bytes of model states between two steps: `parameters`, `gradients` and `optimizer`."""
    peak: Mapping[str, int]
    """Bytes by memory category at the peak of the device memory, and their `total` on the device."""
    most: Mapping[str, int]
    """Maximum bytes of each memory category over the training step."""
    init_peak_bytes: int


def shown(found: Mapping[str, float], outcome: str) -> Metrics:
    """Return the metrics of a step; omit times and rates if the step ran out of memory (`outcome` is `oom`)."""
    return {name: value for name, value in found.items() if outcome != "oom" or not name.startswith(SPEED)}


def metric_at_step_seconds(name: str, found: Mapping[str, float], seconds: float) -> float | None:
    """Return the metric `name` for a step time of `seconds`; None for a metric that does not depend on step time."""
    if name == STEP_SECONDS:
        return seconds
    return found[name] * found[STEP_SECONDS] / seconds if name.startswith(RATES) else None


def memory(ranks: Sequence[Held], *, marked: bool = True) -> Metrics:
    """Return the maximum of each memory metric over ranks. `marked`: whether buffers have memory categories."""
    if not ranks:
        return {}
    found: Metrics = {
        "memory.states_bytes": max(sum(rank.states.values()) for rank in ranks),
        "memory.peak_bytes": max(rank.peak["total"] for rank in ranks),
        "memory.init_peak_bytes": max(rank.init_peak_bytes for rank in ranks),
        **{f"memory.{part}_bytes": max(rank.states[part] for rank in ranks) for part in STATES},
    }
    if not marked:
        return found
    activations = ("activations", "checkpoints")
    return found | {
        "memory.activations_bytes": max(sum(rank.peak[part] for part in activations) for rank in ranks),
        "memory.checkpoints_bytes": max(rank.most["checkpoints"] for rank in ranks),
        "memory.host_bytes": max(rank.most["host"] for rank in ranks),
        "memory.gathered_bytes": max(rank.most["parameters"] - rank.states["parameters"] for rank in ranks),
    }


def allocated(
    ranks: Sequence[Held],
    *,
    context: int,
    limit: int | None,
    reserved: int | None,
    fragmentation: float,
    retries: int,
) -> Metrics:
    """Return the memory metrics that only a simulation has: context, communication buffers, caching allocator.

    `reserved`: peak reservation of the caching allocator in bytes; None if the step does not fit in memory.
    """
    metrics: Metrics = {
        "memory.context_bytes": context,
        "memory.communication_bytes": max(rank.most["communication"] for rank in ranks),
    }
    if limit is not None:
        metrics["memory.limit_bytes"] = limit
    if reserved is not None:
        metrics["memory.reserved_bytes"] = reserved
        metrics["memory.used_bytes"] = reserved + context
        metrics["memory.fragmentation"] = round(fragmentation, 6)
        metrics["memory.retries"] = retries
    return metrics


def communication(rows: Sequence[TrafficRow], per_layer: Sequence[LayerTraffic]) -> Metrics:
    """Return rank 0's communication metrics of a step by collective and group, summed over group sizes and purposes."""
    metrics: Metrics = {"comm.sent_bytes": sum(row.sent_bytes for row in rows)}
    for row in rows:
        amounts = {name: getattr(row, name) for name in ("calls", "payload_bytes", "sent_bytes")}
        _add(metrics, f"comm.{row.group}.{row.op}", **amounts)
        if row.link:
            _add(metrics, f"comm.link.{row.link}", sent_bytes=row.sent_bytes)
    for layer in per_layer:
        name = f"comm.per_layer.{layer.group}.{layer.op}"
        _add(metrics, name, calls=layer.calls, sent_bytes=layer.sent_bytes)
    return metrics


def purposes(found: Iterable[tuple[int, Sequence[TrafficRow]]]) -> Metrics:
    """Return calls and sent bytes by purpose, summed over ranks. `found`: pairs (number of ranks, traffic of each)."""
    metrics: Metrics = {}
    for ranks, rows in found:
        for row in rows:
            if row.purpose:
                name = f"comm.purpose.{row.group}.{row.purpose.replace(' ', '_')}"
                _add(metrics, name, calls=ranks * row.calls, sent_bytes=ranks * row.sent_bytes)
    return metrics


OF_BLOCKS = ("block", "keys and values")
"""Purposes of communication inside a transformer block: tensor-parallel collectives, context-parallel gathers."""


def per_layer(experiment: Experiment, stage: int, rows: Iterable[TrafficRow]) -> list[LayerTraffic]:
    """Return the communication per transformer block and micro-batch, averaged over the blocks of a pipeline stage."""
    layout = experiment.layout
    blocks = sum(map(len, layout.parts(experiment.model.layers)[stage :: layout.pp]))
    uses = layout.accumulation * blocks
    return [
        LayerTraffic(op=row.op, group=row.group, calls=row.calls / uses, sent_bytes=row.sent_bytes / uses)
        for row in rows
        if row.purpose in OF_BLOCKS
    ]


def speed(experiment: Experiment, seconds: float) -> Metrics:
    """Return the metrics of a step that takes `seconds`: step time, throughput and FLOP/s over all ranks."""
    layout, sizes = experiment.layout, (experiment.model, experiment.seq, experiment.layout.global_batch)
    samples, hardware_flops = layout.global_batch, counts.hardware_flops(*sizes, layout.recompute)
    return {
        STEP_SECONDS: seconds,
        "tokens_per_s": samples * experiment.seq / seconds,
        "samples_per_s": samples / seconds,
        "model_flops_per_s": counts.model_flops(*sizes) / seconds,
        "causal_flops_per_s": counts.causal_flops(*sizes) / seconds,
        "hardware_flops_per_s": hardware_flops / seconds,
        DEVICE_FLOPS_PER_S: hardware_flops / seconds / layout.world,
    }


def parts(found: Mapping[str, float], factor: float) -> Metrics:
    """Return the `time.*` metrics of a simulation: components of the slowest pipeline stage's time in seconds.

    `factor`: calibrated ratio of actual to modelled time of kernels other than matrix products and attention.
    """
    shares = ("compute_s", "optimizer_s", "exposed_s", "hidden_s", "bubble_s")
    names = (*shares, "forward_s", "backward_s", "update_s")
    return {**{f"time.{name}": found[name] for name in names}, "time.factor": factor}


def work(experiment: Experiment, operator_flops: int) -> Metrics:
    """Return the metrics of a step's work: parameters, FLOP by formulas and by operators, micro-batches in flight."""
    model, layout = experiment.model, experiment.layout
    metrics: Metrics = {
        "model.parameters": counts.total_parameters(model),
        "flops.model": counts.model_flops(model, experiment.seq, layout.global_batch),
        "flops.hardware": counts.hardware_flops(model, experiment.seq, layout.global_batch, layout.recompute),
        "flops.operators": operator_flops,
    }
    if layout.pp > 1:
        count = layout.accumulation, layout.chunks
        live = (peak_in_flight(layout.schedule, stage, layout.pp, *count) for stage in range(layout.pp))
        metrics["pipeline.in_flight"] = max(live)
    return metrics


def bubble(stages: Sequence[StageReport], *, cores: bool) -> Metrics:
    """Return pipeline metrics from stage reports. `cores`: omit steps disturbed by other processes on the cores."""
    if not stages:
        return {}
    by_rank = [zip(stage.busy_s, stage.idle_s, stage.core_s, strict=True) for stage in stages]
    pairs = [
        max((busy, idle) for busy, idle, _ in step)
        for step in zip(*by_rank, strict=False)
        if not cores or all(core >= UNDISTURBED * busy for busy, _, core in step)
    ]
    pairs = [pair for pair in pairs if min(pair) > 0]
    metrics: Metrics = {
        "pipeline.in_flight": max(stage.in_flight for stage in stages),
        "pipeline.undisturbed_steps": len(pairs),
    }
    if pairs:
        ratio, low, high = ratio_interval(pairs, seed=0)
        if low is not None and high is not None:
            metrics |= {"pipeline.bubble": ratio, "pipeline.bubble.low": low, "pipeline.bubble.high": high}
    return metrics


def _add(metrics: Metrics, name: str, **counts: float) -> None:
    for quantity, count in counts.items():
        full_name = f"{name}.{quantity}"
        metrics[full_name] = metrics.get(full_name, 0) + count


Losses: TypeAlias = Sequence[float | None]
"""Training loss of every step of a run; None for NaN."""
LOSS_STRETCH_STEPS = 50
"""Number of consecutive training steps over which losses, or distances of two loss curves, are averaged."""
FP32_ROUNDING = 2.0**-24
"""Relative rounding error of an fp32 loss, the smallest measurable relative distance of two losses."""


def loss_distances(losses: Losses, reference: Losses) -> list[float]:
    """Return the relative distance |loss - reference| / |reference| of two loss curves, for each step in both."""
    pairs = zip(losses, reference, strict=False)
    return [abs(loss - right) / abs(right) for loss, right in pairs if loss is not None and right]


def root_mean_square(values: Sequence[float]) -> float:
    """Return the root mean square of one or more values."""
    return sqrt(sum(value * value for value in values) / len(values))


def relative_loss_distance(losses: Losses, reference: Losses, controls: Sequence[Losses]) -> float:
    """Return the distance of a loss curve from `reference` over the distance of control runs from `reference`.

    The result is the largest ratio over all stretches of `LOSS_STRETCH_STEPS` steps. Control runs repeat the training
    of `reference` with another summation order, so that their distances contain rounding errors only. A training
    amplifies these errors over hundreds of steps. Distances are root mean squares. If rounding errors are the only
    cause, the ratio follows Student's t with one degree of freedom per control run, or has thinner tails.

    Raises:
        ValueError: There are no control runs, or the loss of a step is missing in a curve.
    """
    distances = loss_distances(losses, reference)
    of_controls = [loss_distances(control, reference) for control in controls]
    curves = (losses, *controls, distances, *of_controls)
    if not controls or {len(curve) for curve in curves} != {len(reference)}:
        raise ValueError("the comparison needs control runs, and the losses of all steps of all runs")
    largest = 0.0
    for start in range(0, len(reference), LOSS_STRETCH_STEPS):
        part = slice(start, start + LOSS_STRETCH_STEPS)
        explained = root_mean_square([distance for control in of_controls for distance in control[part]])
        largest = max(largest, root_mean_square(distances[part]) / max(explained, FP32_ROUNDING))
    return largest


def final_loss(losses: Losses) -> float:
    """Return the mean loss of a run's last `LOSS_STRETCH_STEPS` steps. Raises `ValueError` if a loss is missing."""
    last = [loss for loss in losses[-LOSS_STRETCH_STEPS:] if loss is not None]
    if len(last) < LOSS_STRETCH_STEPS:
        raise ValueError(f"the comparison needs the losses of the last {LOSS_STRETCH_STEPS} training steps")
    return sum(last) / LOSS_STRETCH_STEPS
