"""Every layout trains the same model: losses and parameters equal those of one process."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from repro.config import Experiment, Layout, Model
from repro.engines import build_engine
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.pool import RankPool
from tests.training import LEARNING, TINY, Trained, micro_batches, smallest, tiny, train

BATCH = 8

LAYOUTS = [
    *(Layout(dp=2, zero=z, micro_batch=4, global_batch=BATCH) for z in range(4)),
    Layout(dp=2, zero=1, zero1_reduce="all-reduce", micro_batch=4, global_batch=BATCH),
    Layout(tp=2, micro_batch=8, global_batch=BATCH),
    Layout(tp=2, sp=True, micro_batch=8, global_batch=BATCH),
    *(Layout(dp=4, zero=z, micro_batch=2, global_batch=BATCH) for z in range(4)),
    *(Layout(tp=2, dp=2, zero=z, micro_batch=4, global_batch=BATCH) for z in range(4)),
    *(Layout(tp=2, dp=2, zero=z, sp=True, micro_batch=4, global_batch=BATCH) for z in (1, 2, 3)),
    Layout(tp=4, micro_batch=8, global_batch=BATCH),
    Layout(tp=4, sp=True, micro_batch=8, global_batch=BATCH),
    Layout(dp=2, gradient_as_bucket_view=False, micro_batch=4, global_batch=BATCH),
    Layout(tp=2, dp=2, gradient_as_bucket_view=False, micro_batch=4, global_batch=BATCH),
]


def name_of(layout: Layout) -> str:
    """A short name for the test's id."""
    parts = [f"dp{layout.dp}", f"tp{layout.tp}", f"z{layout.zero}"]
    parts += ["sp"] if layout.sp else []
    parts += ["feb2020"] if layout.zero1_reduce == "all-reduce" else []
    parts += [] if layout.gradient_as_bucket_view else ["copies"]
    return "-".join(parts)


@cache
def alone(precision: str = "fp32", model: Model = TINY, **training: float) -> Trained:
    """The same experiment in one process, all samples in one micro-batch."""
    torch.set_num_threads(1)
    return train(tiny(Layout(micro_batch=BATCH, precision=precision), model, **training))


def assert_same(found: list[Trained], expected: Trained, loss: float, parameters: float) -> None:
    """Losses within a relative, parameters within a relative (to the parameter's norm) distance."""
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


def run(pool: RankPool, experiment: Experiment) -> list[Trained]:
    return pool.run(train, experiment)


def pool_of(request: pytest.FixtureRequest, layout: Layout) -> RankPool:
    return request.getfixturevalue({2: "two", 4: "four"}[layout.world])


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_fp32_equals_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    model = smallest(layout)
    expected = alone(model=model, **LEARNING)
    assert expected.loss[-1] < 0.9 * expected.loss[0], "the run must learn, or parity shows little"
    assert sum(norm > 0.3 for norm in expected.norm) > 6, "clipping must act, or a wrong norm goes unseen"
    assert_same(run(pool_of(request, layout), tiny(layout, model, **LEARNING)), expected, 1e-5, 1e-5)


