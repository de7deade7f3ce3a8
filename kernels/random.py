"""Counter-based random numbers: a value depends only on (key, row, column), not on the rank that computes it.

Hence every layout and every recomputation has the same dropout mask, and a shard of a parameter is initialised without
the other shards. All arithmetic is on integers with two's-complement wrap-around, so that a CUDA kernel reproduces it
bit by bit:

    mix(z)     = the splitmix64 finaliser, 64 bits, >>> is a logical shift:
                 z ^= z >>> 30; z *= 0xBF58476D1CE4E5B9;
                 z ^= z >>> 27; z *= 0x94D049BB133111EB; z ^= z >>> 31
    hash(i)    = z of 64 bits: z = mix(key) + i * 0x9E3779B97F4A7C15;
                 z ^= z >>> 32; z *= M; z ^= z >>> 32; z *= M; z ^= z >>> 32 with M = 0xD6E8FEB86659FD93
    bits(r, c) = (low(hash(r)) + low(hash(-1 - c))) * ((high(hash(r)) | 1) ^ (high(hash(-1 - c)) & ~1)),
                 the low 32 bits, low() and high() being the 32-bit halves

Rows and columns are hashed once each, so that a full matrix costs three 32-bit passes. One factor of the product is
always odd, and multiplication by it permutes the 32-bit words, so all values are equally likely. Bit k of a product
depends only on bits 0..k of its factors. Callers therefore compare the full value with a threshold or use its high 16
bits, which the tests examine; the low bits are weak.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from repro.kernels.library import row_chunks

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MULTIPLIER = 0xD6E8FEB86659FD93


def _signed(value: int) -> int:
    """Return the same 64 bits as a signed integer, for torch."""
    return value - 2**64 if value >= 2**63 else value


def _mix_int(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def mixed(key: int) -> int:
    """Return mix(key), the start of every hash, in 0 .. 2**64 - 1."""
    return _mix_int(key & _MASK)


def _hash_(index: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Compute `hash` in place on a contiguous int64 tensor; return int32 views of all low and all high words.

    z ^= z >>> 32 is one operation on these views: XOR of the high word into the low one (little-endian memory).
    """
    low, high = index.view(torch.int32).view(-1, 2).unbind(1)
    index.mul_(_signed(_GOLDEN)).add_(_signed(mixed(key)))
    low.bitwise_xor_(high)
    index.mul_(_signed(_MULTIPLIER))
    low.bitwise_xor_(high)
    index.mul_(_signed(_MULTIPLIER))
    low.bitwise_xor_(high)
    return low, high


def derive_key(*parts: int) -> int:
    """Mix integers (seed, step, layer, site, ...) into a key in [0, 2**63); their order and number matter."""
    state = _mix_int(len(parts) + _GOLDEN)
    for part in parts:
        state = _mix_int(((state ^ _mix_int(part & _MASK)) * 3 + _GOLDEN) & _MASK)
    return state >> 1


def device_key(key: int, first_sample: int) -> tuple[int, int]:
    """Return the int64 numbers that a dropout kernel reads from device memory: mix(key) and the first sample."""
    return _signed(mixed(key)), first_sample


def factors(rows: Tensor, columns: int, key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the 32-bit words that make `bits`: two int32 [R, 1] of the rows, two int32 [C] of the columns."""
    index = torch.cat([rows, torch.arange(-1, -1 - columns, -1, device=rows.device)])
    low, high = _hash_(index, key)
    count = rows.numel()
    return low[:count, None], high[:count, None].bitwise_or_(1), low[count:], high[count:].bitwise_and_(-2)


def combine(row_low: Tensor, row_odd: Tensor, column_low: Tensor, column_even: Tensor) -> Tensor:
    """Return `bits` from the words of `factors`, for any slice of the rows."""
    return torch.bitwise_xor(row_odd, column_even).mul_(row_low + column_low)


def uniform_bits(rows: Tensor, columns: int, key: int) -> Tensor:
    """Return uniform int32 [R, columns] over all of -2**31 .. 2**31 - 1; rows is int64 [R], values >= 0."""
    return combine(*factors(rows, columns, key))


def threshold(p: float) -> int:
    """Return the smallest retained value of `uniform_bits`: a fraction p of the 2**32 values is smaller.

    Raises ValueError unless 0 <= p < 1.
    """
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability is {p}, it must be at least 0 and less than 1")
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def keep_mask(rows: Tensor, columns: int, p: float, key: int) -> Tensor:
    """Return bool [R, columns], False (dropped) with probability p; rows is int64 [R] with values >= 0."""
    return uniform_bits(rows, columns, key) >= threshold(p)


def normal_at(index: Tensor, key: int) -> Tensor:
    """Return standard normal numbers (fp32) of the given elements (int64, any shape) of an infinite sequence.

    The highest 24 bits of `hash(element)` select the middle of one of 2**24 equally likely intervals. `erfinv` maps it
    to a quantile, so |value| < 5.5. The integers are the same everywhere; erfinv may differ between devices in the last
    bit.
    """
    word = index.clone(memory_format=torch.contiguous_format)
    _hash_(word, key)
    # An arithmetic shift leaves a signed number n of 24 bits, so 2 n + 1 lies between -2**24 and 2**24.
    middle = (word >> 40).mul_(2).add_(1)
    return middle.float().mul_(2.0**-24).erfinv_().mul_(math.sqrt(2.0))


def normal(start: int, count: int, key: int, device: torch.device | str) -> Tensor:
    """Return `normal_at` for the elements start .. start + count: float32 [count]."""
    out = torch.empty(count, dtype=torch.float32, device=device)
    if out.device.type == "meta":
        return out
    for first, last in row_chunks(count, 1, out.device):
        out[first:last] = normal_at(torch.arange(start + first, start + last, device=out.device), key)
    return out
