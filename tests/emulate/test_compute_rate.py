"""Tests of the compute rate of ranks, which scales emulated networks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from repro.config.network import CORES_SHARE
from repro.emulate import compute_rate
from repro.emulate.network import NoNetwork


def fake_measurement(monkeypatch: pytest.MonkeyPatch, returncode: int) -> None:
    """Let each measuring process report 8 GFLOP/s, on a machine with four cores."""
    process = SimpleNamespace(communicate=lambda: ("8e9\n", ""), returncode=returncode)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: process)
    monkeypatch.setattr(compute_rate, "usable_cores", lambda: 4)


@pytest.mark.parametrize(("ranks", "per_core"), [(16, 8), (2, 1), (1, 1)])
def test_ranks_compute_on_half_of_the_cores(
    ranks: int, per_core: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_measurement(monkeypatch, returncode=0)
    assert compute_rate.rank_flops_per_s(ranks) == pytest.approx(8e9 * CORES_SHARE / per_core)


def test_a_failed_measurement_of_the_rate_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_measurement(monkeypatch, returncode=-9)
    with pytest.raises(NoNetwork, match="could not be measured"):
        compute_rate.rank_flops_per_s(2)


def test_measured_compute_rate_is_plausible() -> None:
    assert 1e8 < compute_rate.rank_flops_per_s(1) < 1e13
