"""Tidy pandas views of records: one observation a row, one variable a column.  pandas is imported on call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]
_HEAD = ("suite", "name", "key", "evidence", "written")
_LAYOUT = ("dp", "tp", "zero", "sp", "micro_batch", "global_batch", "recompute", "precision")


def experiments(records: Iterable[Record]) -> pd.DataFrame:
    """One row per experiment record: what was run, how it ended, every metric in a column of its name."""
    return _frame(
        {
            **_identity(record),
            "outcome": record["outcome"],
            "reason": record["reason"],
            "wall_s": record["wall_s"],
            **record["metrics"],
        }
        for record in _of_kind(records, "experiment")
    )


def metrics(records: Iterable[Record]) -> pd.DataFrame:
    """One row per record and metric: columns `metric` and `value`."""
    return _frame(
        {**_identity(record), "metric": metric, "value": value}
        for record in _of_kind(records, "experiment")
        for metric, value in record["metrics"].items()
    )


def losses(records: Iterable[Record]) -> pd.DataFrame:
    """One row per record and training step: `step`, `loss`, `grad_norm`."""
    return _frame(
        {**_identity(record), "step": step, "loss": loss, "grad_norm": norm}
        for record in _of_kind(records, "experiment")
        for step, (loss, norm) in enumerate(
            zip(record["series"].get("loss", []), record["series"].get("grad_norm", []), strict=False)
        )
    )


def step_seconds(records: Iterable[Record]) -> pd.DataFrame:
    """One row per record and timed step: `round`, `step` within it, `seconds`."""
    return _frame(
        {**_identity(record), "round": number, "step": step, "seconds": seconds}
        for record in _of_kind(records, "experiment")
        for number, steps in enumerate(record["series"].get("step_seconds", []))
        for step, seconds in enumerate(steps)
    )


def memory(records: Iterable[Record]) -> pd.DataFrame:
    """One row per record, rank, moment (`states` or `peak`) and category: `bytes`."""
    return _frame(
        {**_identity(record), "rank": rank, "moment": moment, "category": category, "bytes": size}
        for record in _of_kind(records, "experiment")
        for rank, measured in enumerate(record["memory_by_rank"])
        for moment in ("states", "peak")
        for category, size in measured.get(moment, {}).items()
        if category != "total"
    )


def communication(records: Iterable[Record]) -> pd.DataFrame:
    """One row per record, rank, group and operation: `calls`, `payload_bytes`, `sent_bytes`."""
    return _frame(
        {**_identity(record), "rank": rank, **row}
        for record in _of_kind(records, "experiment")
        for rank, rows in enumerate(record["comm_by_rank"])
        for row in rows
    )


def comparisons(records: Iterable[Record]) -> pd.DataFrame:
    """One row per comparison record: `baseline`, `subject`, `ratio`, `low`, `high`, `rounds`."""
    return _frame(
        {
            **{
                key: record[key]
                for key in ("suite", "name", "written", "metric", "ratio", "low", "high", "rounds")
            },
            "baseline": record["baseline"]["name"],
            "subject": record["subject"]["name"],
        }
        for record in _of_kind(records, "comparison")
    )


def _of_kind(records: Iterable[Record], kind: str) -> Iterable[Record]:
    return (record for record in records if record.get("kind") == kind)


def _identity(record: Record) -> Record:
    experiment = record["experiment"]
    return {
        **{key: record[key] for key in _HEAD},
        "model": experiment["model"]["name"],
        "engine": experiment["engine"],
        "system": experiment["system"],
        **{key: experiment["layout"][key] for key in _LAYOUT},
    }


def _frame(rows: Iterable[Record]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows))
