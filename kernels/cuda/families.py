"""All programs there are, for `repro doctor` and for the tests."""

from __future__ import annotations

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
from repro.kernels.cuda.program import Program

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
    "sums of columns": columns,
}
"""A family of kernels, for people -> the module that binds it."""


def examples() -> list[Program]:
    """One or more programs of every family, as training compiles them."""
    return [program for family in FAMILIES.values() for program in family.examples()]
