"""Functions with which ledger expressions read stored records: metrics, outcomes and compared ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

from repro.claims.expression import Uncertain, Value
from repro.config import ConfigError, Experiment, Model, models
from repro.config.engines import NATIVE
from repro.results.interval import Case, StepInterval
from repro.results.metrics import STEP_SECONDS, final_loss, metric_at_step_seconds, relative_loss_distance
from repro.results.reference_records import ReferenceFile
from repro.results.schema import EMULATED, MEASURED, SIMULATED, ComparisonRecord, ExperimentRecord, Record
from repro.results.select import select


class Missing(Exception):
    """Error: an expression needs a record that does not exist, or whose run ended without the needed result.

    `remedy` is the command that creates the record; empty: a run of the experiment's suite creates the record.
    """

    def __init__(self, experiment: str, reason: str, remedy: str = ""):
        self.experiment, self.reason, self.remedy = experiment, reason, remedy
        self.suite = experiment.partition("/")[0]
        super().__init__(f"{experiment}: {reason}")


class Records:
    """Stored records for the expressions that test published values, and packaged records of other machines."""

    def __init__(self, records: Iterable[Record], references: Iterable[ReferenceFile] = (), label: str = ""):
        self.selection = select(records)
        self.references = tuple(Records(file.records, label=file.label) for file in references)
        """Packaged records of other machines, newest first, for experiments of which the user has no own record."""
        self.label = label
        """Device and day of the measurements if the records come with the package; empty for the user's own records."""

    def measured(self, experiment: str) -> bool:
        """Return whether an experiment has a measured record, with any outcome."""
        return (MEASURED, experiment) in self.selection.by_name

    def libraries(self, experiments: Iterable[str]) -> list[str]:
        """Return the external training libraries, such as `DeepSpeed 0.19.8`, that ran the measured experiments."""
        records = (self.selection.by_name.get((MEASURED, experiment)) for experiment in experiments)
        found = {r.software["name"] for r in records if r and r.software and r.experiment.engine != NATIVE}
        return sorted(found)

    def interleaved(self, subject: str, baseline: str, metric: str) -> bool:
        """Return whether one launch interleaved two experiments and compared them by `metric`."""
        pairs = self.selection.by_pair
        record = pairs.get((subject, baseline)) or pairs.get((baseline, subject))
        return record is not None and record.metric == metric

    def intervals(self, experiments: Iterable[str]) -> list[StepInterval]:
        """Return the step-time intervals from uncertain inputs that the simulated records of `experiments` contain."""
        records = (self.selection.by_name.get((SIMULATED, experiment)) for experiment in experiments)
        return [record.interval for record in records if record is not None and record.interval is not None]

    def functions(self, kind: str, case: Case | None = None) -> dict[str, Callable[..., Value | Uncertain]]:
        """Return the functions by which ledger expressions read records of one kind of evidence, by name.

        `kind`: `simulated`, `emulated` or `measured`. `case`: choice of uncertain inputs' values; None: best values.
        """

        def find(experiment: str) -> ExperimentRecord:
            stored = MEASURED if kind == EMULATED else kind
            record = self.selection.by_name.get((stored, experiment))
            if record is None:
                raise Missing(experiment, "no record")
            _of_kind(record)
            if not record.conclusive:
                raise Missing(experiment, _ended(record))
            return record

        def _of_kind(record: ExperimentRecord) -> None:
            """Raise `Missing` (no evidence) if a run is `emulated` without an emulated network or `measured` on one."""
            network = record.conditions.get("network")
            if kind != SIMULATED and bool(network) != (kind == EMULATED):
                on = "an emulated network" if network else "the machine's own links"
                reason = f"the experiment ran on {on}, so its record is not {kind} evidence"
                raise Missing(record.label, reason)

        def metric(experiment: str, name: str) -> Value | Uncertain:
            """Return the value of a metric of an experiment that ended ok: `metric("smoke/parity-tp2", "loss.last")`.

            A simulated experiment that ran out of memory has all metrics except the reserved memory. A metric with a
            confidence interval (`name.low`, `name.high`) is returned with this interval.
            """
            record = find(experiment)
            if record.outcome != "ok" and kind != SIMULATED:
                raise Missing(experiment, _ended(record))
            metrics = record.metrics
            value = metrics.get(name)
            if not isinstance(value, int | float):
                ended = "" if record.outcome == "ok" else f" ({_ended(record)})"
                near = " or ".join(get_close_matches(name, metrics, 3, 0.4)) or "no similar name"
                remedy = f"repro results {experiment.partition('/')[0]} --json"
                raise Missing(experiment, f"the record has no metric {name}{ended}, but {near}", remedy)
            if case is not None and record.interval is not None and STEP_SECONDS in metrics:
                seconds = record.interval.seconds_in(case, metrics[STEP_SECONDS])
                moved = metric_at_step_seconds(name, metrics, seconds)
                return value if moved is None else moved
            if f"{name}.low" in metrics:
                return Uncertain(value, metrics[f"{name}.low"], metrics[f"{name}.high"])
            return value

        def setting(experiment: str, name: str) -> Value:
            """Return a number from the experiment's conditions: `setting("smoke/parity-3d", "layout.tp")`.

            `name` is a field or property of `model`, `layout` or `training`, or `seq`.
            """
            value: Any = find(experiment).experiment
            for part in name.split("."):
                value = None if part.startswith("_") else getattr(value, part, None)
            if not isinstance(value, int | float):
                raise Missing(experiment, f"the experiment's conditions have no number {name}")
            return value

        def parameters(experiment: str) -> Value | Uncertain:
            """Return the number of parameters (Psi) of the model that the experiment trained."""
            return metric(experiment, "parameters")

        def outcome(experiment: str) -> Value:
            """Return the outcome of an experiment, for example `"ok"`, `"oom"` or `"diverged"`."""
            return find(experiment).outcome

        def failure(experiment: str, name: str) -> Value:
            """Return the `phase`, `allocated_bytes` or `reserved_bytes` at which a simulated step runs out of memory.

            Return `"it fits"` for a step that fits in memory.
            """
            record = find(experiment)
            if record.outcome == "ok":
                return "it fits"
            for role in record.roles or ():
                if role.failure is not None and name in role.failure.as_dict():
                    return cast(Value, role.failure.as_dict()[name])
            raise Missing(experiment, f"the experiment's record does not contain the {name} of the failure")

        def extreme(name: str, experiments: tuple[str, ...], best: Callable[..., str], what: str) -> Value:
            """Return the largest or smallest value of the setting `name` among the experiments that end ok.

            An experiment with a larger (or smaller) value must have failed, and all other settings must be equal.
            """
            if not experiments:
                raise TypeError("the list of experiments is empty")
            values = {experiment: setting(experiment, name) for experiment in experiments}
            _alike([find(experiment) for experiment in experiments], name)
            fits = [experiment for experiment in experiments if outcome(experiment) == "ok"]
            end = best(values, key=values.__getitem__)
            if not fits:
                return 0 if what == "largest" else math.inf
            chosen = best(fits, key=values.__getitem__)
            # If the smallest fitting degree is 1, no failing experiment is needed, because no smaller degree exists.
            if chosen == end and (what, values[end]) != ("smallest", 1):
                reason = f"the {what} listed {name} fits in memory, so the {what} possible one is unknown"
                raise Missing(end, reason)
            return values[chosen]

        def largest(name: str, *experiments: str) -> Value:
            """Return the largest value of a setting with which an experiment fits in memory; a listed one must not fit.

            `largest("model.published_params", ...)` is the largest model, by its size in the source; 0 if none fits.
            """
            return extreme(name, experiments, max, "largest")

        def smallest(name: str, *experiments: str) -> Value:
            """Return the smallest value of a setting with which an experiment fits; a smaller one must not fit."""
            return extreme(name, experiments, min, "smallest")

        def fastest(name: str, *experiments: str) -> Value | Uncertain:
            """Return the largest value of a metric among experiments that end ok: `fastest("samples_per_s", ...)`."""
            fits = [experiment for experiment in experiments if outcome(experiment) == "ok"]
            if not fits:
                raise Missing(" and ".join(experiments), "no experiment of the list fits in memory")
            found = [metric(experiment, name) for experiment in fits]
            return max(found, key=lambda one: float(one.value if isinstance(one, Uncertain) else one))

        def rising(*values: float) -> Value:
            """Return `"rising"` if each value is above its predecessor, otherwise `"not rising"`."""
            return "rising" if all(low < high for low, high in pairwise(values)) else "not rising"

        def losses(experiment: str) -> list[float | None]:
            """Return the loss of every step of an experiment that ended ok."""
            record = find(experiment)
            if record.outcome != "ok":
                raise Missing(experiment, _ended(record))
            if not record.series.loss:
                raise Missing(experiment, "the experiment's record has no losses")
            return record.series.loss

        def strayed(experiment: str, reference: str, *controls: str) -> Value:
            """Return the loss curve's distance from `reference`, divided by the control runs' distance from it."""
            curve, *others = map(losses, (experiment, *controls))
            try:
                return relative_loss_distance(curve, losses(reference), others)
            except ValueError as error:
                raise Missing(
                    experiment, f"the losses cannot be compared with those of {reference}: {error}"
                ) from None

        def apart(experiment: str, reference: str) -> Value:
            """Return the relative difference of the mean losses of two trainings over their last 50 steps."""
            try:
                mine, other = final_loss(losses(experiment)), final_loss(losses(reference))
            except ValueError as error:
                raise Missing(
                    experiment, f"the losses cannot be compared with those of {reference}: {error}"
                ) from None
            return abs(mine - other) / other

        def compared(subject: str, baseline: str) -> Value | Uncertain:
            """Return the ratio of throughputs of two experiments interleaved in one launch, with its 95 % interval."""
            for experiment in (subject, baseline):
                if found := self.selection.by_name.get((MEASURED, experiment)):
                    _of_kind(found)
            if record := self.selection.by_pair.get((subject, baseline)):
                return uncertain_ratio(record)
            if record := self.selection.by_pair.get((baseline, subject)):
                inverse = uncertain_ratio(record)
                return Uncertain(1 / inverse.value, 1 / inverse.high, 1 / inverse.low)
            raise Missing(subject, f"no launch ran the experiment in turns with {baseline}")

        def evaluated(model: str, task: str, way: str, metric: str) -> Value:
            """Return an evaluation score of weights with the sizes of a packaged model, from the newest record.

            `evaluated("gpt2-1.5b", "lambada", "gpt2", "accuracy.filtered")`; `way`: name of the evaluation protocol.
            The padding of the vocabulary may differ.
            """
            sizes = _sizes(asdict(models.load_model(model)))
            for record in reversed(self.selection.evaluations):
                if (record.task, record.way.get("name")) == (task, way) and _sizes(record.model) == sizes:
                    value = record.metrics.get(metric)
                    if isinstance(value, int | float):
                        return value
                    raise Missing(record.label, f"the record of the evaluation has no metric {metric}")
            reason = "the model was not evaluated, because the evaluation needs the published weights"
            raise Missing(f"{model} on {task}", reason, evaluation(task, way))

        found: list[Callable[..., Value | Uncertain]] = [metric, setting, parameters, outcome, failure]
        found += [largest, smallest, fastest, rising, strayed, apart, compared, evaluated]
        return {function.__name__: function for function in found}


