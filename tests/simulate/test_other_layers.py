"""Tests of traces, parameter counts and step times of models whose layers differ from GPT-2's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, models, systems
from repro.model import counts
from repro.simulate.plan.closed_form import stage_parameters
from repro.simulate.step import simulate
from repro.simulate.time.device import ATTENTION, MATMULS
from repro.simulate.trace.roles import roles, trace
from tests.parallel.test_architectures import FAMILIES
from tests.simulate.trace.test_repeat import assert_same, trace_twice

BASE = Layout(micro_batch=2, global_batch=16, precision="bf16")
LAYOUTS = {
    "sp": replace(BASE, tp=2, sp=True, recompute=True),
    "zero3": replace(BASE, dp=2, zero=3),
    "cp": replace(BASE, cp=2, micro_batch=1),
    "stages": replace(BASE, pp=2, dp=2, zero=1, recompute=True),
    "softmax": replace(BASE, kernels="softmax", tp=4),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "bloom", "falcon"])
def test_a_trace_with_repeated_blocks_equals_the_full_trace(family: str, layout: Layout) -> None:
    experiment = Experiment(name="e", model=replace(FAMILIES[family], layers=8), layout=layout)
    for role in roles(experiment):
        assert_same(*trace_twice(experiment, role)[:2])


def test_recorded_blocks_are_not_reused_for_another_architecture() -> None:
    """Two models of equal sizes are traced in one process, of which only neox has rotary embeddings."""
    names = []
    for family in ("neox", "bloom"):
        experiment = Experiment(name="e", model=replace(FAMILIES[family], layers=4), layout=BASE)
        names.append({operator.name for _, operator in trace(experiment, roles(experiment)[0]).operators()})
    assert "repro.rotary" in names[0] - names[1]


@pytest.mark.parametrize("degrees", [(1, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("family", ["qwen", "bloom", "falcon", "biased"])
def test_stage_parameters_equal_the_traced_parameters(family: str, degrees: tuple[int, int]) -> None:
    tp, pp = degrees
    model, layout = FAMILIES[family], replace(BASE, tp=tp, pp=pp)
    found = stage_parameters(model, layout)
    for role in roles(experiment := Experiment(name="e", model=model, layout=layout)):
        assert found[role.name] == trace(experiment, role).parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_traced_product_flops_equal_the_counted_flops(family: str) -> None:
    """Fused attention recomputes the scores in the backward pass, one product more than the equation counts."""
    model = FAMILIES[family]
    experiment = Experiment(name="e", model=model, layout=BASE)
    products = sum(
        times * operator.flops
        for times, operator in trace(experiment, roles(experiment)[0]).operators()
        if operator.name in MATMULS or operator.name.startswith(ATTENTION)
    )
    recomputed_scores = 2 * model.layers * BASE.global_batch * model.seq**2 * model.heads * model.head_width
    assert products == counts.model_flops(model, model.seq, BASE.global_batch) + recomputed_scores


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("llama3-70b", {"tp": 8, "pp": 4, "dp": 2, "zero": 1, "sp": True}),
        ("bloom-176b", {"tp": 8, "pp": 7, "dp": 1, "recompute": True}),
    ],
)
def test_step_time_of_large_models_exceeds_peak_arithmetic(name: str, keys: dict[str, int]) -> None:
    """The step time is less than ten times the arithmetic at peak, also for a step that does not fit."""
    model, system = models.load_model(name), systems.load_system_file("dgx-h100")
    layout = Layout(**keys, micro_batch=1, global_batch=keys["dp"] * 16, precision="bf16")
    found = simulate(Experiment(name=name, model=model, layout=layout, system="dgx-h100"), system, time=True)
    assert found.time is not None
    work = counts.hardware_flops(model, model.seq, layout.global_batch, layout.recompute) / layout.world
    peak_rate_s = work / system.peak("bf16")
    assert peak_rate_s < found.time.step_s < 10 * peak_rate_s
