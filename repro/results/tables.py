"""Rows and groups of records for terminal tables, `--json` and data frames."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from repro.config import ConfigError, Experiment, systems
from repro.model import counts
from repro.model.counts import total_parameters
from repro.results.metrics import shown
from repro.results.schema import EMULATED, MEASURED, SIMULATED, ComparisonRecord, ExperimentRecord
from repro.results.select import Selection

_LAYOUT = ("dp", "tp", "cp", "pp", "zero", "sp", "micro_batch", "global_batch", "recompute", "precision")
_COMPARED = ("suite", "name", "written", "metric", "ratio", "low", "high", "rounds")


def experiment_row(record: ExperimentRecord) -> dict[str, Any]:
    """Return one table row with the conditions, outcome and metrics of an experiment, and its MFU if the peak is known.

    The row of a step that does not fit in memory has no time and no speed.
    """
    experiment, metrics = record.experiment, shown(record.metrics, record.outcome)
    found = {
        **{name: getattr(record, name) for name in ("suite", "name", "key")},
        "evidence": record.shown_as,
        "written": record.written,
        "model": experiment.model.name,
        "engine": experiment.engine,
        "system": experiment.system,
        **{name: getattr(experiment.layout, name) for name in _LAYOUT},
        **{name: getattr(record, name) for name in ("outcome", "reason", "wall_s")},
        **metrics,
    }
    for name, rate in (("mfu", "model_flops_per_s"), ("mfu_causal", "causal_flops_per_s")):
        mfu = _utilisation(experiment, metrics.get(rate))
        found |= {} if mfu is None else {name: mfu}
    return found


def comparison_row(record: ComparisonRecord) -> dict[str, Any]:
    """Return one table row of a comparison: its experiments, `metric`, `ratio` with interval, and `rounds`."""
    names = {"baseline": record.baseline.name, "subject": record.subject.name}
    return {name: getattr(record, name) for name in _COMPARED} | names


def _utilisation(experiment: Experiment, rate: float | None) -> float | None:
    """Return the model FLOP/s utilisation (MFU) for a FLOP/s `rate`; None if the peak of the device is unknown."""
    layout, system = experiment.layout, experiment.system
    if rate is None or system in systems.LOCAL_SYSTEMS:
        return None
    try:
        return counts.utilisation(rate, layout.world, systems.load_system_file(system), layout.precision)
    except ConfigError:  # the system file of the run has been deleted
        return None


KINDS = (MEASURED, EMULATED, SIMULATED)


@dataclass(frozen=True)
class ComparableResults:
    """Records of one suite with one kind of evidence, which a single table can compare."""

    suite: str
    evidence: str
    """Kind of evidence: `measured`, `emulated` or `simulated`."""
    records: list[ExperimentRecord]
    """Records by model size, then by descending speed; records without speed are last."""
    comparisons: list[ComparisonRecord]
    """Comparisons of experiments in `records` that ran interleaved in one launch."""


def matches_pattern(pattern: str, suite: str, name: str) -> bool:
    """Return whether a glob matches a suite, a `name` or `suite/name`; an empty pattern matches everything."""
    return not pattern or any(fnmatchcase(text, pattern) for text in (suite, name, f"{suite}/{name}"))


def comparable_results(selection: Selection, pattern: str = "") -> list[ComparableResults]:
    """Return the selected records that match `pattern`, grouped by suite and kind of evidence."""
    records = selection.by_name.values()
    return _grouped(selection, (r for r in records if matches_pattern(pattern, r.suite, r.name)))


def _grouped(selection: Selection, chosen: Iterable[ExperimentRecord]) -> list[ComparableResults]:
    """Return the records `chosen` for display, and their comparisons, grouped by suite and kind of evidence."""
    found: dict[tuple[str, str], list[ExperimentRecord]] = {}
    for record in chosen:
        found.setdefault((record.suite, record.shown_as), []).append(record)
    results = []
    for suite, kind in sorted(found, key=lambda at: (at[0], KINDS.index(at[1]))):
        records = sorted(found[suite, kind], key=_order)
        compared = _compared(selection.comparisons, suite, kind, records)
        results.append(ComparableResults(suite, kind, records, compared))
    return results


def results_of_run(
    selection: Selection, suite: str, names: Iterable[str], evidence: str
) -> list[ComparableResults]:
    """Return the records of the experiments `names` in a suite; evidence `measured` includes emulated records."""
    wanted = set(names)
    records = selection.simulated if evidence == SIMULATED else selection.measured
    return _grouped(selection, (r for r in records if r.suite == suite and r.name in wanted))


def _order(record: ExperimentRecord) -> tuple[Any, ...]:
    experiment, rate = record.experiment, experiment_row(record).get("tokens_per_s", 0.0)
    return total_parameters(experiment.model), experiment.model.name, experiment.system, -rate, record.name


def _compared(
    comparisons: Iterable[ComparisonRecord], suite: str, kind: str, records: Iterable[ExperimentRecord]
) -> list[ComparisonRecord]:
    names = {record.name for record in records}
    both = [c for c in comparisons if c.suite == suite and {c.subject.name, c.baseline.name} <= names]
    return [] if kind == SIMULATED else both  # comparisons exist for measured experiments only
