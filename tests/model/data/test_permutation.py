"""Tests of the order of an epoch, which is a permutation for every size and key."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.model.data.stream import hash_words, mix_bits, permute


@given(st.integers(1, 3000), st.integers(0, 2**70), st.integers(0, 2**40), st.data())
def test_permute_gives_each_position_once(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    """A single position has the same image as all positions together."""
    keys = hash_words(seed, epoch)
    full = permute(np.arange(n, dtype=np.uint64), n, np.broadcast_to(keys, n)).tolist()
    assert sorted(full) == list(range(n))
    at = data.draw(st.integers(0, n - 1))
    assert permute(np.array([at], dtype=np.uint64), n, keys).tolist() == [full[at]]


@given(
    n=st.integers(2**33, 2**62),
    seed=st.integers(0, 2**64),
    positions=st.lists(st.integers(0, 2**33), min_size=1, unique=True),
)
def test_positions_of_huge_corpora_are_distinct_and_in_range(n: int, seed: int, positions: list[int]) -> None:
    places = permute(
        np.array(positions, dtype=np.uint64), n, np.broadcast_to(hash_words(seed), len(positions))
    )
    assert places.max() < n
    assert len(set(places.tolist())) == len(positions)


def test_order_has_no_correlations() -> None:
    n = 10_000
    keys = np.broadcast_to(hash_words(1234, 0), n)
    order = permute(np.arange(n, dtype=np.uint64), n, keys).astype(np.int64)
    # Correlations of a random permutation are within 5 / sqrt(n), its rising steps within 5 sigma of half.
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.mean(np.diff(order) > 0) - 0.5) < 5 * np.sqrt(1 / 12 / n)


@pytest.mark.parametrize(
    # (elements, first positions): the number of outcomes, and the chi-squared value of probability 1e-5.
    ("n", "places", "outcomes", "limit"),
    [(2, 2, 2, 19.6), (3, 3, 6, 31), (4, 4, 24, 64), (5, 1, 5, 29), (5, 2, 20, 58), (16, 2, 240, 343)],
)
def test_small_permutations_are_equally_frequent(n: int, places: int, outcomes: int, limit: float) -> None:
    """For n > 4 only the first one or two positions are tested, because the sign of a permutation is biased."""
    trials = 1000 * outcomes
    positions = np.tile(np.arange(places, dtype=np.uint64), trials)
    keys = np.repeat(hash_words(7, np.arange(trials, dtype=np.uint64)), places)
    seen = Counter(map(tuple, permute(positions, n, keys).reshape(trials, places).tolist()))
    assert len(seen) == outcomes
    assert sum((count - 1000) ** 2 / 1000 for count in seen.values()) < limit


def test_keys_depend_on_every_word_and_their_order() -> None:
    words = [(1, 2), (2, 1), (1, 3), (1,), (1, 2, 0), (1, -2)]
    assert len({int(hash_words(*each)[0]) for each in words}) == 6


def test_mixing_is_splitmix64() -> None:
    """The reference generator's first three outputs from seed 0 (Vigna, splitmix64.c)."""
    states = np.array([0x9E3779B97F4A7C15 * i % 2**64 for i in (1, 2, 3)], dtype=np.uint64)
    assert mix_bits(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
