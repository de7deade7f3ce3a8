"""The metrics of a step under their names, one builder for what is measured and what is simulated.

Names are fixed, since claims refer to them.  Times are seconds, sizes bytes, work FLOP.  A step takes as long as its
slowest rank; memory is the largest of any rank; communication is rank 0's, of one ordinary step.

- `memory.activations_bytes` are those at the moment of the device's peak, checkpoints included;
  `memory.checkpoints_bytes` (on the device), `memory.host_bytes` (checkpoints in host memory) and
  `memory.communication_bytes` (buffers of messages) are the most at any moment; `memory.gathered_bytes` the most of
  other ranks' parameters that stage 3 holds.
- `memory.reserved_bytes` is what the caching allocator would reserve on the fullest device, `memory.used_bytes`
  that and the context beside it.
- `memory.context_bytes` is what torch's allocator cannot have of a device (CUDA, libraries, NCCL's buffers): in a
  simulation the system file's, measured the most of any rank when its run was over, with what earlier experiments
  of the same job have connected.
- `comm.purpose.GROUP.PURPOSE.*` are summed over all ranks, as no stage of a pipeline speaks for the others;
  `comm.link.CLASS.sent_bytes` goes over a class of links; `comm.per_layer.*` is one block's for one micro-batch.
- `pipeline.bubble` is the time that a step's busiest rank waited for other stages over the time that it computed,
  (t - ideal)/ideal of 2104.04473 sec. 2.2: what the others wait for because it is slower is no bubble.  It is the
  median over the undisturbed timed steps, with `.low` and `.high` its 95 % bootstrap interval.  A step is disturbed
  if a rank was kept from its core while it computed, by other ranks or other programs: who waits for that rank waits
  for nothing that a schedule knows.  With fewer than three undisturbed steps there is no interval, and no bubble;
  nor for a library whose stages have tp or dp beside them, as its waiting is seen from outside.
- A step that does not fit takes no time: `shown` leaves out of its metrics what `SPEED` begins.  Claims that hold a
  published rate against a simulation which it does not fit read the record itself, and say that it does not.
- `time.*` says where the slowest stage's seconds go in a simulation, `trace_seconds` what the simulation took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TypeAlias

from repro.config import Experiment
from repro.measure.statistics import ratio_interval
from repro.model import counts
from repro.parallel.pipeline.schedule import build_schedule, in_flight
from repro.results.record_parts import LayerTraffic, StageReport, TrafficRow

Metrics: TypeAlias = dict[str, float]
STEP_SECONDS = "step_seconds.median"
DEVICE_FLOPS_PER_S = "hardware_flops_per_s.device"
UNDISTURBED = 0.95
"""Least part of its computing time that a rank has its core for, or the step is disturbed."""
STATES = ("parameters", "gradients", "optimizer")
SPEED = (
    *("step_seconds.", "tokens_per_s", "samples_per_s", "model_flops_per_s", "hardware_flops_per_s"),
    "time.",
)
"""Beginnings of what is said of a step's seconds."""


RATES = ("tokens_per_s", "samples_per_s", "model_flops_per_s", "hardware_flops_per_s")
"""Beginnings of those that are so much of a step over its seconds."""


@dataclass(frozen=True)
class Held:
    """Bytes by category that one rank holds, or each rank of a simulated role."""

    states: Mapping[str, int]
    """Between two steps."""
    peak: Mapping[str, int]
    """When the device's `total` is largest."""
    most: Mapping[str, int]
    """The most of each category at any moment."""
    init_peak_bytes: int


def shown(found: Mapping[str, float], outcome: str) -> Metrics:
    """What is told of a step that ended with `outcome`."""
    return {name: value for name, value in found.items() if outcome != "oom" or not name.startswith(SPEED)}


def metric_at_step_seconds(name: str, found: Mapping[str, float], seconds: float) -> float | None:
    """What the metric `name` among `found` is if the step takes `seconds`; None if it does not follow from them."""
    if name == STEP_SECONDS:
        return seconds
    return found[name] * found[STEP_SECONDS] / seconds if name.startswith(RATES) else None


