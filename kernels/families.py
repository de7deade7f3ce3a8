"""Index of all `repro::` operators: their cost formulas, which torch's FlopCounterMode also uses, and CUDA programs.

The formulas are in the modules of the kernels. They count floating-point operations and necessary memory traffic
(operands are read once, results are written once), but no integer operations such as those of random bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from repro.kernels import (
    adamw,
    column_sums,
    cross_entropy,
    dropout,
    gelu,
    glu,
    layernorm,
    norm,
    rmsnorm,
    rope,
    softmax,
)
from repro.kernels.cuda.program import TYPE_BYTES, Program
from repro.kernels.library import Cost, Operand

FORMULAS: dict[str, Callable[..., Cost]] = {
    "layer_norm": layernorm.forward_cost,
    "layer_norm_backward": layernorm.backward_cost,
    "rms_norm": rmsnorm.forward_cost,
    "rms_norm_backward": rmsnorm.backward_cost,
    "bias_gelu": gelu.forward_cost,
    "bias_gelu_backward": gelu.backward_cost,
    "swiglu": glu.forward_cost,
    "swiglu_backward": glu.backward_cost,
    "rotary": rope.cost,
    "bias_dropout_residual": dropout.forward_cost,
    "bias_dropout_residual_backward": dropout.backward_cost,
    "causal_softmax": softmax.forward_cost,
    "causal_softmax_backward": softmax.backward_cost,
    "cross_entropy_max": cross_entropy.max_cost,
    "cross_entropy_sums": cross_entropy.sums_cost,
    "cross_entropy_backward_": cross_entropy.gradient_cost,
    "adamw_": adamw.cost,
    "norm_squared": norm.cost,
    "sum_rows": column_sums.cost,
}
"""Cost formula (FLOP and bytes) of each operator, by the operator's name without `repro::`."""
FAMILIES = {
    "adamw": adamw,
    "norm": norm,
    "layer norm and RMS norm": layernorm,
    "bias and GELU": gelu,
    "SwiGLU": glu,
    "rotary positions": rope,
    "bias, dropout and residual": dropout,
    "causal softmax": softmax,
    "cross-entropy": cross_entropy,
    "sums of columns": column_sums,
}
"""Module of each family of kernels, by the family's name in messages."""
SOURCE_TYPES = {"fp32": "float", "bf16": "bfloat16", "fp16": "half"}
"""Name of the element type in the CUDA sources, by the training precision of a layout."""


def _as_operand(argument: Any, itemsize: int) -> Any:
    if isinstance(argument, Tensor):
        return Operand(tuple(argument.shape), argument.element_size())
    if isinstance(argument, tuple):
        return Operand(argument, itemsize)
    if isinstance(argument, list):
        return [_as_operand(item, itemsize) for item in argument]
    return argument


def cost(name: str, *arguments: Any, itemsize: int = 4) -> Cost:
    """Return (flops, bytes_read, bytes_written) of one call of `repro::<name>` with `arguments` in schema order.

    Tensors may be on `meta`. A tuple of sizes stands for a tensor with `itemsize` bytes per element. Trailing arguments
    without tensors are optional. Raises ValueError for an unknown name.
    """
    short = name.removeprefix("repro::").removesuffix(".default")
    if short not in FORMULAS:
        raise ValueError(f"no operator repro::{short} exists; must be one of {', '.join(sorted(FORMULAS))}")
    return FORMULAS[short](*(_as_operand(argument, itemsize) for argument in arguments))


def _formula(name: str) -> Callable[..., int]:
    def flops(*arguments: Any, out_val: Any = None, **_: Any) -> int:
        return cost(name, *arguments).flops

    return flops


def example_programs() -> list[Program]:
    """Return CUDA programs that training uses, one or more of every family of kernels."""
    return [program for family in FAMILIES.values() for program in family.examples()]


class SizeClass(NamedTuple):
    """A CUDA program, and the row lengths that use the program."""

    program: Program
    sizes: tuple[int, ...]
    """Row lengths of the CUDA program's tensors in elements, ascending; empty if rows may have any length."""


@cache
def size_classes() -> list[SizeClass]:
    """Return the CUDA programs, for 16-byte aligned tensors, of all packaged experiments and packaged models."""
    from repro.config import models
    from repro.config.enums import OperatorSet
    from repro.config.suites import SUITES, load_suite

    experiments = [entry.experiment for path in SUITES.files() for entry in load_suite(path).entries]
    rows = {(e.model, e.layout.precision) for e in experiments}
    rows |= {
        (model, precision)
        for model in map(models.load_model, models.model_names())
        for precision in SOURCE_TYPES
    }
    scores = {
        (e.seq, e.layout.precision)
        for e in experiments
        if e.layout.kernels is OperatorSet.SOFTMAX or e.training.attention_dropout
    }
    found: dict[str, tuple[Program, set[int]]] = {}
    every = [(program, 0) for kind in SOURCE_TYPES.values() for program in _programs_of_any_rows(kind)]
    for backward in (False, True):
        for model, precision in rows:
            kind, size, centred = SOURCE_TYPES[precision], model.hidden, model.norm == "layer"
            width = _vector_width(kind, size)
            every.append((layernorm.program(kind, kind, size, width, backward, centred), size))
        for seq, precision in scores:
            kind = SOURCE_TYPES[precision]
            every.append((softmax.program(kind, seq, _vector_width(kind, seq), backward), seq))
    for program, size in every:
        found.setdefault(program.text, (program, set()))[1].add(size)
    classes = [SizeClass(program, tuple(sorted(sizes - {0}))) for program, sizes in found.values()]
    return sorted(classes, key=lambda each: (each.program.source, each.program.definitions, each.sizes))


def _vector_width(kind: str, size: int) -> int:
    """Return how many elements a thread reads at once: 16 bytes if they divide rows of `size` elements, else one."""
    width = 16 // TYPE_BYTES[kind]
    return 1 if size % width else width


def _programs_of_any_rows(kind: str) -> Iterator[Program]:
    yield from (cross_entropy.program(kind), norm.program(kind))
    yield from {adamw.program(kind, kind if kind != "float" else ""), adamw.program("float", kind)}
    for width in (16 // TYPE_BYTES[kind], 1):
        yield column_sums.program(kind, width)
        yield from (gelu.program(kind, kind, width), glu.program(kind, width), rope.program(kind, width))
        for bias in ("", kind):
            for residual in (False, True):
                yield from (dropout.program(kind, bias, residual, drop, width) for drop in (False, True))


for _name in FORMULAS:
    register_flop_formula(getattr(torch.ops.repro, _name), get_raw=True)(_formula(_name))
