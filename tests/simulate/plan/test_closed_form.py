"""Tests of the closed forms of parameters, model states, FLOP and hidden widths, against traces and papers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro.config import Experiment, Layout, Model, systems
from repro.model import counts
from repro.simulate.plan.candidates import PlanRequest
from repro.simulate.plan.closed_form import stage_parameters, state_bytes, suggested_width
from repro.simulate.plan.planner import Planner
from repro.simulate.plan.rows import BOUND, OOM, OPEN, STATES
from repro.simulate.step import simulate
from repro.simulate.time.device import ATTENTION, MATMULS
from repro.simulate.trace.roles import roles, trace
from repro.util.processes import Workers
from tests.parallel.test_architectures import FAMILIES

DGX2 = systems.load_system_file("dgx2")
MODEL = Model(name="small", layers=12, hidden=128, heads=4, vocab=512, seq=64)
BASE = Layout(dp=8, micro_batch=2, global_batch=192, precision="fp16", bucket_bytes=200_000)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (MODEL, replace(BASE, zero=2)),
        (MODEL, replace(BASE, zero=2, grad_dtype="fp32")),
        (MODEL, replace(BASE, pp=2, dp=4, zero=1, grad_dtype="fp32")),
        (MODEL, replace(BASE, pp=6, tp=2, dp=2, recompute=True)),
        (MODEL, replace(BASE, tp=4, precision="fp32")),
        *((FAMILIES[name], replace(BASE, dp=1, tp=4)) for name in ("qwen", "bloom", "falcon", "biased")),
        *(
            (FAMILIES[name], replace(BASE, dp=1, tp=2, pp=2))
            for name in ("qwen", "bloom", "falcon", "biased")
        ),
    ],
)
def test_closed_form_states_equal_the_traced_states(model: Model, layout: Layout) -> None:
    simulation = simulate(Experiment(name="x", model=model, layout=layout), DGX2)
    found = {role.role.name: role for role in simulation.roles}
    for name, parameters in stage_parameters(model, layout).items():
        assert found[name].parameters == parameters
        assert found[name].memory.states == pytest.approx(state_bytes(parameters, layout), rel=5e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_traced_product_flops_equal_the_counted_flops(family: str) -> None:
    """Fused attention recomputes the scores in the backward pass, one product more than the equation counts."""
    model, layout = FAMILIES[family], Layout(micro_batch=2, global_batch=16, precision="bf16")
    experiment = Experiment(name="e", model=model, layout=layout)
    products = sum(
        times * operator.flops
        for times, operator in trace(experiment, roles(experiment)[0]).operators()
        if operator.name in MATMULS or operator.name.startswith(ATTENTION)
    )
    recomputed_scores = 2 * model.layers * layout.global_batch * model.seq**2 * model.heads * model.head_width
    assert products == counts.model_flops(model, model.seq, layout.global_batch) + recomputed_scores


def test_model_states_alone_rule_out_a_layout() -> None:
    """17.18e9 parameters with 16 bytes each on 8 ranks need 34.4 GB. P_os and 16 ranks need less."""
    model = Model(name="b", layers=78, hidden=4256, heads=32, vocab=51200, seq=1024)
    plain = Layout(tp=8, dp=64, precision="fp16")
    request = PlanRequest(model, DGX2, 512, 32 * 10**9 + DGX2.context(), 1024)
    with Workers(1) as workers:
        rows = Planner(request, workers).bounded([plain, replace(plain, zero=1), replace(plain, tp=16)])
    assert [(row.outcome, row.evidence, row.ruled_out_by) for row in rows] == [
        (OOM, STATES, "optimizer states"),
        (OPEN, BOUND, ""),
        (OPEN, BOUND, ""),
    ]
    assert rows[0].memory["peak_bytes"] == pytest.approx(17.18e9 * 16 / 8, rel=0.005)
    assert rows[0].reason.startswith("model states alone are 34.")


def test_suggested_widths_equal_those_of_the_papers_models() -> None:
    """1910.02054 Table 4: the 8B model has hidden width 3072, the 100B model 8192."""
    zero1 = Layout(dp=64, zero=1, precision="fp16")
    assert suggested_width(32 * 10**9, 1, zero1) == 3072
    assert suggested_width(32 * 10**9, 16, replace(zero1, tp=16)) == 8192


def test_a_suggested_width_is_rounded_to_a_step() -> None:
    """12 h^3 / 64 parameters have 16 bytes each. The step is 64 up to 512, then 256, 1024 and 2048."""
    widths = {
        500: 512,
        511: 512,
        512: 512,
        600: 512,
        3071: 3072,
        3072: 3072,
        3300: 3072,
        4700: 5120,
        9000: 8192,
    }
    found = {width: suggested_width(16 * 12 * width**3 // 64 + 1, 1, Layout()) for width in widths}
    assert found == widths
