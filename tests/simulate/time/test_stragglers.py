"""Tests of the slowest of many devices: known means of the maximum, and properties."""

from __future__ import annotations

from dataclasses import replace
from math import pi, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from repro.config import ConfigError, Experiment, Layout, Training, models, systems
from repro.config.quantity import Quantity
from repro.config.system import System
from repro.config.systems.unknowns import with_values
from repro.simulate.time.device import (
    MODELLED_KERNELS,
    DeviceCost,
    expected_maximum,
    last_arrival_delay,
    slowest_device_factor,
)
from repro.simulate.time.predict import predict
from repro.simulate.time.schedule import schedule_traces
from repro.simulate.trace.events import Operator
from repro.simulate.trace.roles import trace_roles

H100 = systems.load_system_file("dgx-h100")
SPREAD = "device.time.spread"


def test_the_expected_maximum_equals_known_means() -> None:
    """Two and three draws have exact means (David and Nagaraja, Order Statistics, sec. 3.2), more draws an integral."""
    assert expected_maximum(1) == pytest.approx(0, abs=1e-15)
    assert expected_maximum(2) == pytest.approx(1 / sqrt(pi), rel=1e-12)
    assert expected_maximum(3) == pytest.approx(1.5 / sqrt(pi), rel=1e-12)
    for n in (8, 1024, 16_384):
        mean, _ = quad(lambda x, n=n: x * n * norm.pdf(x) * norm.cdf(x) ** (n - 1), -5, 9, limit=200)
        assert expected_maximum(n) == pytest.approx(mean, rel=1e-6)


@given(st.floats(0, 0.5), st.integers(1, 100_000), st.integers(1, 100_000))
def test_the_slowdown_grows_with_devices_and_spread(spread: float, one: int, other: int) -> None:
    few, many = sorted((one, other))
    assert 1 <= slowest_device_factor(spread, few) <= slowest_device_factor(spread, many)
    assert slowest_device_factor(0, many) == slowest_device_factor(spread, 1) == 1
    assert slowest_device_factor(spread / 2, many) - 1 == pytest.approx(
        (slowest_device_factor(spread, many) - 1) / 2
    )


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.1), st.integers(1, 4096))
def test_squared_delays_of_consecutive_stretches_add_up(
    first: float, second: float, jitter_s: float, members: int
) -> None:
    """Two consecutive stretches equal one stretch of their total length. One device has no delay."""
    parts = [last_arrival_delay(jitter_s, seconds, members) for seconds in (first, second, first + second)]
    assert parts[0] ** 2 + parts[1] ** 2 == pytest.approx(parts[2] ** 2, abs=1e-12)
    assert max(parts[:2]) <= parts[2] <= parts[0] + parts[1] + 1e-12
    assert last_arrival_delay(jitter_s, first, 1) == pytest.approx(0, abs=1e-12)
    assert last_arrival_delay(0, first, members) == 0


def test_the_spread_slows_devices_and_not_links() -> None:
    operator = Operator("aten.add", 0, 10**9, 10**9, (), 2)
    plain, spread = (
        DeviceCost(system, "bf16", devices=1024) for system in (H100, with_values(H100, {SPREAD: 0.02}))
    )
    assert spread.seconds(operator) == plain.seconds(operator) * slowest_device_factor(0.02, 1024)
    assert spread.launch_s == plain.launch_s
    model = replace(models.load_model("megatron-175b"), layers=2)
    layout, training = Layout(tp=8, dp=128, zero=1, global_batch=128), Training(seq=128)
    experiment = Experiment(name="step", model=model, layout=layout, training=training, system=H100.name)
    traces = trace_roles(experiment)

    def times(system: System) -> tuple[float, float, float]:
        """Return the seconds of the step, of the device, and of communication."""
        found = schedule_traces(experiment, system, traces, MODELLED_KERNELS)
        busy, communication = found.stages[0].busy, found.stages[0].communication
        device = sum(seconds for kind, seconds in busy.items() if kind not in ("host", "overlap"))
        return found.step_s, device, sum(communication.values())

    before, after = times(H100), times(with_values(H100, {SPREAD: 0.02}))
    assert after[0] >= before[0]
    assert after[1] == pytest.approx(before[1] * slowest_device_factor(0.02, 1024))
    assert after[2] == pytest.approx(before[2])
    assert times(with_values(H100, {SPREAD: 0.0})) == before
    # A spread with a range is an uncertain input, and a larger spread takes more time.
    ranged = Quantity(value=0.01, low=0.0, high=0.05, source="a test; low: none; high: five")
    device = replace(H100.device, time=replace(H100.device.time, spread=ranged))
    found = predict(experiment, replace(H100, device=device), traces, interval=True).interval
    (move,) = (move for move in found.moves if move.key == SPREAD)
    assert move.low_s < move.high_s


def test_a_spread_above_the_mean_is_an_error() -> None:
    with pytest.raises(ConfigError, match="spread"):
        replace(H100.device.time, spread=Quantity(value=8, source="a test"))
