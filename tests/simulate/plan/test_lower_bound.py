"""Tests of the lower bounds of memory and step time: below the simulated values, and close for large models."""

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

QUICK_SEEDS, SEEDS = 24, 160
"""Numbers of random layouts without and with the slow tests."""
FORWARD_GATHER_SEED = 708
"""Seed of a random stage-3 layout that gathers the embedding in forward passes only."""


def bound_ratios(request: PlanRequest, layout: Layout) -> tuple[float, float]:
    """Return lower bound over simulated value: of the step time, and the maximum over the peaks of all roles."""
    system = request.system
    found = simulate(plan_experiment(request, layout), system, time=True)
    kernels = calibrated_kernels(calibration.calibration_point_of(layout.kernels, system))
    cost = DeviceCost(system, layout.precision, kernels, layout.world)
    least_s = step_time_lower_bound(request.model, layout, request.seq, cost, Network(system, layout))
    least = memory_lower_bound(request.model, layout, request.seq)
    peaks = {role.role.name: role.memory.peak_bytes for role in found.roles}
    memory = [sum(of_role.values()) / peaks[name] for name, of_role in least.items()]
    return least_s / found.time.step_s, max(memory)


SLOW_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(QUICK_SEEDS, SEEDS)]


@pytest.mark.parametrize("seed", [FORWARD_GATHER_SEED, *range(QUICK_SEEDS), *SLOW_SEEDS])
def test_lower_bounds_are_below_the_simulated_values(seed: int) -> None:
    assert max(bound_ratios(*random_layout(seed))) <= 1


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


LLAMA_LAYOUTS = ("dp", "z3-recompute", "tp8-sp", "tp2-pa-z2", "pp12-tp2", "megatron-core", "cp4")
"""Layouts whose bounds depend on the operators, the biases or the untied embedding of Llama."""


@pytest.mark.parametrize(
    ("name", "model"), [*((name, MODEL) for name in LAYOUTS), *((name, LLAMA) for name in LLAMA_LAYOUTS)]
)
def test_lower_bounds_are_close_for_large_models(name: str, model: Model) -> None:
    """A plan excludes layouts by these bounds."""
    system = systems.load_system_file("selene")
    layout = replace(LAYOUTS[name], precision="bf16")
    time, memory = bound_ratios(PlanRequest(model, system, layout.world, 0, model.seq), layout)
    assert (0.8 if layout.cp > 1 else 0.9) <= time <= 1
    assert (0.75 if layout.zero == 3 else 0.9) <= memory <= 1


def test_calibrated_operators_have_no_lower_bound() -> None:
    """A calibrated system times operators separately, also operators that the bound joins."""
    system = systems.load_system_file("selene")
    layout = replace(BASE, precision="bf16")
    cost, network = DeviceCost(system, "bf16"), Network(system, layout)
    assert step_time_lower_bound(MODEL, layout, MODEL.seq, cost, network) > 0
    cost.rates = {"matmul": object()}  # type: ignore[dict-item]
    assert step_time_lower_bound(MODEL, layout, MODEL.seq, cost, network) == 0
