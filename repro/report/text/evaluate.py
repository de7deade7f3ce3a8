"""Output of `repro evaluate` and `repro export-weights`: scores with their protocol, and written files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from repro.config import ConfigError, Layout, models
from repro.util import units
from repro.util.console import PAGE_COLUMNS, new_table, print_json, print_page, stdout


def print_scores(
    weights: Path, task: str, data: Path, layout: Layout, results: Path, json: bool, **how: Any
) -> int:
    """Score and print the result, or the record (`json`); return 1 if the ranks failed. Raises `ConfigError`."""
    from repro.quality.evaluate.run import EvaluationOptions, run_evaluation

    options = EvaluationOptions(weights=weights, task=task, data=data, layout=layout, **how)
    try:
        record, signal = run_evaluation(options, results)
    except ConfigError as error:
        known = error.key in ("tp", "pp", "dp", "zero", "micro_batch", "precision") and not error.file
        raise error.for_key(f"--{error.key.replace('_', '-')}") if known else error from None
    if signal:
        return 128 + signal
    if json:
        print_json(record.as_dict())
        return int(record.outcome != "ok")
    way = record.way
    scores = [
        (name, units.percent(value) if name.startswith("accuracy") else f"{value:,.10g}")
        for name, value in record.metrics.items()
    ]
    print_page(
        stdout(PAGE_COLUMNS),
        f"{record.name}: {record.outcome}. {record.reason}".rstrip(),
        new_table("score", "value", rows=scores),
        f"Protocol {way['name']}: {way['source']}.",
        *(f"{line}." for line in way["rules"]),
        *(f"Not specified: {line}." for line in way["left_open"]),
        *(f"Published: {line}." for line in way["published"]),
    )
    return int(record.outcome != "ok")


def print_exported_weights(weights: Path, output: Path, vocab: int, model: str, json: bool) -> int:
    """Write the weights and name the files; return 0. Raises `ConfigError` before any file is written."""
    from repro.quality.weights.formats import open_weights
    from repro.quality.weights.huggingface import export_huggingface

    source = open_weights(weights, models.load_model(model) if model else None)
    source.check()
    written = export_huggingface(source, output, vocab)
    if json:
        print_json({"weights": source.kind, "files": [str(path) for path in written]})
        return 0
    sizes = source.model
    print_page(
        stdout(PAGE_COLUMNS),
        f"{output}: weights of {source.kind}, {sizes.layers} layers of width {sizes.hidden}, "
        f"{sizes.vocab} tokens.",
        new_table("file", "size", rows=[(path.name, units.size(path.stat().st_size)) for path in written]),
    )
    return 0