def memory(ranks: Sequence[Held], *, marked: bool = True) -> Metrics:
    """The largest of any rank; nothing without one.

    `marked`: every buffer says what it is for.  Of an engine that is a library only the model states are known to be
    what they are, and the total.
    """
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
    return found | {
        # Checkpoints are activations that forward keeps.
        "memory.activations_bytes": max(
            rank.peak["activations"] + rank.peak["checkpoints"] for rank in ranks
        ),
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
    """What a simulation knows of memory besides.  `reserved`: None for a step that does not fit.  Bytes."""
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
    """Rank 0's.  One operation may be in several rows (sizes of the group, purposes): they add up."""
    metrics: Metrics = {"comm.sent_bytes": sum(row.sent_bytes for row in rows)}
    for row in rows:
        _add(metrics, f"comm.{row.group}.{row.op}", calls=row.calls, payload_bytes=row.payload_bytes)
        _add(metrics, f"comm.{row.group}.{row.op}", sent_bytes=row.sent_bytes)
        if row.link:
            _add(metrics, f"comm.link.{row.link}", sent_bytes=row.sent_bytes)
    for layer in per_layer:
        name = f"comm.per_layer.{layer.group}.{layer.op}"
        _add(metrics, name, calls=layer.calls, sent_bytes=layer.sent_bytes)
    return metrics


def purposes(found: Iterable[tuple[int, Sequence[TrafficRow]]]) -> Metrics:
    """Summed over all ranks.  `found`: rows, and how many ranks each of them stands for."""
    metrics: Metrics = {}
    for ranks, rows in found:
        for row in rows:
            if row.purpose:
                name = f"comm.purpose.{row.group}.{row.purpose.replace(' ', '_')}"
                _add(metrics, name, calls=ranks * row.calls, sent_bytes=ranks * row.sent_bytes)
    return metrics


OF_BLOCKS = ("block", "keys and values")
"""Purposes of what a block sends: sums and gathers of tensor parallelism, gathers of context parallelism."""


def per_layer(experiment: Experiment, stage: int, rows: Iterable[TrafficRow]) -> list[LayerTraffic]:
    """What one block of a pipeline `stage` communicates for one micro-batch, on average over the stage's blocks."""
    layout = experiment.layout
    blocks = sum(map(len, layout.parts(experiment.model.layers)[stage :: layout.pp]))
    uses = layout.accumulation * blocks
    return [
        LayerTraffic(op=row.op, group=row.group, calls=row.calls / uses, sent_bytes=row.sent_bytes / uses)
        for row in rows
        if row.purpose in OF_BLOCKS
    ]


def speed(
    seconds: float, *, samples: int, tokens: int, model_flops: float, hardware_flops: float, devices: int
) -> Metrics:
    """Of a step of `seconds`, and the work of all its ranks."""
    return {
        STEP_SECONDS: seconds,
        "tokens_per_s": tokens / seconds,
        "samples_per_s": samples / seconds,
        "model_flops_per_s": model_flops / seconds,
        "hardware_flops_per_s": hardware_flops / seconds,
        DEVICE_FLOPS_PER_S: hardware_flops / seconds / devices,
    }


def parts(found: Mapping[str, float], factor: float) -> Metrics:
    """Where the slowest stage's predicted seconds go; `factor` as calibrated."""
    shares = ("compute_s", "optimizer_s", "exposed_s", "hidden_s", "bubble_s")
    names = (*shares, "forward_s", "backward_s", "update_s")
    return {**{f"time.{name}": found[name] for name in names}, "time.factor": factor}


def work(experiment: Experiment, operator_flops: int) -> Metrics:
    """FLOP of a step by the formulas, and by the operators of the busiest rank; micro-batches in flight."""
    model, layout = experiment.model, experiment.layout
    metrics: Metrics = {
        "model.parameters": counts.total_parameters(model),
        "flops.model": counts.model_flops(model, experiment.seq, layout.global_batch),
        "flops.hardware": counts.hardware_flops(model, experiment.seq, layout.global_batch, layout.recompute),
        "flops.operators": operator_flops,
    }
    if layout.pp > 1:
        schedule = build_schedule(layout.schedule, layout.pp, layout.accumulation, layout.chunks)
        metrics["pipeline.in_flight"] = max(map(in_flight, schedule))
    return metrics


def bubble(stages: Sequence[StageReport], *, cores: bool) -> Metrics:
    """Of the ranks of a pipeline, each with its stage; `cores`: leave steps out in which one was kept from its core."""
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
"""Losses of all steps; None for NaN."""
LOSS_STRETCH_STEPS = 50
"""Steps whose loss distances are averaged, because a training amplifies equal rounding errors unequally over time."""
FP32_ROUNDING = 2.0**-24
"""Relative rounding error of an fp32 loss. A smaller distance is not measurable."""


def loss_distances(losses: Losses, reference: Losses) -> list[float]:
    """Return |loss - reference| / |reference| of every step that has both losses."""
    pairs = zip(losses, reference, strict=False)
    return [abs(loss - right) / abs(right) for loss, right in pairs if loss is not None and right]


def root_mean_square(values: Sequence[float]) -> float:
    """Return the root mean square of one or more values."""
    return sqrt(sum(value * value for value in values) / len(values))


def relative_loss_distance(losses: Losses, reference: Losses, controls: Sequence[Losses]) -> float:
    """Return the distance of a loss curve from `reference` over the distance of `controls`, in the worst stretch.

    Controls repeat the training of `reference` and change only the order of sums. A training amplifies the different
    rounding errors, so that no fixed tolerance of losses holds after hundreds of steps. Distances are root mean
    squares. Rounding errors add up to a normal distribution whose width the controls estimate: without another cause
    the ratio of a stretch follows Student's t with one degree of freedom per control, or has thinner tails.

    Raises:
        ValueError: There are no controls, or a curve lacks the loss of a step.
    """
    distances = loss_distances(losses, reference)
    of_controls = [loss_distances(control, reference) for control in controls]
    curves = (losses, *controls, distances, *of_controls)
    if not controls or {len(curve) for curve in curves} != {len(reference)}:
        raise ValueError("needs controls, and a loss of every step of each")
    largest = 0.0
    for start in range(0, len(reference), LOSS_STRETCH_STEPS):
        part = slice(start, start + LOSS_STRETCH_STEPS)
        explained = root_mean_square([distance for control in of_controls for distance in control[part]])
        largest = max(largest, root_mean_square(distances[part]) / max(explained, FP32_ROUNDING))
    return largest


def final_loss(losses: Losses) -> float:
    """Return the mean loss of the last stretch.

    Raises:
        ValueError: A loss of the stretch is missing.
    """
    last = [loss for loss in losses[-LOSS_STRETCH_STEPS:] if loss is not None]
    if len(last) < LOSS_STRETCH_STEPS:
        raise ValueError(f"needs a loss in each of the last {LOSS_STRETCH_STEPS} steps")
    return sum(last) / LOSS_STRETCH_STEPS
