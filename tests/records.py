"""Records for tests: constructed or modified records, and lines of a store read without the product's reader."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from repro.config import Experiment, Layout, Model, Training
from repro.model.counts import total_parameters
from repro.results import schema
from repro.results.record_parts import MeasuredTrial, RankMemory
from repro.results.schema import ExperimentRecord, FitRecord, Record

R = TypeVar("R", bound=Record)
CONDITIONS = {"model": {"name": "m"}, "layout": {}, "system": "local", "engine": "native"}


def made_up(name: str, **keys: Any) -> ExperimentRecord:
    """Return a constructed record of an experiment; `keys` are the keys of a line in the store."""
    plain = {"kind": "experiment", "protocol": schema.PROTOCOL, "suite": "s", "key": "k", "written": "2026"}
    plain |= {"evidence": "measured", "outcome": "ok", "reason": "", "metrics": {}, "series": {}}
    return cast(
        ExperimentRecord, schema.read_record({**plain, "experiment": CONDITIONS, "name": name, **keys})
    )


def changed(record: R, **keys: Any) -> R:
    """Return the record with other values; `keys` are the keys of a line in the store."""
    return cast(R, schema.read_record({**record.as_dict(), **keys}))


def lines(results: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a store's files, sorted by `sequence`; lines without `sequence` come first."""
    found = [
        json.loads(line)
        for path in (results / "records").glob("*.jsonl")
        for line in path.read_text().split("\n")[:-1]
    ]
    return sorted(found, key=lambda document: (document.get("sequence", 0), str(document["written"])))


def latest(results: Path, evidence: str = "measured") -> dict[str, dict[str, Any]]:
    """Return the newest line of each experiment with this kind of evidence, by key."""
    return {
        line["key"]: line for line in lines(results) if line.get("evidence") == evidence and "key" in line
    }


def fit_record(
    *,
    device: str = "NVIDIA V100",
    hidden: int = 1600,
    layers: int = 46,
    ranks: int = 64,
    zero: int = 0,
    cb: bool = False,
    fails: str = "oom",
    written: str = "2027-01-01T00:00:00Z",
    limit_bytes: int = 32_000_000_000,
    states: dict[str, int] | None = None,
    model: Model | None = None,
    system: str = "local-gpu",
) -> FitRecord:
    """Return a search in which `layers` fit and one more does not; with `model`, a search of its micro-batch."""
    shape = model or Model(name="m", layers=layers, hidden=hidden, heads=hidden // 64, vocab=51200, seq=1024)
    layout = Layout(dp=ranks, zero=zero, cb=cb, recompute=True, precision="fp16", global_batch=ranks)
    experiment = Experiment(name="fit", model=shape, layout=layout, training=Training(), system=system)
    more = shape if model else replace(shape, layers=layers + 1)
    memory = RankMemory(cuda={"reserved_peak": 30 * 10**9}, states=states)

    def trial(tried: Model, **result: Any) -> MeasuredTrial:
        return MeasuredTrial(layers=tried.layers, micro_batch=1, parameters=total_parameters(tried), **result)

    return FitRecord(
        suite="fit",
        name="m-on-64",
        written=written,
        conditions=experiment.as_dict(),
        evidence="measured",
        search="micro-batch" if model else "layers",
        device=device,
        limit_bytes=limit_bytes,
        ranks=ranks,
        one_rank=True,
        rank=0,
        collectives="no data",
        largest=trial(shape, outcome="ok", memory=memory),
        first_failing=trial(more, outcome=fails),
    )
