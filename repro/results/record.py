"""Records made of what the ranks measured.  Names of metrics are fixed, since claims refer to them.

Times are seconds, sizes bytes, work FLOP.  A step takes as long as its slowest rank; memory is the largest
of any rank; communication is rank 0's, of one ordinary step.  `memory.activations_bytes` are those at the
moment of the device's peak, checkpoints included; `memory.checkpoints_bytes` (on the device) and
`memory.host_bytes` (checkpoints in host memory) are the most at any moment.

`comm.purpose.GROUP.PURPOSE.*` are summed over all ranks, as no stage of a pipeline speaks for the others.
`pipeline.bubble` is the time that a step's busiest rank waited for other stages over the time that it
computed, (t - ideal)/ideal of 2104.04473 sec. 2.2: what the others wait for because it is slower is no bubble.
It is the median over the undisturbed timed steps, with `.low` and `.high` its 95 % bootstrap interval.  A
step is disturbed if a rank was kept from its core while it computed, by other ranks or other programs: who
waits for that rank waits for nothing that a schedule knows.  With fewer than three undisturbed steps there is
no interval, and no bubble is given.

`kernels` says what computed each operator: a CUDA kernel, or torch's operators and why.

A run that went on from a checkpoint says so in `checkpoints` and in `series.resumed_from` (steps): its losses
are of all its steps, and its times of those since it last went on, for times are never stitched together.
"""

from __future__ import annotations

import math
import uuid
from datetime import datetime, timezone
from statistics import median
from typing import Any

from repro.config import PROTOCOL, Experiment
from repro.measure.statistics import ratio_interval, summary
from repro.results.kernels import of_ranks
from repro.results.store import SCHEMA

RankResult = dict[str, Any]
"""One experiment's results of one rank, as `repro.launch.session` returns them."""
UNDISTURBED = 0.95
"""Least part of its computing time that a rank has its core for, or the step is disturbed."""
_WORST_FIRST = ("oom", "diverged", "error", "ok")


def experiment_record(
    experiment: Experiment,
    results: list[RankResult],
    *,
    suite: str,
    provenance: dict[str, Any],
    wall_s: float,
    outcome: str = "ok",
    reason: str = "",
) -> dict[str, Any]:
    """The record of one experiment.  `results`: one of every rank, or none if it did not finish.

    A rank may finish and still say that it was no success; the worst rank's outcome is the record's.
    """
    if outcome == "ok" and results:
        worst = min(results, key=lambda result: _WORST_FIRST.index(result["outcome"]))
        if worst["outcome"] != "ok":
            outcome, reason = worst["outcome"], f"rank {worst['rank']}: {worst['reason']}"
    series = _series(results) if results else {}
    return {
        **head("experiment", suite, experiment.name),
        "key": experiment.key,
        "experiment": experiment.as_dict(),
        "evidence": "measured",
        "outcome": outcome,
        "reason": reason,
        "metrics": _metrics(results, experiment.engine == "native") if results else {},
        "series": series,
        **_checkpoints(results),
        "flops_formula": results[0]["flops_formula"] if results else "",
        "memory_by_rank": _plain([result["memory"] for result in results]),
        "comm": _plain(results[0]["comm"]) if results else [],
        "comm_per_layer": _plain(results[0].get("comm_per_layer", [])) if results else [],
        "comm_by_rank": _plain([result["comm"] for result in results]),
        "kernels": of_ranks(results),
        "provenance": provenance,
        "wall_s": round(wall_s, 3),
    }


