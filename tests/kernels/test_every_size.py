"""For every size of every suite and model file there is a kernel: nothing falls back to torch's operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro import models
from repro.config import Model, OperatorSet
from repro.kernels.cuda import layernorm, softmax
from repro.suites import load

SUITES = sorted((Path(__file__).parents[2] / "suites").glob("*.toml"))
KINDS = {"fp32": "float", "fp16": "half", "bf16": "bfloat16"}
ENTRIES = [entry.experiment for path in SUITES for entry in load(path).entries]
ROWS: set[tuple[Model, str]] = {(each.model, each.layout.precision) for each in ENTRIES}
ROWS |= {(model, kind) for model in map(models.load, models.names()) for kind in KINDS}
SCORES = {(each.seq, each.layout.precision) for each in ENTRIES if each.layout.kernels is OperatorSet.SOFTMAX}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_norms_and_softmax_hold_every_row(backward: bool) -> None:
    """Others work on rows of any length; what is aligned is read 16 bytes at once, what is not singly."""
    assert max(model.hidden for model, _ in ROWS) > 25_600
    for model, precision in ROWS:
        width = 4 if precision == "fp32" else 8
        for at_once in {width if model.hidden % width == 0 else 1, 1}:
            kinds = (KINDS[precision], KINDS[precision])
            layernorm.program(*kinds, model.hidden, at_once, backward, model.norm == "layer")
    assert SCORES
    for seq, precision in SCORES:
        width = 4 if precision == "fp32" else 8
        softmax.program(KINDS[precision], seq, width if seq % width == 0 else 1, backward)
