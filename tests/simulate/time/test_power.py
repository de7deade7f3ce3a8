"""Tests of matrix products on a device whose power limits the total rate of its multiprocessors."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.config import systems
from repro.config.quantity import UNSAID
from repro.config.systems.unknowns import with_values
from repro.simulate.time.device import DeviceCost
from tests.simulate.time.test_device import product

A100 = systems.load_system_file("selene")
KEY = "device.time.unthrottled_efficiency"
PEAK = 312e12
sizes = st.integers(1, 1024).map(lambda n: 8 * n)


def unthrottled(efficiency: float) -> DeviceCost:
    return DeviceCost(with_values(A100, {KEY: efficiency}), "fp16")


def throttled() -> DeviceCost:
    """Return costs of a device without a known unthrottled efficiency."""
    time = replace(A100.device.time, unthrottled_efficiency=UNSAID)
    return DeviceCost(replace(A100, device=replace(A100.device, time=time)), "fp16")


def test_cublas_products_on_an_a100_have_the_measured_rate() -> None:
    """TFLOP/s of square products with random numbers in half precision: triton-lang/triton#3551."""
    measured = [221.1, 246.3, 219.5, 244.5, 213.1, 230.8, 247.9, 229.2, 244.3]
    operators = [product(size, size, size) for size in range(2176, 3201, 128)]
    rates = [operator.flops / DeviceCost(A100, "fp16").seconds(operator) / 1e12 for operator in operators]
    assert rates == pytest.approx(measured, rel=0.04)


@given(m=sizes, n=sizes, k=sizes, efficiency=st.floats(0.829, 1.0))
def test_idle_multiprocessors_raise_the_rate_within_bounds(m: int, n: int, k: int, efficiency: float) -> None:
    operator = product(m, n, k)
    bound = operator.flops / (PEAK * A100.timing.matmul_efficiency)
    plain, raised = throttled(), unthrottled(efficiency)
    assert bound <= raised.seconds(operator) * (1 + 1e-12)
    assert raised.seconds(operator) <= plain.seconds(operator) * (1 + 1e-12)
    minimum = plain.seconds(operator) * A100.timing.matmul_efficiency / efficiency
    assert raised.seconds(operator) >= minimum * (1 - 1e-12)


def test_idle_multiprocessors_cost_less_than_their_share() -> None:
    """GPT-3's product on one of eight ranks fills 3.56 of 4 waves, that of the 530B model 5.93 of 6."""
    partly, full = product(2048, 6144, 12288), product(2048, 10240, 20480)

    def slowdown(cost: DeviceCost) -> float:
        return cost.seconds(partly) / partly.flops / (cost.seconds(full) / full.flops) - 1

    assert slowdown(throttled()) == pytest.approx(0.11, abs=0.01)
    assert 0.05 < slowdown(DeviceCost(A100, "fp16")) < 0.07
    assert slowdown(unthrottled(0.945)) < 0.015


def test_a_low_unthrottled_efficiency_has_no_effect() -> None:
    operator = product(2048, 6144, 12288)
    for efficiency in (A100.timing.matmul_efficiency, 0.5):  # at most the reached efficiency
        assert unthrottled(efficiency).seconds(operator) == throttled().seconds(operator)
