"""Tests of host time: steps on A100 and H200 whose small layers wait for the host, and passes without host time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, Model, Training, models
from repro.config.systems import load_system_file
from repro.simulate.time.device import DeviceCost
from repro.simulate.time.predict import predict
from repro.simulate.time.program import HOST, OperatorBlock, compile_program
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
        (1024, 4, 2, 3.31e-3, 0.1),
        (2048, 2, 1, 3.40e-3, 0.15),
        (2048, 4, 1, 2.99e-3, 0.1),
        (1024, 8, 2, 4.04e-3, 0.2),
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
