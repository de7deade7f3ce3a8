"""Small schedules of shallow traces say what the prediction step's schedule says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, Model, systems
from repro.simulate.plan.extrapolation.linear import widen_traces
from repro.simulate.plan.extrapolation.step_time import SCHEDULED_STAGES, StepTimes, schedule_points
from repro.simulate.time.predict import predict
from tests.simulate.families import families_of

MODEL = Model(name="small", layers=12, hidden=2048, heads=16, vocab=51200, seq=1024)
BASE = Layout(dp=8, micro_batch=2, global_batch=96, precision="fp16")
LAYOUTS = {
    **{f"z{z}": replace(BASE, zero=z) for z in range(4)},
    "z1-one": replace(BASE, zero=1, micro_batch=3, global_batch=24),
    "tp8-sp": replace(BASE, tp=8, sp=True, zero=1),
    "tp2-pa-z2": replace(BASE, tp=2, recompute=True, pa=True, zero=2),
    "cp4-sp": replace(BASE, cp=4, tp=2, sp=True, dp=2, zero=1, global_batch=24),
    "cp2-pp3": replace(BASE, pp=3, cp=2, dp=2, zero=2, micro_batch=4, recompute=True),
    "pp3-z2": replace(BASE, pp=3, dp=4, zero=2, micro_batch=4),
    "pp12-tp2": replace(BASE, pp=12, tp=2, dp=2, zero=1),
    "pp12-tp2-few": replace(BASE, pp=12, tp=2, dp=2, global_batch=48, recompute=True),
    "interleaved": replace(BASE, pp=2, dp=4, schedule="interleaved", chunks=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_shallow_times_are_those_of_the_whole_step(name: str) -> None:
    layout, system = LAYOUTS[name], systems.load_system_file("dgx2")
    families, _ = families_of(MODEL, layout)
    found = StepTimes(MODEL, MODEL.seq, system).of_layout(layout, families)
    prediction = predict(Experiment(name="x", model=MODEL, layout=layout), system).as_dict()
    assert found["step_s"] == pytest.approx(prediction["step_s"], rel=0.01)
    assert set(found) == set(prediction)
    for key in ("compute_s", "exposed_s", "bubble_s", "optimizer_s"):
        assert found[key] == pytest.approx(prediction[key], abs=0.01 * prediction["step_s"])
    # Some of a long pipeline's messages cross nodes, and which stage sends them is not followed.
    assert found["hidden_s"] == pytest.approx(prediction["hidden_s"], abs=0.05 * prediction["step_s"])
    for key in ("samples_per_s", "flops_per_device"):
        assert found[key] * found["step_s"] == pytest.approx(prediction[key] * prediction["step_s"])


def test_a_widened_trace_is_the_wide_one() -> None:
    """With one sample some copies are not needed; a widened trace has them."""
    layout = LAYOUTS["tp8-sp"]
    families, _ = families_of(MODEL, layout)
    family = families["all"]
    assert len(family.base.timed.events) < len(family.wider.timed.events)
    made, _ = widen_traces(family, 4)
    assert [event._replace(work=0) if hasattr(event, "work") else event for event in made.events] == [
        event._replace(work=0) if hasattr(event, "work") else event for event in family.wider.timed.events
    ]


def test_lines_through_few_schedules() -> None:
    """Weights sum to one, and those of stages and micro-batches to what the layout has."""
    for pp, m in ((1, 1), (1, 50), (4, 4), (4, 64), (SCHEDULED_STAGES + 1, 90), (32, 32), (96, 768)):
        layout = Layout(pp=pp, global_batch=m)
        weights = schedule_points(layout)
        assert sum(weights.values()) == pytest.approx(1)
        assert sum(stages * weight for (stages, _), weight in weights.items()) == pytest.approx(pp)
        assert sum(count * weight for (_, count), weight in weights.items()) == pytest.approx(m)


def test_what_a_step_may_take_instead_is_in_proportion_to_it() -> None:
    """Told twice the seconds, each of an interval is twice as long; the ends are those of the prediction step's."""
    layout, system = replace(LAYOUTS["pp3-z2"], kernels="softmax"), systems.load_system_file("dgx2")
    families, _ = families_of(MODEL, layout)
    times = StepTimes(MODEL, MODEL.seq, system)
    experiment = Experiment(name="x", model=MODEL, layout=layout)
    prediction = predict(experiment, system, interval=True)
    found = times.interval(layout, families, prediction.step_s)
    twice = times.interval(layout, families, 2 * prediction.step_s)
    assert found is not None
    assert twice is not None
    assert prediction.interval is not None
    for mine, other in (
        (found.possible_range(prediction.step_s), prediction.interval.possible_range(prediction.step_s)),
        (found.likely_range(prediction.step_s), prediction.interval.likely_range(prediction.step_s)),
    ):
        assert mine == pytest.approx(other, rel=0.01)
    assert twice.draws == pytest.approx([2 * draw for draw in found.draws])
