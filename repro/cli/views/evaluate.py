"""`repro export-weights`: what was written."""

from __future__ import annotations

from pathlib import Path

from repro import models
from repro.render import units
from repro.render.console import print_json


def export(weights: Path, output: Path, vocab: int, model: str, json: bool) -> int:
    """Write the weights and name the files; 0.  Raises `ConfigError` before anything is written."""
    from repro.weights.export import export as write
    from repro.weights.opened import open_weights

    source = open_weights(weights, models.load(model) if model else None)
    source.check()
    written = write(source, output, vocab)
    if json:
        print_json({"weights": source.kind, "files": [str(path) for path in written]})
        return 0
    print(
        f"{source.kind}: {source.model.layers} layers of {source.model.hidden}, {source.model.vocab} tokens"
    )
    for path in written:
        print(f"{path}  {units.size(path.stat().st_size)}")
    return 0
