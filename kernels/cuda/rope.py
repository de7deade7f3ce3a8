"""Binding of `rope.cu`."""

from __future__ import annotations

import math
import struct
from functools import cache

import torch
from torch import Tensor

from repro.kernels.cuda.program import KernelLauncher, Program, aligned, type_of

BLOCKS = 16
"""Most blocks on a multiprocessor: two rounds of what fits."""


@cache
def program(kind: str, width: int) -> Program:
    """For heads that are read by `width` elements at once."""
    definitions = (("TYPE", kind), ("WIDTH", width))
    return Program("rope", definitions, struct.Struct("@PPqiiiiiiiiff0q"), ("rotary",), 128)


def examples() -> list[Program]:
    """In 16 bits, and heads of odd sizes."""
    return [program("bfloat16", 8), program("half", 1)]


def rotary(
    on: KernelLauncher,
    x: Tensor,
    heads: int,
    head_width: int,
    width: int,
    base: float,
    inverse: bool,
    first_position: int = 0,
    split: int = 0,
    jump: int = 0,
) -> Tensor:
    """y."""
    x = x.contiguous()
    y, (samples, sequence, columns) = torch.empty_like(x), x.shape
    if not x.numel():
        return y
    at_once, pairs = 16 // x.element_size(), width // 2
    whole = pairs % at_once == 0 and aligned(head_width, (x, y), at_once)
    at_once = at_once if whole else 1
    kind, tokens = program(type_of(x), at_once), samples * sequence
    vectors = tokens * (head_width - pairs) // at_once
    blocks = min(-(-vectors // kind.threads), BLOCKS * on.processors)
    place = (first_position, split, jump)
    sizes = (tokens, sequence, *place, columns // head_width, heads, head_width, pairs)
    arguments = kind.arguments.pack(
        x.data_ptr(), y.data_ptr(), *sizes, math.log2(base) / pairs, -1.0 if inverse else 1.0
    )
    on.load(kind).launch("rotary", blocks, arguments)
    return y
