"""Rotary positions (2104.09864): pairs of a head's elements are rotated by an angle proportional to the position.

Elements i and i + width/2 of a head form a pair for i < width/2, as in GPT-NeoX and in Hugging Face's Llama. Position s
rotates the pair by s * base^(-2i/width). Elements from `width` on are unchanged.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from repro.kernels.cuda.program import KernelLauncher, Program, is_aligned, source_type
from repro.kernels.library import Cost, Operand, accumulation_dtype, like_first, operator

MAX_BLOCKS_PER_PROCESSOR = 16
"""Maximum number of thread blocks per multiprocessor in the kernel of rotary positions."""


@cache
def program(kind: str, width: int) -> Program:
    """Return the CUDA program of rotary positions for tensors of type `kind`; a thread reads `width` elements."""
    definitions = (("TYPE", kind), ("WIDTH", width))
    return Program("rope", definitions, struct.Struct("@PPqiiiiiiiiff0q"), ("rotary",), 128)


def examples() -> list[Program]:
    """Return example CUDA programs of rotary positions: for bf16, and for fp16 heads of odd sizes."""
    return [program("bfloat16", 8), program("half", 1)]


def launch_rotary(
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
    """Launch the kernel of rotary positions and return the rotated tensor."""
    x = x.contiguous()
    y, (samples, sequence, columns) = torch.empty_like(x), x.shape
    if not x.numel():
        return y
    vector_width, pairs = 16 // x.element_size(), width // 2
    if pairs % vector_width or not is_aligned(head_width, (x, y), vector_width):
        vector_width = 1
    kind, tokens = program(source_type(x), vector_width), samples * sequence
    vectors = tokens * (head_width - pairs) // vector_width
    blocks = min(-(-vectors // kind.threads), MAX_BLOCKS_PER_PROCESSOR * on.processors)
    place = (first_position, split, jump)
    sizes = (tokens, sequence, *place, columns // head_width, heads, head_width, pairs)
    arguments = kind.arguments.pack(
        x.data_ptr(), y.data_ptr(), *sizes, math.log2(base) / pairs, -1.0 if inverse else 1.0
    )
    on.load(kind).launch("rotary", blocks, arguments)
    return y


def _angles(s: int, width: int, base: float, place: Sequence[int], device: torch.device) -> Tensor:
    """Return rotary angles, fp64 [s, width/2], of tokens at positions first + j, plus `jump` for j >= `split`."""
    first, split, jump = place
    exponent = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    positions = torch.arange(first, first + s, dtype=torch.float64, device=device)
    if jump:
        positions[split:] += jump
    return torch.outer(positions, base**-exponent)


def reference(
    x: Tensor, heads: int, head_width: int, width: int, base: float, place: Sequence[int] = (0, 0, 0)
) -> Tensor:
    """Rotate pairs of x's elements as complex numbers; token j has position first + j, plus `jump` for j >= `split`."""
    b, s, columns = x.shape
    n = columns // head_width
    turning, others = x.view(b, s, n, head_width).split([heads, n - heads], 2)
    first, second, rest = turning.split([width // 2, width // 2, head_width - width], -1)
    angles = _angles(s, width, base, place, x.device)[:, None, :].to(x.dtype)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([torch.cat([turned.real, turned.imag, rest], -1), others], 2).view(x.shape)


def _rotary(
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
    b, s, columns = x.shape
    y = x.contiguous().clone()
    angles = _angles(s, width, base, (first_position, split, jump), x.device)[:, None, :]
    wide = accumulation_dtype(x.dtype)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    if inverse:
        sin = -sin
    for sample in y.view(b, s, columns // head_width, head_width).unbind(0):
        first, second = sample[:, :heads, :width].to(wide, copy=True).chunk(2, -1)
        sample[:, :heads, : width // 2].copy_((first * cos).addcmul_(second, sin, value=-1))
        sample[:, :heads, width // 2 : width].copy_((second * cos).addcmul_(first, sin))
    return y


rotary_operator = operator(
    "rotary(Tensor x, int heads, int head_width, int width, float base, bool inverse,"
    " int first_position=0, int split=0, int jump=0) -> Tensor",
    _rotary,
    like_first,
    launch_rotary,
)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rotate: Callable[..., Tensor], sizes: tuple[float, ...], place: tuple[int, ...]
    ) -> Tensor:
        ctx.rotate, ctx.sizes, ctx.place = rotate, sizes, place
        return rotate(x, *sizes, False, *place)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rotate(grad, *ctx.sizes, True, *ctx.place), None, None, None


def rotary(
    x: Tensor,
    heads: int,
    head_width: int,
    width: int,
    base: float = 10000.0,
    first_position: int = 0,
    split: int = 0,
    jump: int = 0,
    *,
    plain: bool = False,
) -> Tensor:
    """Return x [b, s, n * head_width] with the first `width` elements of the first `heads` of n heads rotated.

    Row j of a sample has position first_position + j, plus `jump` for j >= split (two parts of a sequence under context
    parallelism). `width` must be even. Backward saves no tensor and rotates by the negative angle. `plain`: use torch's
    operators on every device. Raises ValueError if the sizes do not agree.
    """
    divides = x.shape[-1] % head_width == 0 and heads * head_width <= x.shape[-1]
    if x.dim() != 3 or not divides or width % 2 or not 0 < width <= head_width:
        raise ValueError(
            f"rotary of {list(x.shape)} needs [b, s, n * {head_width}] with n >= {heads} and an even width "
            f"up to {head_width}, not {width}"
        )
    rotate, sizes = _rotary if plain else rotary_operator, (heads, head_width, width, base)
    return _Rotary.apply(x, rotate, sizes, (first_position, split, jump))


def cost(x: Operand, heads: int, head_width: int, width: int, *_: object) -> Cost:
    """Return the cost of rotary positions: 3 FLOP per rotated element (two products, one sum), 0 for the angles."""
    turned = x.numel * heads * width // x.shape[-1]
    return Cost(3 * turned, x.nbytes, x.nbytes)
