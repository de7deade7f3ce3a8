"""Tests of model states against the ZeRO paper's Table 1 (all 54 cells) and Figure 1."""

from __future__ import annotations

import math

import pytest

from repro.model.counts import states_bytes

TABLE_1 = {  # 1910.02054v3 p. 11: GB as printed, stages 1, 2, 3
    (7.5e9, 1): ("120", "120", "120"),
    (7.5e9, 4): ("52.5", "41.3", "30"),
    (7.5e9, 16): ("35.6", "21.6", "7.5"),
    (7.5e9, 64): ("31.4", "16.6", "1.88"),
    (7.5e9, 256): ("30.4", "15.4", "0.47"),
    (7.5e9, 1024): ("30.1", "15.1", "0.12"),
    (128e9, 1): ("2048", "2048", "2048"),
    (128e9, 4): ("896", "704", "512"),
    (128e9, 16): ("608", "368", "128"),
    (128e9, 64): ("536", "284", "32"),
    (128e9, 256): ("518", "263", "8"),
    (128e9, 1024): ("513", "257", "2"),
    (1e12, 1): ("16000", "16000", "16000"),
    (1e12, 4): ("7000", "5500", "4000"),
    (1e12, 16): ("4750", "2875", "1000"),
    (1e12, 64): ("4187", "2218", "250"),
    (1e12, 256): ("4046", "2054", "62.5"),
    (1e12, 1024): ("4011", "2013", "15.6"),
}


@pytest.mark.parametrize(("psi", "nd"), TABLE_1)
def test_model_states_equal_table_1_rounded_or_truncated(psi: float, nd: int) -> None:
    for stage, printed in enumerate(TABLE_1[psi, nd], 1):
        scale = 10 ** len(printed.partition(".")[2])
        exact = states_bytes(int(psi), nd, stage) / 1e9 * scale
        assert round(float(printed) * scale) in (math.floor(exact), math.ceil(exact)), stage


def test_model_states_equal_figure_1() -> None:
    sizes = [states_bytes(7_500_000_000, 64, stage) / 1e9 for stage in range(4)]
    assert [f"{size:.1f}" for size in sizes] == ["120.0", "31.4", "16.6", "1.9"]
