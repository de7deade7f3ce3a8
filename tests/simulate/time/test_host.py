"""Layers so small that the host decides how long they take, against what Megatron-DeepSpeed took on eight A100."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, Model, Training
from repro.config.systems import load_system_file
from repro.simulate.time.predict import predict
from repro.simulate.trace.roles import trace_roles

SMALL = Model(name="small", layers=2, hidden=1024, heads=16, vocab=51200, seq=1024)


def step_s(hidden: int, layers: int, tp: int, micro_batch: int, times: int) -> float:
    """Of a step of so many micro-batches."""
    layout = Layout(
        dp=8 // tp, tp=tp, micro_batch=micro_batch, global_batch=8 // tp * micro_batch * times, recompute=True,
        kernels="softmax", precision="fp16", tp_overlap=False, overlap=False, bucket_bytes=1_000_000_000,
    )  # fmt: skip
    model = replace(SMALL, hidden=hidden, layers=layers)
    training = Training(dropout=0.1, attention_dropout=0.1)
    experiment = Experiment(name="small", model=model, layout=layout, training=training, system="vtrain-a100")
    return predict(experiment, load_system_file("vtrain-a100"), trace_roles(experiment)).step_s


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
def test_a_layer_takes_what_its_host_takes(
    hidden: int, tp: int, micro_batch: int, measured_s: float, within: float
) -> None:
    """What a layer more adds for every micro-batch, forward, again and backward: VIA-Research/vTrain
    data/ground_truth_single.csv at f8dda847, where it does not depend on what there is to compute."""
    (few, more), (few_twice, more_twice) = (
        [step_s(hidden, layers, tp, micro_batch, times) for layers in (2, 4)] for times in (2, 4)
    )
    found = ((more_twice - few_twice) - (more - few)) / 2 / 2
    assert found == pytest.approx(measured_s, rel=within)
