"""How fast ranks compute, for networks that are scaled by it."""

from __future__ import annotations

import pytest

from repro.config.network import CORES_SHARE
from repro.emulate import compute_rate
from repro.emulate.network import NoNetwork


class Child:
    """Stands for a process that measures."""

    returncode = 0

    def __init__(self, *_: object, **__: object): ...

    def communicate(self) -> tuple[str, str]:
        return "8e9\n", ""


def test_ranks_share_half_of_the_cores_and_leave_the_others_to_their_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("subprocess.Popen", Child)
    monkeypatch.setattr(compute_rate, "usable_cores", lambda: 4)
    assert compute_rate.rank_flops_per_s(16) == pytest.approx(8e9 * CORES_SHARE / 8)
    assert compute_rate.rank_flops_per_s(2) == pytest.approx(8e9 * CORES_SHARE)
    assert compute_rate.rank_flops_per_s(1) == pytest.approx(8e9 * CORES_SHARE), "one thread uses one core"


def test_products_take_time_here() -> None:
    assert 1e8 < compute_rate.rank_flops_per_s(1) < 1e13


def test_a_rate_that_cannot_be_measured_is_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", Child)
    monkeypatch.setattr(Child, "returncode", -9)
    with pytest.raises(NoNetwork, match="could not be measured"):
        compute_rate.rank_flops_per_s(2)
