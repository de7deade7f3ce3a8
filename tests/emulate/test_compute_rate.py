"""Tests of the compute rate of ranks, which scales emulated networks."""

from __future__ import annotations

import pytest

from repro.config.network import CORES_SHARE
from repro.emulate import compute_rate
from repro.emulate.network import NoNetwork


class FakeProcess:
    """Fake process that reports a rate of 8 GFLOP/s."""

    returncode = 0

    def __init__(self, *_: object, **__: object): ...

    def communicate(self) -> tuple[str, str]:
        return "8e9\n", ""


def test_ranks_compute_on_half_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("subprocess.Popen", FakeProcess)
    monkeypatch.setattr(compute_rate, "usable_cores", lambda: 4)
    assert compute_rate.rank_flops_per_s(16) == pytest.approx(8e9 * CORES_SHARE / 8)
    assert compute_rate.rank_flops_per_s(2) == pytest.approx(8e9 * CORES_SHARE)
    assert compute_rate.rank_flops_per_s(1) == pytest.approx(8e9 * CORES_SHARE), "one thread uses one core"


def test_measured_compute_rate_is_plausible() -> None:
    assert 1e8 < compute_rate.rank_flops_per_s(1) < 1e13


def test_a_failed_measurement_of_the_rate_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", FakeProcess)
    monkeypatch.setattr(FakeProcess, "returncode", -9)
    with pytest.raises(NoNetwork, match="could not be measured"):
        compute_rate.rank_flops_per_s(2)