def comparison_record(
    baseline: Experiment,
    subject: Experiment,
    results: tuple[list[RankResult], list[RankResult]],
    *,
    suite: str,
    provenance: dict[str, Any],
) -> dict[str, Any] | None:
    """Ratio subject/baseline of samples/s over paired rounds; None if either has a round without a time.

    `results`: the ranks' results of the baseline and of the subject, from one interleaved launch.
    """
    rates = [_round_rates(ranks) for ranks in results]
    pairs = [list(pair) for pair in zip(*rates, strict=True)]
    if not pairs or not all(math.isfinite(rate) for pair in pairs for rate in pair):
        return None
    ratio, low, high = ratio_interval(pairs, seed=0)
    return {
        **head("comparison", suite, f"{baseline.name} vs {subject.name}"),
        "baseline": {"name": baseline.name, "key": baseline.key},
        "subject": {"name": subject.name, "key": subject.key},
        "metric": "samples_per_s",
        "ratio": ratio,
        "low": low,
        "high": high,
        "rounds": len(pairs),
        "pairs": pairs,
        "provenance": provenance,
    }


def step_seconds(results: list[RankResult]) -> list[list[float]]:
    """Seconds of each timed step by round: those of the step's slowest rank.

    Ranks that diverge may stop a step apart; the steps that all of them took count.
    """
    return [
        [max(step) for step in zip(*ranks, strict=False)]
        for ranks in zip(*(result["rounds"] for result in results), strict=False)
    ]


def _round_rates(results: list[RankResult]) -> list[float]:
    samples = results[0]["samples_per_step"]
    return [samples / median(steps) if steps else math.nan for steps in step_seconds(results)]


def _metrics(results: list[RankResult], counted: bool) -> dict[str, float]:
    """`counted`: whether the engine counts what it sends; torch's own do not."""
    first = results[0]
    metrics: dict[str, float] = {
        "parameters": first["parameters"],
        "padding": first.get("padding", 0),
        "steps": len(first["loss"]),
        "skipped_steps": len(first["skipped_steps"]),
    }
    if first["loss"]:
        metrics["loss.first"], metrics["loss.last"] = first["loss"][0], first["loss"][-1]
    metrics.update(_speed(results))
    # A rank that diverges in its first steps has not looked at its memory yet.
    memories = [result["memory"] for result in results if "states" in result["memory"]]
    if memories:
        metrics.update(_memory(memories))
    # A run that had one step left when it went on has nothing that could be called an ordinary step.
    if counted and not (_resumed(first) and not any(first["rounds"])):
        metrics.update(_communication(first))
        metrics.update(_purposes(results))
    metrics.update(_pipeline(results))
    if _resumed(first):
        metrics["resumed_from"] = _resumed(first)[-1]
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _speed(results: list[RankResult]) -> dict[str, float]:
    seconds = [second for steps in step_seconds(results) for second in steps]
    if not seconds:
        return {}
    middle, p20, p80 = summary(seconds)
    metrics = {"step_seconds.median": middle, "step_seconds.p20": p20, "step_seconds.p80": p80}
    for work in ("tokens", "samples", "model_flops", "hardware_flops"):
        metrics[f"{work}_per_s"] = results[0][f"{work}_per_step"] / middle
    metrics["hardware_flops_per_s.device"] = metrics["hardware_flops_per_s"] / len(results)
    return metrics


def _memory(memories: list[dict[str, Any]]) -> dict[str, float]:
    def most(*path: str) -> float:
        values = []
        for memory in memories:
            value: Any = memory
            for key in path:
                value = value[key]
            values.append(value)
        return max(values)

    metrics = {
        "memory.states_bytes": max(sum(memory["states"].values()) for memory in memories),
        "memory.peak_bytes": most("peak", "total"),
        # Checkpoints are activations that forward keeps.
        "memory.activations_bytes": max(
            memory["peak"]["activations"] + memory["peak"]["checkpoints"] for memory in memories
        ),
        "memory.checkpoints_bytes": most("most", "checkpoints"),
        "memory.host_bytes": most("most", "host"),
        "memory.init_peak_bytes": most("init_peak_bytes"),
        "memory.rss_peak_bytes": most("rss_peak_bytes"),
    }
    for category in ("parameters", "gradients", "optimizer"):
        metrics[f"memory.{category}_bytes"] = most("states", category)
    return metrics


