"""Tests of the counter-based generator: exact definition, uniformity, independence, and slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from repro.kernels import derive_key, keep_mask, normal, uniform_bits

MASK = 2**64 - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def scalar_hash(index: int, key: int) -> int:
    z = (mix(key) + index * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 32)) * 0xD6E8FEB86659FD93) & MASK
    z = ((z ^ (z >> 32)) * 0xD6E8FEB86659FD93) & MASK
    return z ^ (z >> 32)


def scalar_bits(row: int, column: int, key: int) -> int:
    r, c = scalar_hash(row, key), scalar_hash(-1 - column, key)
    low, high = 2**32 - 1, 32
    value = ((r & low) + (c & low)) * (((r >> high) | 1) ^ ((c >> high) & ~1)) & low
    return value - 2**32 if value >= 2**31 else value


@settings(max_examples=50)
@given(
    rows=st.lists(st.integers(0, 2**62), min_size=1, max_size=5),
    columns=st.integers(1, 40),
    key=st.integers(0, 2**63 - 1),
)
def test_bits_are_the_documented_integers(rows: list[int], columns: int, key: int) -> None:
    expected = [[scalar_bits(row, column, key) for column in range(columns)] for row in rows]
    assert uniform_bits(torch.tensor(rows), columns, key).tolist() == expected


@settings(max_examples=30)
@given(start=st.integers(0, 2**62), count=st.integers(1, 30), key=st.integers(0, 2**63 - 1))
def test_normal_is_the_documented_quantile(start: int, count: int, key: int) -> None:
    words = [scalar_hash(start + i, key) >> 40 for i in range(count)]
    # The top 24 bits as a signed number choose the interval, as an arithmetic shift gives them.
    middle = [2 * (w - 2**24 if w >= 2**23 else w) + 1 for w in words]
    quantile = torch.tensor([m / 2**24 for m in middle], dtype=torch.float64).erfinv() * 2**0.5
    torch.testing.assert_close(normal(start, count, key, "cpu").double(), quantile, rtol=1e-5, atol=1e-6)


def test_known_values_do_not_change_between_versions() -> None:
    assert derive_key(1, 2) == 2150324997807098984
    assert uniform_bits(torch.arange(2), 2, 5).tolist() == [
        [1517998449, 685377338],
        [-1960284758, -1261901339],
    ]


def test_keys_differ_for_every_part_and_order() -> None:
    keys = {derive_key(*parts) for parts in [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (-1,), (2**64 - 1, 5)]}
    assert len(keys) == 8
    assert len({derive_key(7, step, layer) for step in range(200) for layer in range(50)}) == 10000
    assert all(0 <= key < 2**63 for key in keys)


def signs(values: torch.Tensor, bit: int) -> torch.Tensor:
    return ((values >> bit) & 1).double() * 2 - 1


def score(products: torch.Tensor) -> float:
    """Return the sum of independent signs, in standard deviations."""
    return abs(products.sum().item()) / products.numel() ** 0.5


def test_high_bits_are_fair_and_independent() -> None:
    rows, columns, key = 1024, 512, 12345
    values = uniform_bits(torch.arange(rows), columns, key)
    other = uniform_bits(torch.arange(rows), columns, key + 1)
    for bit in range(16, 32):
        s = signs(values, bit)
        assert score(s) < 4.5
        assert score(s[1:] * s[:-1]) < 4.5, "neighbouring rows"
        assert score(s[:, 1:] * s[:, :-1]) < 4.5, "neighbouring columns"
        assert score(s * signs(other, bit)) < 4.5, "neighbouring keys"
        assert score(s * signs(values, bit - 1 if bit > 16 else 31)) < 4.5, "neighbouring bits"
        corners = s[1:, 1:] * s[1:, :-1] * s[:-1, 1:] * s[:-1, :-1]
        assert score(corners) < 4.5, (
            "the four corners of a square (a sum of row and column hashes would fail)"
        )


def test_masks_of_rows_and_columns_are_uncorrelated() -> None:
    p, rows, columns = 0.1, 1024, 512
    kept = keep_mask(torch.arange(rows), columns, p, 99).double()
    standard = (kept - (1 - p)) / (p * (1 - p)) ** 0.5
    assert abs(standard.mean().item()) * (rows * columns) ** 0.5 < 4.5
    for matrix, length in ((standard @ standard.T, columns), (standard.T @ standard, rows)):
        pairs = matrix[~torch.eye(len(matrix), dtype=torch.bool)] / length**0.5
        assert abs(pairs.pow(2).mean().item() - 1) < 0.02
        assert pairs.abs().max().item() < 7


def test_normal_values_have_normal_moments_and_are_independent() -> None:
    count = 400_000
    x, other_key = normal(0, count, 1, "cpu").double(), normal(0, count, 2, "cpu").double()
    assert x.dtype == torch.float64
    assert normal(0, 3, 1, "cpu").dtype == torch.float32
    assert stats.kstest(x[:100_000].numpy(), "norm").pvalue > 1e-3
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(x.pow(power).mean().item() - expected) < 4.5 * (variance / count) ** 0.5
    for pair in (x[1:] * x[:-1], x[256:] * x[:-256], x * other_key):
        assert abs(pair.mean().item()) < 4.5 / count**0.5
    assert torch.isfinite(x).all()
    assert x.abs().max() < 5.5


@settings(max_examples=25)
@given(start=st.integers(0, 2**60), count=st.integers(2, 300), chunk=st.integers(1, 300), data=st.data())
def test_values_of_a_slice_are_a_slice_of_values(
    start: int, count: int, chunk: int, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(1, count - 1))
    full = normal(start, count, 11, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("repro.kernels.library.CPU_CHUNK", chunk)
        parts = [normal(start, cut, 11, "cpu"), normal(start + cut, count - cut, 11, "cpu")]
    assert torch.equal(full, torch.cat(parts))
    rows = torch.arange(start, start + count)
    bits = uniform_bits(rows, 7, 11)
    assert torch.equal(bits[cut:], uniform_bits(rows[cut:], 7, 11))
    assert torch.equal(bits[:, :3], uniform_bits(rows, 3, 11))
    assert torch.equal(bits.flip(0), uniform_bits(rows.flip(0), 7, 11))


def test_probabilities_are_from_0_to_less_than_1() -> None:
    rows = torch.arange(64)
    assert keep_mask(rows, 64, 0.0, 1).all()
    assert not keep_mask(rows, 64, 1 - 1e-12, 1).any()
    for p in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="probability"):
            keep_mask(rows, 2, p, 0)


def test_meta_results_have_shapes_and_dtypes() -> None:
    assert uniform_bits(torch.arange(3, device="meta"), 5, 1).shape == (3, 5)
    assert keep_mask(torch.arange(3, device="meta"), 5, 0.1, 1).dtype == torch.bool
    assert normal(0, 2**50, 1, "meta").shape == (2**50,)
