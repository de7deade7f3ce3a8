"""Counter-based random numbers: a value depends only on (key, row, column), not on the rank that computes it.

Every layout and every recomputation therefore has the same dropout mask. The arithmetic uses integers that wrap around
in two's complement, so that CUDA kernels compute equal bits:

    mix(z)     = the splitmix64 finaliser, 64 bits, >>> is a logical shift:
                 z ^= z >>> 30; z *= 0xBF58476D1CE4E5B9;
                 z ^= z >>> 27; z *= 0x94D049BB133111EB; z ^= z >>> 31
    hash(i)    = z of 64 bits: z = mix(key) + i * 0x9E3779B97F4A7C15;
                 z ^= z >>> 32; z *= M; z ^= z >>> 32; z *= M; z ^= z >>> 32 with M = 0xD6E8FEB86659FD93
    bits(r, c) = (low(hash(r)) + low(hash(-1 - c))) * ((high(hash(r)) | 1) ^ (high(hash(-1 - c)) & ~1)),
                 the low 32 bits, low() and high() being the 32-bit halves

The second factor is odd, and multiplication by it permutes the 32-bit words, so all values are equally likely. Callers
must use the full value or its high 16 bits, because bit k of a product depends only on bits 0..k of its factors.
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
    """Return the signed 64-bit integer with the bits of `value`, because torch has no unsigned arithmetic."""
    return value - 2**64 if value >= 2**63 else value


def _mix_int(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def mixed(key: int) -> int:
    """Return mix(key), the splitmix64 finaliser of a random key, as an integer in 0 .. 2**64 - 1."""
    return _mix_int(key & _MASK)


def _hash_(index: Tensor, key: int) -> tuple[Tensor, Tensor]:
    """Replace each element of contiguous int64 `index` by its 64-bit hash; return int32 views of low and high words.

    In little-endian memory, z ^= z >>> 32 is the XOR of the high word into the low one.
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
    """Return a random key in [0, 2**63) that depends on all `parts` (seed, step, layer, ...) and on their order."""
    state = _mix_int(len(parts) + _GOLDEN)
    for part in parts:
        state = _mix_int(((state ^ _mix_int(part & _MASK)) * 3 + _GOLDEN) & _MASK)
    return state >> 1


def device_key(key: int, first_sample: int) -> tuple[int, int]:
    """Return the two int64 numbers that a dropout kernel reads from device memory: scrambled key and `first_sample`."""
    return _signed(mixed(key)), first_sample


def factors(rows: Tensor, columns: int, key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return int32 hashes from which `combine` computes random bits: two words per row [R, 1] and per column [C]."""
    index = torch.cat([rows, torch.arange(-1, -1 - columns, -1, device=rows.device)])
    low, high = _hash_(index, key)
    count = rows.numel()
    return low[:count, None], high[:count, None].bitwise_or_(1), low[count:], high[count:].bitwise_and_(-2)


def combine(row_low: Tensor, row_odd: Tensor, column_low: Tensor, column_even: Tensor) -> Tensor:
    """Return random bits, int32 [rows, columns], from the hash words of rows and columns that `factors` returns."""
    return torch.bitwise_xor(row_odd, column_even).mul_(row_low + column_low)


def uniform_bits(rows: Tensor, columns: int, key: int) -> Tensor:
    """Return uniformly distributed int32 values [R, columns] for the row numbers `rows`, int64 [R], 0 or more."""
    return combine(*factors(rows, columns, key))


def threshold(p: float) -> int:
    """Return the minimum random int32 value for which dropout with probability p in [0, 1) retains an element."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"dropout probability {p} must be at least 0 and less than 1")
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def keep_mask(rows: Tensor, columns: int, p: float, key: int) -> Tensor:
    """Return a dropout mask [R, columns], False (dropped) with probability p, for the row numbers `rows`, int64 [R]."""
    return uniform_bits(rows, columns, key) >= threshold(p)


def normal_at(index: Tensor, key: int) -> Tensor:
    """Return the elements `index` (int64, any shape) of an infinite sequence of standard normal fp32 numbers.

    The highest 24 bits of an index's hash select one of 2**24 equally likely quantiles, so |value| < 5.5. Devices may
    differ in the last bit of `erfinv`.
    """
    word = index.clone(memory_format=torch.contiguous_format)
    _hash_(word, key)
    # The shift gives a signed 24-bit number n, so (2 n + 1) / 2**24 lies between -1 and 1, the domain of erfinv.
    middle = (word >> 40).mul_(2).add_(1)
    return middle.float().mul_(2.0**-24).erfinv_().mul_(math.sqrt(2.0))


def normal(start: int, count: int, key: int, device: torch.device | str) -> Tensor:
    """Return elements start .. start + count - 1 of the sequence of normal random numbers with a key, fp32 [count]."""
    out = torch.empty(count, dtype=torch.float32, device=device)
    if out.device.type == "meta":
        return out
    for first, last in row_chunks(count, 1, out.device):
        out[first:last] = normal_at(torch.arange(start + first, start + last, device=out.device), key)
    return out
