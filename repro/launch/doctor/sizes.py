"""Every CUDA program that the suites and model files ask for, with the sizes that share it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from repro.config import Model, models
from repro.config.enums import OperatorSet
from repro.config.suites import SUITES, load_suite
from repro.kernels.cuda import (
    adamw,
    columns,
    cross_entropy,
    dropout,
    gelu,
    glu,
    layernorm,
    norm,
    rope,
    softmax,
)
from repro.kernels.cuda.occupancy import BYTES
from repro.kernels.cuda.program import TYPES, Program
from repro.parallel.storage import DTYPES

KINDS = {precision: TYPES[dtype] for precision, dtype in DTYPES.items()}
"""A layout's precision -> the type in the sources."""


class SizeClass(NamedTuple):
    """One program, and who shares it."""

    program: Program
    sizes: tuple[int, ...]
    """Columns of its rows, ascending; empty where rows of any length are alike."""


@cache
def size_classes() -> list[SizeClass]:
    """Of all suites' experiments and of all model files in every precision, at the addresses that our tensors have."""
    experiments = [entry.experiment for path in SUITES.files() for entry in load_suite(path).entries]
    rows = {(e.model, e.layout.precision) for e in experiments}
    rows |= {
        (model, precision) for model in map(models.load_model, models.model_names()) for precision in KINDS
    }
    scores = {
        (e.seq, e.layout.precision)
        for e in experiments
        if e.layout.kernels is OperatorSet.SOFTMAX or e.training.attention_dropout
    }
    found: dict[str, tuple[Program, set[int]]] = {}
    asked = [
        *((program, 0) for precision in KINDS for program in _of_any_rows(KINDS[precision])),
        *(each for model, precision in rows for each in _of_model(model, KINDS[precision])),
        *(
            (softmax.program(KINDS[precision], seq, _width(KINDS[precision], seq), backward), seq)
            for seq, precision in scores
            for backward in (False, True)
        ),
    ]
    for program, size in asked:
        found.setdefault(program.text, (program, set()))[1].add(size)
    classes = [SizeClass(program, tuple(sorted(sizes - {0}))) for program, sizes in found.values()]
    return sorted(classes, key=lambda each: (each.program.source, each.program.definitions, each.sizes))


def _width(kind: str, size: int) -> int:
    """Elements that a thread reads at once of rows of this size: of 16 bytes where that goes."""
    whole = 16 // BYTES[kind]
    return 1 if size % whole else whole


def _of_model(model: Model, kind: str) -> Iterator[tuple[Program, int]]:
    width, centred = _width(kind, model.hidden), model.norm == "layer"
    for backward in (False, True):
        yield layernorm.program(kind, kind, model.hidden, width, backward, centred), model.hidden


def _of_any_rows(kind: str) -> Iterator[Program]:
    yield from (cross_entropy.program(kind), norm.program(kind), columns.program(kind))
    yield from {adamw.program(kind, kind if kind != "float" else ""), adamw.program("float", kind)}
    for width in (16 // BYTES[kind], 1):
        yield from (gelu.program(kind, kind, width), glu.program(kind, width), rope.program(kind, width))
        for bias in ("", kind):
            for residual in (False, True):
                yield from (dropout.program(kind, bias, residual, drop, width) for drop in (False, True))