def evaluation(task: str, way: str) -> str:
    """Return the command that evaluates model weights on a task."""
    return f"repro evaluate --weights DIR --task {task} --protocol {way} --data FILE"


def _sizes(model: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the sizes that identify a model, without the padded vocabulary; None if `model` is invalid."""
    try:
        known = Model(**{**model, "name": "like"})
    except (ConfigError, TypeError):
        return None
    sizes = (known.layers, known.hidden, known.heads, known.head_width, known.ffn_width, known.seq)
    return (*sizes, known.departures())


_FOLLOWS = {
    "model": ("model",),
    "layout.tp": ("layout.tp", "layout.dp", "layout.global_batch", "layout.sp"),
    "layout.micro_batch": ("layout.micro_batch", "layout.global_batch"),
    "layout.world": ("layout.tp", "layout.dp", "layout.micro_batch"),
}
"""Conditions in which compared experiments may differ, by the setting that the comparison varies.

Models may differ in all sizes. A tensor-parallel degree also sets the data-parallel degree and allows sequence
parallelism. A micro-batch also sets the global batch. A number of GPUs sets all degrees that divide the global batch.
"""


MAX_CACHED_CONDITIONS = 4096
"""Maximum number of experiments whose conditions are cached, because each draw of uncertain inputs reads them."""


def _alike(records: list[ExperimentRecord], name: str) -> None:
    """Raise `Missing` (no evidence) if experiments that are compared for fit in memory differ in more than `name`."""
    free = _FOLLOWS.get(name) or _FOLLOWS.get(name.partition(".")[0]) or (name,)
    first = _conditions(records[0].experiment, free)
    for record in records[1:]:
        other = _conditions(record.experiment, free)
        differ = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
        if differ:
            raise Missing(
                record.label, f"the experiment also differs from {records[0].label} in {', '.join(differ)}"
            )


@lru_cache(MAX_CACHED_CONDITIONS)
def _conditions(experiment: Experiment, free: tuple[str, ...]) -> dict[str, Any]:
    """Return the conditions of an experiment by key (`layout.zero`), without names, time limits and the keys `free`.

    `training.seq` is the sequence length that the experiment uses, from its training or its model.
    """
    flat: dict[str, Any] = {}
    for key, value in experiment.as_dict().items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": part for inner, part in value.items()}
        else:
            flat[key] = value
    flat["training.seq"] = experiment.seq
    left_out = ("name", "limits.timeout_s", "limits.hang_s", *free)
    return {
        key: v for key, v in flat.items() if not any(f"{key}.".startswith(f"{part}.") for part in left_out)
    }


def _ended(record: ExperimentRecord) -> str:
    return f"ended {record.outcome}: {record.reason or 'no reason given'}"


def uncertain_ratio(comparison: ComparisonRecord) -> Uncertain:
    """Return the measured ratio of a comparison with its confidence interval; without interval for too few rounds."""
    ratio, low, high = comparison.ratio, comparison.low, comparison.high
    return Uncertain(ratio, ratio if low is None else low, ratio if high is None else high)
