"""A pseudo-random order of n things without a table: a Feistel network with cycle walking.

A Feistel network permutes 0 .. 4**b - 1 whatever its round function is.  Where it leaves 0 .. n - 1 it
is applied again until it comes back (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002);
that makes it a permutation of 0 .. n - 1.  4**b < 4n, so it takes fewer than 4 applications on average.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

ROUNDS = 10
"""With 6 rounds the 24 orders of four things differ by 6 % in frequency, with 10 by 0.4 % (enumerated).

More rounds do not remove one bias: for b > 1 only even permutations arise, so the sign of an order is not
quite a fair coin.  Where one or two windows land is not affected.
"""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: U64) -> U64:
    """SplitMix64's finaliser: a bijection of 64-bit words that scrambles all their bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(*words: int | U64) -> U64:
    """One 64-bit word from several, at least 1-D and broadcast together; the order of the words matters."""
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        if isinstance(word, int):
            word = np.array([word % 2**64], dtype=np.uint64)
        state = mix((state ^ word) + _GOLDEN)
    return state


def permute(position: U64, n: int, keys: U64) -> U64:
    """Where each `position` (uint64, under `n`) goes under the permutation that its key selects.

    `keys` has the shape of `position`; all positions under one key form a bijection of 0 .. n - 1.
    """
    assert n >= 1
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    rounds = [key(keys, i) for i in range(ROUNDS)]
    out = position.astype(np.uint64, copy=True)
    todo = np.arange(out.size)
    while todo.size:
        left, right = out[todo] >> half, out[todo] & low
        for round_key in rounds:
            left, right = right, left ^ (mix(right + round_key[todo]) & low)
        out[todo] = (left << half) | right
        todo = todo[out[todo] >= n]
    return out
