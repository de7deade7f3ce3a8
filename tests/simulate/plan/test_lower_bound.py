"""Lower bounds of memory and step time are below the simulation of every layout, and near it for models of today."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Layout, Model, systems
from repro.simulate.plan.candidates import PlanRequest
from repro.simulate.plan.lower_bound import memory_lower_bound, step_time_lower_bound
from repro.simulate.plan.planner import plan_experiment
from repro.simulate.step import simulate
from repro.simulate.time import calibration
from repro.simulate.time.device import DeviceCost
from repro.simulate.time.network import Network
from repro.simulate.time.predict import calibrated_kernels
from tests.simulate.plan.layouts import random_layout

QUICK, ALL = 24, 160
"""Number of random layouts of the quick test and of both."""
GATHERED_ONCE = 708
"""Random layout of stage 3 that gathers the embedding in forward passes only."""


def shares(request: PlanRequest, layout: Layout) -> tuple[float, dict[str, float]]:
    """The bound of the step time as a share of the simulated time, and those of each role's peak memory."""
    on = request.system
    found = simulate(plan_experiment(request, layout), on, time=True)
    generation = calibration.calibration_point_of(layout.kernels, on)
    kernels = calibrated_kernels(generation)
    cost = DeviceCost(on, layout.precision, kernels, layout.world)
    least_s = step_time_lower_bound(request.model, layout, request.seq, cost, Network(on, layout))
    least = memory_lower_bound(request.model, layout, request.seq)
    peaks = {role.role.name: role.memory.peak_bytes for role in found.roles}
    assert found.time is not None
    return least_s / found.time.step_s, {
        name: sum(of_role.values()) / peaks[name] for name, of_role in least.items()
    }


@pytest.mark.parametrize(
    "seed",
    [
        GATHERED_ONCE,
        *(pytest.param(seed, marks=() if seed < QUICK else pytest.mark.slow) for seed in range(ALL)),
    ],
)
def test_no_layout_takes_less(seed: int) -> None:
    time, memory = shares(*random_layout(seed))
    assert time <= 1
    assert max(memory.values()) <= 1


MODEL = Model(name="large", layers=12, hidden=4096, heads=32, vocab=51200, seq=2048)
LLAMA = replace(MODEL, norm="rms", positions="rotary", mlp="swiglu", kv_heads=8, biases="none", tied=False)
BASE = Layout(dp=8, zero=1, global_batch=64)
LAYOUTS = {
    "dp": BASE,
    "z0": replace(BASE, zero=0),
    "z3": replace(BASE, zero=3, micro_batch=2),
    "z3-recompute": replace(BASE, zero=3, micro_batch=2, recompute=True),
    "tp8-sp": replace(BASE, tp=8, sp=True, micro_batch=2),
    "tp2-pa-z2": replace(BASE, tp=2, recompute=True, pa=True, zero=2, micro_batch=4),
    "pp3": replace(BASE, pp=3, micro_batch=2),
    "pp12-tp2": replace(BASE, pp=12, tp=2, dp=2),
    "gpipe": replace(BASE, pp=4, dp=2, schedule="gpipe"),
    "pp4-dp64": replace(BASE, tp=2, pp=4, dp=64, global_batch=512),
    "interleaved": replace(BASE, pp=2, dp=4, schedule="interleaved", chunks=2),
    "megatron-core": replace(BASE, tp=2, kernels="megatron-2025", precision="bf16", grad_dtype="fp32"),
    "cp4": replace(BASE, cp=4),
    "gradients": replace(BASE, dp=64, pp=2, zero=2, global_batch=512),
    "parameters": replace(BASE, dp=64, zero=3, global_batch=256),
}


@pytest.mark.parametrize("model", [MODEL, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_large_layout_takes_little_more(name: str, model: Model) -> None:
    """A bound that excludes nothing is useless."""
    on = systems.load_system_file("selene")
    layout = replace(LAYOUTS[name], precision="bf16")
    time, memory = shares(PlanRequest(model, on, layout.world, 0, model.seq), layout)
    assert (0.8 if layout.cp > 1 else 0.9) <= time <= 1
    assert (0.75 if layout.zero == 3 else 0.9) <= max(memory.values()) <= 1


def test_operators_that_were_measured_have_no_bound() -> None:
    """A calibrated system times operators one by one, also those that the bound joins."""
    on = systems.load_system_file("selene")
    layout = replace(BASE, precision="bf16")
    cost, network = DeviceCost(on, "bf16"), Network(on, layout)
    assert step_time_lower_bound(MODEL, layout, MODEL.seq, cost, network) > 0
    cost.rates = {"matmul": object()}  # type: ignore[dict-item]
    assert step_time_lower_bound(MODEL, layout, MODEL.seq, cost, network) == 0
