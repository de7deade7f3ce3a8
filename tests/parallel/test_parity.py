"""Tests that losses and parameters of every layout equal those of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from repro.config import Layout, Model
from repro.engines import build_engine
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.pool import RankPool, pool_of
from tests.training import LEARNING, TINY, Trained, micro_batches, smallest, tiny, train

BATCH = 8

DP2 = Layout(dp=2, micro_batch=4, global_batch=BATCH)
DP4 = Layout(dp=4, micro_batch=2, global_batch=BATCH)
TP2_DP2 = replace(DP2, tp=2)
TP2 = Layout(tp=2, micro_batch=BATCH)
LAYOUTS = [
    *(replace(DP4, zero=z) for z in range(4)),
    replace(DP2, zero=1, zero1_reduce="all-reduce"),
    *(replace(TP2_DP2, zero=z, sp=True) for z in (1, 2, 3)),
    replace(TP2, tp=4),
    replace(TP2, tp=4, sp=True),
    replace(TP2_DP2, gradient_as_bucket_view=False),
]


def name_of(layout: Layout) -> str:
    """Return a short name for the test's id."""
    parts = [f"dp{layout.dp}", f"tp{layout.tp}", f"z{layout.zero}"]
    parts += ["sp"] if layout.sp else []
    parts += ["feb2020"] if layout.zero1_reduce == "all-reduce" else []
    parts += [] if layout.gradient_as_bucket_view else ["copies"]
    parts += [] if layout.precision == "fp32" else [layout.precision]
    return "-".join(parts)


@cache
def alone(precision: str = "fp32", model: Model = TINY, **training: float) -> Trained:
    """Train in one process with all samples in one micro-batch."""
    torch.set_num_threads(1)
    return train(tiny(Layout(micro_batch=BATCH, precision=precision), model, **training))


def assert_same(found: list[Trained], expected: Trained, loss: float, parameters: float) -> None:
    """Check losses and parameters up to these relative distances; a parameter's distance is relative to its norm."""
    for trained in found:
        torch.testing.assert_close(
            torch.tensor(trained.loss), torch.tensor(expected.loss), rtol=loss, atol=0.0
        )
        torch.testing.assert_close(
            torch.tensor(trained.norm), torch.tensor(expected.norm), rtol=10 * loss, atol=0.0
        )
        assert trained.parameters.keys() == expected.parameters.keys()
        for name, value in trained.parameters.items():
            reference = expected.parameters[name].float()
            distance = (value.float() - reference).norm() / reference.norm().clamp(min=1e-3)
            assert distance <= parameters, f"{name}: {distance}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_fp32_equals_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    model = smallest(layout)
    expected = alone(model=model, **LEARNING)
    assert expected.loss[-1] < 0.9 * expected.loss[0], "the loss must fall, or parity proves little"
    assert sum(norm > 0.3 for norm in expected.norm) > 6, "clipping must act, or a wrong norm has no effect"
    found = pool_of(request, layout).run(train, tiny(layout, model, **LEARNING))
    assert_same(found, expected, 1e-5, 1e-5)


ALL_OPTIONS = (
    {"recompute": True, "bucket_bytes": 3000},
    {"dropout": 0.1, "attention_dropout": 0.1, "steps": 4},
)


@pytest.mark.parametrize(
    "layout",
    [
        *(replace(DP2, zero=z) for z in (1, 2, 3)),
        TP2,
        replace(TP2_DP2, zero=3, sp=True),
        replace(DP2, gradient_as_bucket_view=False),
    ],
    ids=name_of,
)
def test_all_options_together_equal_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    """The options are recomputation, accumulation, small buckets and dropout."""
    settings, training = ALL_OPTIONS
    model = smallest(layout)
    layout = replace(layout, **settings, micro_batch=layout.micro_batch // 2)
    found = pool_of(request, layout).run(train, tiny(layout, model, **training))
    assert_same(found, alone(model=model, **training), 1e-5, 1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        *(replace(DP2, zero=z, precision="bf16") for z in range(3)),
        replace(TP2_DP2, zero=3, precision="bf16"),
        *(replace(DP2, zero=z, precision="fp16") for z in (1, 2, 3)),
        replace(TP2, precision="fp16"),
        replace(DP2, gradient_as_bucket_view=False, precision="fp16"),
    ],
    ids=name_of,
)
def test_mixed_precision_equals_one_process_within_its_rounding(
    request: pytest.FixtureRequest, layout: Layout
) -> None:
    """Gradients are summed in 16 bits, so the vector of all parameters is compared.

    Biases that start at zero contain mainly the rounding errors of their gradients.
    """
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[layout.precision]
    model = smallest(layout)
    expected = alone(layout.precision, model, steps=6)
    found = pool_of(request, layout).run(train, tiny(layout, model, steps=6))
    reference = torch.cat([p.float().flatten() for p in expected.parameters.values()])
    for trained in found:
        torch.testing.assert_close(
            torch.tensor(trained.loss), torch.tensor(expected.loss), rtol=4 * unit, atol=0.0
        )
        values = torch.cat([trained.parameters[name].float().flatten() for name in expected.parameters])
        assert (values - reference).norm() <= 4 * unit * reference.norm()
        assert trained.skipped == expected.skipped
        assert trained.scale == expected.scale


@needs("torch")
def test_one_process_equals_engine_torch() -> None:
    """Engine torch runs torch's modules, autograd and `torch.optim.AdamW`."""
    assert_same([alone()], train(tiny(Layout(micro_batch=BATCH), engine="torch")), 1e-5, 1e-5)


@pytest.mark.parametrize("zero", range(4))
def test_shards_of_padding_only_do_not_change_training(four: RankPool, zero: int) -> None:
    """Parameters of 4 elements on 4 ranks leave some shards without elements."""
    model = Model(name="thin", layers=2, hidden=4, heads=2, vocab=8, seq=4)
    layout = Layout(dp=4, zero=zero, micro_batch=2, global_batch=BATCH, bucket_bytes=16)
    expected = alone(model=model, steps=5)
    assert_same(four.run(train, tiny(layout, model, steps=5)), expected, 1e-5, 1e-5)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_rank_with_padding_only_reports_a_zero_norm(zero: int) -> None:
    """30 elements on 8 ranks in shards of 8 leave only padding on the last rank."""
    model = Model(name="dust", layers=1, hidden=1, heads=1, vocab=2, seq=1)
    experiment = tiny(Layout(dp=8, zero=zero, micro_batch=1), model)
    mesh = meshes.shape_only_mesh(Layout(dp=8), rank=7)
    engine = build_engine(experiment, mesh, torch.device("cpu"))
    assert all(not bucket.ranges for bucket in engine.buckets)
    norms = engine.step(micro_batches(experiment, 7, 0), lambda phase: None)
    assert norms.gradient.item() == 0
    assert norms.overflow.item() == 0
