"""Tables of records: tidy rows, and groups of comparable results.

Terminal tables, `--json` and data frames show the same rows.
"""

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
    """Return the conditions, outcome and metrics of an experiment, and MFUs where the device's peak is known.

    A step that does not fit has no time and no speed.
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
    """Return `baseline`, `subject`, `metric`, `ratio` with its interval `low` to `high`, and `rounds`."""
    names = {"baseline": record.baseline.name, "subject": record.subject.name}
    return {name: getattr(record, name) for name in _COMPARED} | names


def _utilisation(experiment: Experiment, rate: float | None) -> float | None:
    """Return the MFU on a system with a file; None on the local machine, whose peak is unknown."""
    layout, system = experiment.layout, experiment.system
    if rate is None or system in systems.LOCAL_SYSTEMS:
        return None
    try:
        return counts.utilisation(rate, layout.world, systems.load_system_file(system), layout.precision)
    except ConfigError:  # a system file that no longer exists
        return None


KINDS = (MEASURED, EMULATED, SIMULATED)


@dataclass(frozen=True)
class ComparableResults:
    """Results of one suite and one kind of evidence."""

    suite: str
    evidence: str
    """`measured`, `emulated` or `simulated`."""
    records: list[ExperimentRecord]
    """Sorted by model size, then by descending speed; records without speed are last."""
    comparisons: list[ComparisonRecord]
    """Comparisons of interleaved experiments."""


def matches_pattern(pattern: str, suite: str, name: str) -> bool:
    """Return whether a pattern (a suite, or a glob of `name` or `suite/name`) matches; an empty pattern matches all."""
    return not pattern or any(fnmatchcase(text, pattern) for text in (suite, name, f"{suite}/{name}"))


def comparable_results(selection: Selection, pattern: str = "") -> list[ComparableResults]:
    """Return the selected results that match `pattern`, by suite and kind of evidence."""
    records = selection.by_name.values()
    return _grouped(selection, (r for r in records if matches_pattern(pattern, r.suite, r.name)))


def _grouped(selection: Selection, chosen: Iterable[ExperimentRecord]) -> list[ComparableResults]:
    """Return the `chosen` records of the selection, and their comparisons, by suite and kind of evidence."""
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
    """Return the results of a run of these experiments; evidence `measured` includes emulated results."""
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
    return [] if kind == SIMULATED else both  # only executed experiments have comparisons
