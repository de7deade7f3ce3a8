"""Construction of measured records from the results of all ranks.

If a run continued from checkpoints, its losses cover all steps, and its times only the steps after the last restart.
"""

from __future__ import annotations

import math
from statistics import median

from repro.config import Experiment
from repro.config.engines import NATIVE
from repro.measure.statistics import ratio_interval, summarize
from repro.model import counts
from repro.results import metrics
from repro.results.json_fields import finite
from repro.results.metrics import Held, Metrics
from repro.results.record_parts import (
    CheckpointReport,
    NetworkReport,
    Provenance,
    RankResult,
    StepSeries,
    kernels_of_ranks,
)
from repro.results.schema import MEASURED, ComparisonRecord, ExperimentRecord, Side

_WORST_FIRST = ("oom", "diverged", "error", "ok")


def experiment_record(
    experiment: Experiment,
    results: list[RankResult],
    *,
    suite: str,
    provenance: Provenance,
    wall_s: float,
    outcome: str = "ok",
    reason: str = "",
) -> ExperimentRecord:
    """Return the record of one measured experiment. `results`: one per rank, or none if the experiment did not finish.

    The outcome of the record is the worst outcome that a rank reports.
    """
    if outcome == "ok" and results:
        worst = min(results, key=lambda result: _WORST_FIRST.index(result.outcome))
        if worst.outcome != "ok":
            outcome, reason = worst.outcome, f"rank {worst.rank}: {worst.reason}"
    first = results[0] if results else None
    if first and first.environment:
        environment = {**provenance.get("environment", {}), **first.environment}
        provenance = {**provenance, "environment": environment}
    return ExperimentRecord(
        suite=suite,
        name=experiment.name,
        key=experiment.key,
        conditions=experiment.as_dict(),
        evidence=MEASURED,
        outcome=outcome,
        reason=reason,
        metrics=_metrics(results, experiment) if results else {},
        series=_series(results) if results else StepSeries(),
        checkpoints=_checkpoints(results),
        flops_formula=counts.flops_formula(experiment.model) if first else "",
        memory_by_rank=[result.memory for result in results],
        comm=first.comm if first else [],
        comm_per_layer=first.comm_per_layer if first else [],
        comm_by_rank=[result.comm for result in results],
        software=first.software if first else None,
        kernels=kernels_of_ranks(results),
        network=NetworkReport.from_ranks([rank.network for rank in results if rank.network]),
        provenance=provenance,
        wall_s=round(wall_s, 3),
    )


def comparison_record(
    baseline: Experiment,
    subject: Experiment,
    results: tuple[list[RankResult], list[RankResult]],
    *,
    suite: str,
    provenance: Provenance,
) -> ComparisonRecord | None:
    """Return the comparison of samples/s of two experiments over paired rounds; None if a round has no time.

    `results`: results of all ranks for the baseline and for the subject, from one interleaved launch.
    """
    sides = zip((baseline, subject), results, strict=True)
    rates = [
        [
            experiment.layout.global_batch / median(steps) if steps else math.nan
            for steps in step_seconds(ranks)
        ]
        for experiment, ranks in sides
    ]
    pairs = [list(pair) for pair in zip(*rates, strict=True)]
    if not pairs or not all(math.isfinite(rate) for pair in pairs for rate in pair):
        return None
    ratio, low, high = ratio_interval(pairs, seed=0)
    return ComparisonRecord(
        suite=suite,
        name=f"{baseline.name} vs {subject.name}",
        baseline=Side(name=baseline.name, key=baseline.key),
        subject=Side(name=subject.name, key=subject.key),
        metric="samples_per_s",
        ratio=ratio,
        low=low,
        high=high,
        rounds=len(pairs),
        pairs=pairs,
        provenance=provenance,
    )


def step_seconds(results: list[RankResult]) -> list[list[float]]:
    """Return the seconds of the slowest rank in each timed step that all ranks finished, in one list per round."""
    rounds = zip(*(result.rounds for result in results), strict=False)
    return [[max(step) for step in zip(*ranks, strict=False)] for ranks in rounds]


def _metrics(results: list[RankResult], experiment: Experiment) -> Metrics:
    first = results[0]
    found: Metrics = {
        "parameters": first.parameters,
        "padding": first.padding,
        "steps": len(first.loss),
        "skipped_steps": len(first.skipped_steps),
    }
    if first.loss:
        found["loss.first"], found["loss.last"] = first.loss[0], first.loss[-1]
    found |= _speed(results, experiment)
    found |= _memory(results, marked=experiment.engine == NATIVE)
    resumed = _resumed(first)
    # A run that resumed from a checkpoint with one remaining step times no step and measures no communication.
    if not (resumed and not any(first.rounds)):
        found |= metrics.communication(first.comm, first.comm_per_layer)
        found |= metrics.purposes((1, result.comm) for result in results)
    on_processor = not first.memory.cuda
    found |= metrics.bubble([result.pipeline for result in results if result.pipeline], cores=on_processor)
    if resumed:
        found["resumed_from"] = resumed[-1]
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _speed(results: list[RankResult], experiment: Experiment) -> Metrics:
    seconds = [second for steps in step_seconds(results) for second in steps]
    if not seconds:
        return {}
    middle, p20, p80 = summarize(seconds)
    return {**metrics.speed(experiment, middle), "step_seconds.p20": p20, "step_seconds.p80": p80}


def _memory(results: list[RankResult], marked: bool) -> Metrics:
    # Ranks that diverged in their first steps have not measured their memory.
    known = [
        (memory.rss_peak_bytes, Held(memory.states, memory.peak, memory.most, memory.init_peak_bytes or 0))
        for memory in (result.memory for result in results)
        if memory.states is not None and memory.peak is not None and memory.most is not None
    ]
    if not known:
        return {}
    found = metrics.memory([usage for _, usage in known], marked=marked)
    contexts = [result.memory.beside_torch["end"] for result in results if result.memory.beside_torch]
    if contexts:
        found["memory.context_bytes"] = max(contexts)
    return {**found, "memory.rss_peak_bytes": max(resident for resident, _ in known)}


def _series(results: list[RankResult]) -> StepSeries:
    first = results[0]
    return StepSeries(
        loss=finite(first.loss),
        grad_norm=finite(first.grad_norm),
        loss_scale=finite(first.loss_scale),
        skipped_steps=first.skipped_steps,
        step_seconds=step_seconds(results),
        resumed_from=_resumed(first) or None,
        phase_seconds=[result.phase_seconds for result in results],
        pipeline=[result.pipeline.as_dict() if result.pipeline else {} for result in results],
    )


def _resumed(result: RankResult) -> list[int]:
    """Return the numbers of the steps after which the run continued from a checkpoint."""
    return [start["step"] for start in result.checkpoints.resumed] if result.checkpoints else []


def _checkpoints(results: list[RankResult]) -> CheckpointReport | None:
    """Return the combined checkpoint report of all ranks; None for a run without checkpoints."""
    found = [result.checkpoints for result in results if result.checkpoints]
    if not found:
        return None
    writes = zip(*(rank.write_seconds for rank in found), strict=False)
    resumed = found[0].resumed
    since = resumed[-1]["step"] if resumed else 0
    return CheckpointReport(
        resumed=resumed,
        written=found[0].written,
        write_seconds=[max(write) for write in writes],
        failures=[failure for rank in found for failure in rank.failures],
        times=f"of the steps after {since}, since the last start" if since else "of all steps",
    )