def _communication(result: RankResult) -> dict[str, float]:
    metrics: dict[str, float] = {"comm.sent_bytes": sum(row["sent_bytes"] for row in result["comm"])}
    # One operation may appear in several rows (sizes of the group, types): they add up.
    for row in result["comm"]:
        for quantity in ("calls", "payload_bytes", "sent_bytes"):
            name = f"comm.{row['group']}.{row['op']}.{quantity}"
            metrics[name] = metrics.get(name, 0) + row[quantity]
    for row in result.get("comm_per_layer", []):
        for quantity in ("calls", "sent_bytes"):
            name = f"comm.per_layer.{row['group']}.{row['op']}.{quantity}"
            metrics[name] = metrics.get(name, 0) + row[quantity]
    return metrics


def _purposes(results: list[RankResult]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for row in (row for result in results for row in result["comm"] if row["purpose"]):
        for quantity in ("calls", "sent_bytes"):
            name = f"comm.purpose.{row['group']}.{row['purpose'].replace(' ', '_')}.{quantity}"
            metrics[name] = metrics.get(name, 0) + row[quantity]
    return metrics


def _pipeline(results: list[RankResult]) -> dict[str, float]:
    stages = [result["pipeline"] for result in results if result.get("pipeline")]
    if not stages:
        return {}
    on_processor = not results[0]["memory"].get("cuda")
    by_rank = [zip(stage["busy_s"], stage["idle_s"], stage["core_s"], strict=True) for stage in stages]
    pairs = [
        max((busy, idle) for busy, idle, _ in step)
        for step in zip(*by_rank, strict=False)
        if not on_processor or all(core >= UNDISTURBED * busy for busy, _, core in step)
    ]
    pairs = [pair for pair in pairs if min(pair) > 0]
    metrics: dict[str, float] = {
        "pipeline.in_flight": max(stage["in_flight"] for stage in stages),
        "pipeline.undisturbed_steps": len(pairs),
    }
    bubble, low, high = ratio_interval(pairs, seed=0) if pairs else (0.0, None, None)
    if low is not None and high is not None:
        metrics |= {"pipeline.bubble": bubble, "pipeline.bubble.low": low, "pipeline.bubble.high": high}
    return metrics


def _series(results: list[RankResult]) -> dict[str, Any]:
    first = results[0]
    series = {name: first[name] for name in ("loss", "grad_norm", "loss_scale", "skipped_steps")}
    series["step_seconds"] = step_seconds(results)
    if _resumed(first):
        series["resumed_from"] = _resumed(first)
    series["phase_seconds"] = [result["phase_seconds"] for result in results]
    series["pipeline"] = [result.get("pipeline", {}) for result in results]
    plain: dict[str, Any] = _plain(series)
    return plain


def _resumed(result: RankResult) -> list[int]:
    """Steps after which the run went on from a checkpoint."""
    return [start["step"] for start in result.get("checkpoints", {}).get("resumed", [])]


def _checkpoints(results: list[RankResult]) -> dict[str, Any]:
    """What a run with checkpoints read, wrote and could not write; nothing for others."""
    found = [result["checkpoints"] for result in results if result.get("checkpoints")]
    if not found:
        return {}
    writes = zip(*(rank["write_seconds"] for rank in found), strict=False)
    since = (_resumed(results[0]) or [0])[-1]
    document = {
        "resumed": found[0]["resumed"],
        "written": found[0]["written"],
        "write_seconds": [max(write) for write in writes],
        "failures": [failure for rank in found for failure in rank["failures"]],
        "times": f"of the steps after {since}, since the last start" if since else "of all steps",
    }
    return {"checkpoints": _plain(document)}


def _plain(value: Any) -> Any:
    """JSON data without NaN and infinity, which JSON has not: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def head(kind: str, suite: str, name: str) -> dict[str, Any]:
    """What every record begins with: its own id, when it was written, and what it is about."""
    return {
        "schema": SCHEMA,
        "protocol": PROTOCOL,
        "id": uuid.uuid4().hex,
        "written": datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        "kind": kind,
        "suite": suite,
        "name": name,
    }
