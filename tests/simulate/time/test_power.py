"""Tests of matrix products on a device whose power limits the total rate of its multiprocessors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.config import systems
from repro.config.quantity import UNSAID
from repro.config.system import System
from repro.config.systems.unknowns import with_values
from repro.simulate.time.device import DeviceCost
from tests.simulate.time.test_device import product

A100 = systems.load_system_file("selene")
KEY = "device.time.unthrottled_efficiency"
PEAK = 312e12
sizes = st.integers(1, 1024).map(lambda n: 8 * n)


def unthrottled(efficiency: float) -> DeviceCost:
    return DeviceCost(with_values(A100, {KEY: efficiency}), "fp16")


def without(system: System) -> System:
    """Return `system` without a known unthrottled efficiency."""
    time = replace(system.device.time, unthrottled_efficiency=UNSAID)
    return replace(system, device=replace(system.device, time=time))


@pytest.mark.parametrize(
    ("size", "measured"),
    [
        (2176, 221.1),
        (2304, 246.3),
        (2432, 219.5),
        (2560, 244.5),
        (2688, 213.1),
        (2816, 230.8),
        (2944, 247.9),
        (3072, 229.2),
        (3200, 244.3),
    ],
)
def test_cublas_products_on_an_a100_have_the_measured_rate(size: int, measured: float) -> None:
    """TFLOP/s, random numbers in half precision: triton-lang/triton#3551."""
    operator = product(size, size, size)
    rate = operator.flops / DeviceCost(A100, "fp16").seconds(operator)
    assert rate == pytest.approx(1e12 * measured, rel=0.04)


@given(m=sizes, n=sizes, k=sizes, efficiency=st.floats(0.829, 1.0))
def test_idle_multiprocessors_raise_the_rate_within_bounds(m: int, n: int, k: int, efficiency: float) -> None:
    operator = product(m, n, k)
    bound = operator.flops / (PEAK * A100.timing.matmul_efficiency)
    plain, raised = DeviceCost(without(A100), "fp16"), unthrottled(efficiency)
    assert bound <= raised.seconds(operator) * (1 + 1e-12)
    assert raised.seconds(operator) <= plain.seconds(operator) * (1 + 1e-12)
    minimum = plain.seconds(operator) * A100.timing.matmul_efficiency / efficiency
    assert raised.seconds(operator) >= minimum * (1 - 1e-12)


def test_idle_multiprocessors_cost_less_than_their_share() -> None:
    """GPT-3's product on one of eight ranks fills 3.56 of 4 waves, that of the 530B model 5.93 of 6."""
    partly, full = product(2048, 6144, 12288), product(2048, 10240, 20480)

    def slowdown(cost: DeviceCost) -> float:
        return cost.seconds(partly) / partly.flops / (cost.seconds(full) / full.flops) - 1

    assert slowdown(DeviceCost(without(A100), "fp16")) == pytest.approx(0.11, abs=0.01)
    assert 0.05 < slowdown(DeviceCost(A100, "fp16")) < 0.07
    assert slowdown(unthrottled(0.945)) < 0.015


def test_a_low_unthrottled_efficiency_has_no_effect() -> None:
    operator = product(2048, 6144, 12288)
    plain = DeviceCost(without(A100), "fp16").seconds(operator)
    for efficiency in (A100.timing.matmul_efficiency, 0.5):  # at most the reached efficiency
        assert unthrottled(efficiency).seconds(operator) == plain