VARIED = {
    "recompute": ({"recompute": True}, {}),
    "accumulate": ({"micro_batch": 1}, {}),
    "tiny-buckets": ({"bucket_bytes": 3000}, {}),
    "dropout": ({}, {"dropout": 0.1, "attention_dropout": 0.1}),
}
EVERYTHING = (
    {"recompute": True, "bucket_bytes": 3000},
    {"dropout": 0.1, "attention_dropout": 0.1, "steps": 4},
)


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in (*LAYOUTS[:2], LAYOUTS[17])),
        *(*LAYOUTS[2:4], LAYOUTS[5], LAYOUTS[6], LAYOUTS[14], LAYOUTS[-2]),
    ],
    ids=name_of,
)
def test_nothing_else_changes_the_result(request: pytest.FixtureRequest, layout: Layout) -> None:
    """Recomputation, accumulation, the size of buckets and dropout, all at once: still one process's numbers."""
    settings, training = EVERYTHING
    model = smallest(layout)
    layout = replace(layout, **settings, micro_batch=layout.micro_batch // 2)
    found = run(pool_of(request, layout), tiny(layout, model, **training))
    assert_same(found, alone(model=model, **training), 1e-5, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("varied", VARIED)
@pytest.mark.parametrize("zero", [2, 3])
def test_each_alone(two: RankPool, zero: int, varied: str) -> None:
    """The same one by one, for the stages that do most, so that a failure names its cause."""
    settings, training = VARIED[varied]
    layout = replace(Layout(dp=2, zero=zero, micro_batch=4, global_batch=BATCH), **settings)
    model = smallest(layout)
    found = run(two, tiny(layout, model, steps=6, **training))
    assert_same(found, alone(model=model, steps=6, **training), 1e-5, 1e-5)


MIXED = [
    pytest.param(
        layout,
        precision,
        id=f"{name_of(layout)}-{precision}",
        marks=pytest.mark.slow if precision == "bf16" and layout.zero < 3 else (),
    )
    for layout in (*LAYOUTS[:4], LAYOUTS[5], LAYOUTS[14], LAYOUTS[-2])
    for precision in ("bf16", "fp16")
]


@pytest.mark.parametrize(("layout", "precision"), MIXED)
def test_mixed_precision_equals_one_process_within_its_rounding(
    request: pytest.FixtureRequest, layout: Layout, precision: str
) -> None:
    """Gradients are summed in 16 bits: losses agree to a few units in the last place, and so do the
    parameters as one vector (a single bias that starts at zero is mostly the rounding of its gradients)."""
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    model = smallest(layout)
    expected = alone(precision, model, steps=6)
    found = run(pool_of(request, layout), tiny(replace(layout, precision=precision), model, steps=6))
    reference = torch.cat([p.float().flatten() for p in expected.parameters.values()])
    for trained in found:
        torch.testing.assert_close(
            torch.tensor(trained.loss), torch.tensor(expected.loss), rtol=4 * unit, atol=0.0
        )
        mine = torch.cat([trained.parameters[name].float().flatten() for name in expected.parameters])
        assert (mine - reference).norm() <= 4 * unit * reference.norm()
        assert trained.skipped == expected.skipped
        assert trained.scale == expected.scale


@needs("torch")
def test_one_process_is_what_torch_computes() -> None:
    """The reference itself: our step on one rank against torch's modules, autograd and torch.optim.AdamW."""
    assert_same([alone()], train(tiny(Layout(micro_batch=BATCH), engine="torch")), 1e-5, 1e-5)


@pytest.mark.parametrize("zero", range(4))
def test_parameters_smaller_than_the_group(four: RankPool, zero: int) -> None:
    """Vectors of 4 elements over 4 ranks: some shards hold padding only."""
    model = Model(name="thin", layers=2, hidden=4, heads=2, vocab=8, seq=4)
    layout = Layout(dp=4, zero=zero, micro_batch=2, global_batch=BATCH, bucket_bytes=16)
    expected = alone(model=model, steps=5)
    assert_same(run(four, tiny(layout, model, steps=5)), expected, 1e-5, 1e-5)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_rank_that_owns_padding_alone(zero: int) -> None:
    """30 parameters over 8 ranks in shards of 8: the last rank has nothing to add to the norm, and says so."""
    model = Model(name="dust", layers=1, hidden=1, heads=1, vocab=2, seq=1)
    experiment = tiny(Layout(dp=8, zero=zero, micro_batch=1), model)
    mesh = meshes.shape_only_mesh(Layout(dp=8), rank=7)
    engine = build_engine(experiment, mesh, torch.device("cpu"))
    assert all(not bucket.ranges for bucket in engine.buckets)
    norms = engine.step(micro_batches(experiment, 7, 0), lambda phase: None)
    assert norms.gradient.item() == 0
    assert norms.overflow.item() == 0
