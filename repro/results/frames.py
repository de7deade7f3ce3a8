"""Tidy pandas views of records: one observation a row, one variable a column.  pandas is imported on call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from repro.results.schema import ComparisonRecord, ExperimentRecord, Record

if TYPE_CHECKING:
    import pandas as pd

_HEAD = ("suite", "name", "key", "evidence", "written")
_LAYOUT = ("dp", "tp", "zero", "sp", "micro_batch", "global_batch", "recompute", "precision")


def experiments(records: Iterable[Record]) -> pd.DataFrame:
    """One row per experiment record: what was run, how it ended, every metric in a column of its name."""
    return _frame(
        {
            **_identity(record),
            "outcome": record.outcome,
            "reason": record.reason,
            "wall_s": record.wall_s,
            **record.metrics,
        }
        for record in _experiments(records)
    )


def comparisons(records: Iterable[Record]) -> pd.DataFrame:
    """One row per comparison record: `baseline`, `subject`, `ratio`, `low`, `high`, `rounds`."""
    names = ("suite", "name", "written", "metric", "ratio", "low", "high", "rounds")
    return _frame(
        {
            **{name: getattr(record, name) for name in names},
            "baseline": record.baseline.name,
            "subject": record.subject.name,
        }
        for record in records
        if isinstance(record, ComparisonRecord)
    )


def _experiments(records: Iterable[Record]) -> Iterable[ExperimentRecord]:
    return (record for record in records if isinstance(record, ExperimentRecord))


def _identity(record: ExperimentRecord) -> dict[str, Any]:
    experiment = record.experiment
    return {
        **{name: getattr(record, name) for name in _HEAD},
        "model": experiment.model.name,
        "engine": experiment.engine,
        "system": experiment.system,
        **{name: getattr(experiment.layout, name) for name in _LAYOUT},
    }


def _frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows))
