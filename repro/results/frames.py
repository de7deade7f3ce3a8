"""Tidy rows of records, one observation a row, one variable a column, and pandas views of them.

The rows need no pandas, which is imported on call: tables in the terminal and `--json` show the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from repro.config import ConfigError, Experiment, systems
from repro.model import flops
from repro.results.metrics import shown
from repro.results.schema import ComparisonRecord, ExperimentRecord, Record

if TYPE_CHECKING:
    import pandas as pd

_LAYOUT = ("dp", "tp", "cp", "pp", "zero", "sp", "micro_batch", "global_batch", "recompute", "precision")
_COMPARED = ("suite", "name", "written", "metric", "ratio", "low", "high", "rounds")


def experiments(records: Iterable[Record]) -> pd.DataFrame:
    """`experiment_row` of every experiment record."""
    return _frame(experiment_row(record) for record in records if isinstance(record, ExperimentRecord))


def comparisons(records: Iterable[Record]) -> pd.DataFrame:
    """`comparison_row` of every comparison record."""
    return _frame(comparison_row(record) for record in records if isinstance(record, ComparisonRecord))


def experiment_row(record: ExperimentRecord) -> dict[str, Any]:
    """What was run, how it ended, every metric under its name, and `mfu` where the device's peak is known.

    Of what does not fit no time, and so no speed, whatever its operators would take.
    """
    experiment, metrics = record.experiment, shown(record.metrics, record.outcome)
    found = {
        "suite": record.suite,
        "name": record.name,
        "key": record.key,
        "evidence": record.shown_as,
        "written": record.written,
        "model": experiment.model.name,
        "engine": experiment.engine,
        "system": experiment.system,
        **{name: getattr(experiment.layout, name) for name in _LAYOUT},
        "outcome": record.outcome,
        "reason": record.reason,
        "wall_s": record.wall_s,
        **metrics,
    }
    mfu = _utilisation(experiment, metrics.get("model_flops_per_s"))
    return found if mfu is None else {**found, "mfu": mfu}


def comparison_row(record: ComparisonRecord) -> dict[str, Any]:
    """`baseline`, `subject`, `metric`, `ratio` with its interval `low` to `high`, `rounds`."""
    return {
        **{name: getattr(record, name) for name in _COMPARED},
        "baseline": record.baseline.name,
        "subject": record.subject.name,
    }


def _utilisation(experiment: Experiment, rate: float | None) -> float | None:
    """MFU of a system with a file; what the machine at hand could do at most, nobody has said."""
    layout, system = experiment.layout, experiment.system
    if rate is None or system in systems.HERE:
        return None
    try:
        return flops.utilisation(rate, layout.world, systems.load(system), layout.precision)
    except ConfigError:  # a file that has gone since
        return None


def _frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows))
