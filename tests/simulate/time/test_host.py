"""Tests of host time in steps on A100 and H200 with small layers, and of the slowest of many devices."""

from __future__ import annotations

from dataclasses import replace
from math import pi, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from repro.config import ConfigError, Experiment, Layout, Model, Training, models
from repro.config.quantity import Quantity
from repro.config.system import System
from repro.config.systems import load_system_file
from repro.config.systems.unknowns import with_values
from repro.simulate.time.device import (
    MODELLED_KERNELS,
    DeviceCost,
    expected_maximum,
    last_arrival_delay,
    slowest_device_factor,
)
from repro.simulate.time.predict import predict
from repro.simulate.time.program import HOST, OperatorBlock, compile_program
from repro.simulate.time.schedule import schedule_traces
from repro.simulate.trace.events import Operator
from repro.simulate.trace.roles import trace_roles
from tests.simulate.time.networks import numbers

SMALL = Model(name="small", layers=2, hidden=1024, heads=16, vocab=51200, seq=1024)


def step_s(hidden: int, layers: int, tp: int, micro_batch: int, times: int) -> float:
    """Return the time of a step with `times` micro-batches, in seconds."""
    layout = Layout(
        dp=8 // tp, tp=tp, micro_batch=micro_batch, global_batch=8 // tp * micro_batch * times, recompute=True,
        kernels="softmax", precision="fp16", tp_overlap=False, overlap=False, bucket_bytes=1_000_000_000,
    )  # fmt: skip
    model = replace(SMALL, hidden=hidden, layers=layers)
    training = Training(dropout=0.1, attention_dropout=0.1)
    experiment = Experiment(name="small", model=model, layout=layout, training=training, system="vtrain-a100")
    return predict(experiment, load_system_file("vtrain-a100")).step_s


@pytest.mark.parametrize(
    ("hidden", "tp", "micro_batch", "measured_s", "within"),
    [
        (1024, 1, 1, 3.00e-3, 0.1),
        (1024, 2, 1, 3.33e-3, 0.1),
        (1024, 2, 2, 3.58e-3, 0.1),
        (1024, 4, 1, 3.44e-3, 0.15),
        (2048, 4, 1, 2.99e-3, 0.1),
        (1024, 8, 1, 4.99e-3, 0.3),
    ],
)
def test_a_small_layer_takes_the_measured_host_time(
    hidden: int, tp: int, micro_batch: int, measured_s: float, within: float
) -> None:
    """Time of one more layer per micro-batch, with forward, recomputation and backward: VIA-Research/vTrain
    data/ground_truth_single.csv at f8dda847, where the time does not depend on the size of the layer."""
    two, four = (
        step_s(hidden, 4, tp, micro_batch, times) - step_s(hidden, 2, tp, micro_batch, times)
        for times in (2, 4)
    )
    assert (four - two) / 2 / 2 == pytest.approx(measured_s, rel=within)


GPT2 = models.load_model("gpt2-1.5b")
PADDED = replace(GPT2, name="padded", vocab=50304)


def step_on_h200(model: Model, kernels: str, micro_batch: int, global_batch: int) -> Experiment:
    layout = Layout(kernels=kernels, precision="bf16", micro_batch=micro_batch, global_batch=global_batch)
    return Experiment(name="step", model=model, layout=layout, system="dgx-h200")


@pytest.mark.parametrize(
    ("model", "kernels", "micro_batch", "global_batch", "measured_s"),
    [
        (PADDED, "fused", 8, 16, 0.339),
        (PADDED, "reference", 8, 16, 0.403),
        (GPT2, "fused", 8, 16, 0.391),
        (PADDED, "fused", 1, 1, 0.148),
        (PADDED, "reference", 1, 1, 0.143),
    ],
)
def test_steps_on_an_h200_take_the_measured_time(
    model: Model, kernels: str, micro_batch: int, global_batch: int, measured_s: float
) -> None:
    """Five runs on one H200 with torch 2.11. Steps with micro-batches of 1 differ by a fifth: their median counts."""
    experiment = step_on_h200(model, kernels, micro_batch, global_batch)
    found = predict(experiment, load_system_file("dgx-h200"), interval=True)
    assert found.step_s == pytest.approx(measured_s, rel=0.1)
    summary = found.interval.summary(found.step_s)
    assert summary["low_s"] < measured_s < summary["high_s"]


def host_seconds(captured: bool, **launches: float) -> tuple[float, float]:
    """Return the exposed host time of the forward and of the backward pass of one sample, in seconds."""
    system = load_system_file("dgx-h200")
    time = replace(system.device.time, **numbers(**launches))
    slow = replace(system, device=replace(system.device, time=time))
    experiment = step_on_h200(replace(PADDED, layers=2), "fused", 1, 1)
    (traced,) = trace_roles(experiment)
    program = compile_program(
        traced, 1, DeviceCost(slow, "bf16"), lambda message: 0.0, lambda op, group: 1, captured=captured
    )
    forward, backward = (
        sum(dict(item.parts).get(HOST, 0.0) for item in items if isinstance(item, OperatorBlock))
        for items in program.segments.values()
    )
    return forward, backward


def test_the_backward_pass_has_a_separate_launch_time() -> None:
    equal = host_seconds(False, launch_s=1e-3)
    slower = host_seconds(False, launch_s=1e-3, backward_launch_s=2e-3)
    assert slower[0] == equal[0] > 0
    assert slower[1] > 1.9 * equal[1] > 0
    captured = host_seconds(True, launch_s=1e-3, backward_launch_s=2e-3)
    assert captured == (0.0, 0.0), "a captured micro-batch has no host time"


# --- the slowest of many devices

H100 = load_system_file("dgx-h100")
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


def test_a_spread_above_the_mean_is_an_error() -> None:
    with pytest.raises(ConfigError, match="spread"):
        replace(H100.device.time, spread=Quantity(value=8, source="a test"))
