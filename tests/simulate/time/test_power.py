"""Products of a device whose power bounds what all of its multiprocessors do together."""

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
    """`system`, of which nobody knows what power takes from it."""
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
def test_products_of_cublas_on_an_a100_take_what_was_measured(size: int, measured: float) -> None:
    """TFLOP/s, random numbers in half precision: triton-lang/triton#3551."""
    operator = product(size, size, size)
    rate = operator.flops / DeviceCost(A100, "fp16").seconds(operator)
    assert rate == pytest.approx(1e12 * measured, rel=0.04)


@given(m=sizes, n=sizes, k=sizes, efficiency=st.floats(0.829, 1.0))
def test_idle_multiprocessors_lend_their_power_and_no_more(m: int, n: int, k: int, efficiency: float) -> None:
    operator = product(m, n, k)
    bound = operator.flops / (PEAK * A100.timing.matmul_efficiency)
    plain, lent = DeviceCost(without(A100), "fp16"), unthrottled(efficiency)
    assert bound <= lent.seconds(operator) * (1 + 1e-12)
    assert lent.seconds(operator) <= plain.seconds(operator) * (1 + 1e-12)
    least = plain.seconds(operator) * A100.timing.matmul_efficiency / efficiency
    assert lent.seconds(operator) >= least * (1 - 1e-12)


def test_a_tenth_of_the_multiprocessors_idle_costs_less_than_a_tenth() -> None:
    """GPT-3's product on one of eight ranks fills 3.56 of 4 waves, the 530B's 5.93 of 6."""
    partly, full = product(2048, 6144, 12288), product(2048, 10240, 20480)

    def behind(cost: DeviceCost) -> float:
        return cost.seconds(partly) / partly.flops / (cost.seconds(full) / full.flops) - 1

    assert behind(DeviceCost(without(A100), "fp16")) == pytest.approx(0.11, abs=0.01)
    assert 0.05 < behind(DeviceCost(A100, "fp16")) < 0.07
    assert behind(unthrottled(0.945)) < 0.015


def test_a_device_that_power_slows_no_more_than_its_products_do_is_as_before() -> None:
    operator = product(2048, 6144, 12288)
    plain = DeviceCost(without(A100), "fp16").seconds(operator)
    for efficiency in (A100.timing.matmul_efficiency, 0.5):  # less than what is reached is no bound
        assert unthrottled(efficiency).seconds(operator) == plain
