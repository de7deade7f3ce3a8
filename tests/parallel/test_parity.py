"""Tests that losses and parameters of every layout equal those of one process, also with fp32 gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from repro.config import Layout, Model
from repro.engines.native.engine import NativeEngine
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.pool import pool_of
from tests.training import FEW, LEARNING, TINY, Trained, micro_batches, smallest, tiny, train

BATCH = 8
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Relative rounding error of each 16-bit data type."""

DP2 = Layout(dp=2, micro_batch=4, global_batch=BATCH)
DP4 = Layout(dp=4, micro_batch=2, global_batch=BATCH)
TP2_DP2 = replace(DP2, tp=2)
TP2 = Layout(tp=2, micro_batch=BATCH)


def name_of(value: object) -> str | None:
    """Return the settings of a layout that differ from the defaults, for the id of its test."""
    if not isinstance(value, Layout):
        return None
    batches = ("micro_batch", "global_batch")
    settings = {key: getattr(value, key) for key in vars(Layout()) if key not in batches}
    return "-".join(f"{key}={word}" for key, word in settings.items() if word != getattr(Layout(), key))


@cache
def alone(precision: str = "fp32", model: Model = TINY, **training: float) -> Trained:
    """Train in one process with all samples in one micro-batch."""
    torch.set_num_threads(1)
    return train(tiny(Layout(micro_batch=BATCH, precision=precision), model, **training))


def assert_same(found: list[Trained], expected: Trained, loss: float, parameters: float) -> None:
    """Check losses and parameters up to these relative distances; a parameter's distance is relative to its norm.

    Each rank has the parameters of its pipeline stage. Parameters of several ranks must be equal.
    """
    merged: dict[str, Tensor] = {}
    for trained in found:
        torch.testing.assert_close(trained.loss, expected.loss, rtol=loss, atol=0.0)
        torch.testing.assert_close(trained.norm, expected.norm, rtol=10 * loss, atol=0.0)
        for name, value in trained.parameters.items():
            torch.testing.assert_close(value, merged.setdefault(name, value), rtol=1e-6, atol=1e-7)
    assert merged.keys() == expected.parameters.keys()
    for name, reference in expected.parameters.items():
        distance = (merged[name].float() - reference.float()).norm() / reference.float().norm().clamp(
            min=1e-3
        )
        assert distance <= parameters, f"{name}: {distance}"


def assert_parity(
    request: pytest.FixtureRequest,
    layout: Layout,
    model: Model | None = None,
    *,
    parameters: float = 1e-5,
    **training: float,
) -> list[Trained]:
    """Train on the ranks of a layout, check that the results equal those of one process, and return them."""
    model = model or smallest(layout)
    found: list[Trained] = pool_of(request, layout).run(train, tiny(layout, model, **training))
    assert_same(found, alone(model=model, **training), 1e-5, parameters)
    return found


def relative_distance(found: Trained, expected: Trained) -> float:
    """Return the relative distance of the parameters in `found`, as one vector, from those in `expected`."""
    values, reference = (
        torch.cat([trained.parameters[name].float().flatten() for name in found.parameters])
        for trained in (found, expected)
    )
    return float((values - reference).norm() / reference.norm())


@pytest.mark.parametrize(
    "layout",
    [
        *(replace(DP4, zero=z) for z in range(4)),
        replace(TP2, tp=4, sp=True),
        replace(TP2_DP2, gradient_as_bucket_view=False),
    ],
    ids=name_of,
)
def test_fp32_equals_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    expected = alone(model=smallest(layout), **LEARNING)
    assert expected.loss[-1] < 0.9 * expected.loss[0], "the loss must fall, or parity proves little"
    assert sum(norm > 0.3 for norm in expected.norm) > 6, "clipping must act, or a wrong norm has no effect"
    assert_parity(request, layout, **LEARNING)


@pytest.mark.parametrize(
    "layout",
    [replace(DP2, zero=1), replace(DP2, zero=2), TP2, replace(TP2_DP2, zero=3, sp=True)],
    ids=name_of,
)
def test_all_options_together_equal_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    """The options are recomputation, accumulation, small buckets and dropout."""
    layout = replace(layout, recompute=True, bucket_bytes=3000, micro_batch=layout.micro_batch // 2)
    assert_parity(request, layout, steps=4, **DROPOUT)


@pytest.mark.parametrize(
    "layout",
    [
        replace(DP2, precision="bf16"),
        replace(TP2_DP2, zero=2, precision="bf16", cb=False, recompute=True, pa=True, pa_cpu=True, md=True),
        replace(TP2_DP2, zero=3, precision="bf16"),
        replace(DP2, gradient_as_bucket_view=False, precision="fp16"),
        replace(TP2_DP2, zero=1, precision="fp16"),
        replace(DP2, zero=2, precision="fp16"),
        replace(DP2, zero=3, precision="fp16"),
    ],
    ids=name_of,
)
def test_mixed_precision_equals_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    """Gradients are summed in 16 bits, so the vector of all parameters is compared.

    Biases that start at zero contain mainly the rounding errors of their gradients.
    """
    unit, model = UNIT[layout.precision], smallest(layout)
    expected = alone(layout.precision, model, steps=6)
    for trained in pool_of(request, layout).run(train, tiny(layout, model, steps=6)):
        torch.testing.assert_close(trained.loss, expected.loss, rtol=4 * unit, atol=0.0)
        assert trained.parameters.keys() == expected.parameters.keys()
        assert relative_distance(trained, expected) <= 4 * unit
        assert (trained.skipped, trained.scale) == (expected.skipped, expected.scale)


@needs("torch")
def test_one_process_equals_engine_torch() -> None:
    """Engine torch runs torch's modules, autograd and `torch.optim.AdamW`."""
    assert_same([alone()], train(tiny(Layout(micro_batch=BATCH), engine="torch")), 1e-5, 1e-5)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_shards_of_padding_only_do_not_change_training(request: pytest.FixtureRequest, zero: int) -> None:
    """Under stages 1 and 2, two of four ranks have only padding. Under stage 3, some shards contain padding."""
    thin = Model(name="thin", layers=2, hidden=2, heads=2, vocab=8, seq=4)
    assert_parity(request, replace(DP4, zero=zero, bucket_bytes=16), thin, steps=5)


ONE = Layout(micro_batch=1, global_batch=BATCH, precision="bf16", grad_dtype="fp32")
"""One process with micro-batches of one sample, as on all replicas of the other layouts."""


@cache
def alone_with_fp32_gradients(layout: Layout) -> Trained:
    """Train in this process with the data types and operators of `layout`."""
    torch.set_num_threads(1)
    one = replace(ONE, precision=layout.precision, kernels=layout.kernels)
    return train(tiny(one, **FEW))


@pytest.mark.parametrize(
    "layout",
    [
        replace(ONE, dp=2, kernels="softmax", overlap=False),
        replace(ONE, dp=2, zero=1, zero1_reduce="all-reduce"),
        replace(ONE, dp=2, zero=1, kernels="softmax", precision="fp16"),
        replace(ONE, dp=2, zero=1, cb=False, kernels="megatron-2025"),
        replace(ONE, dp=2, zero=2, md=True, recompute=True),
        replace(ONE, dp=2, zero=2, precision="fp16"),
        replace(ONE, dp=4, zero=3),
        replace(ONE, pp=2, schedule="interleaved", chunks=2),
        replace(ONE, tp=2, sp=True, kernels="megatron-2025"),
        replace(ONE, pp=2, dp=2, zero=2),
        replace(ONE, tp=2, dp=2, zero=1, sp=True, precision="fp16"),
    ],
    ids=name_of,
)
def test_layouts_sum_the_gradients_of_one_process(request: pytest.FixtureRequest, layout: Layout) -> None:
    """Replicas compute each sample's gradients bit by bit as one process, and only the rounding of fp32 sums differs.

    Results of other axes differ by the rounding of 16-bit activations.
    """
    expected, unit = alone_with_fp32_gradients(layout), UNIT[layout.precision]
    is_exact = layout.tp == layout.pp == 1
    for trained in pool_of(request, layout).run(train, tiny(layout, **FEW)):
        if is_exact:
            assert trained.loss[0] == pytest.approx(expected.loss[0], rel=1e-6)
            assert trained.norm[0] == pytest.approx(expected.norm[0], rel=2e-6)
            assert trained.parameters.keys() == expected.parameters.keys()
        assert trained.loss == pytest.approx(expected.loss, rel=unit / 8 if is_exact else 4 * unit)
        assert relative_distance(trained, expected) <= (unit / 4 if is_exact else 4 * unit)
        assert (trained.skipped, trained.scale) == (expected.skipped, expected.scale)


@pytest.mark.parametrize("kernels", ["fused", "softmax"])
def test_buffer_is_the_fp32_sum_of_16_bit_gradients(kernels: str) -> None:
    """The expected sum adds autograd's gradients of each micro-batch in the same order."""
    experiment = tiny(replace(ONE, kernels=kernels), replace(TINY, layers=2, tied=False))
    engine = NativeEngine(experiment, meshes.single_rank_mesh(), torch.device("cpu"))
    found: list[Tensor] = []
    engine.optimizer.update = lambda gradients, *others: found.extend(g.clone() for g in gradients)  # type: ignore[method-assign]
    batches = micro_batches(experiment, 0, 0)
    engine.step(batches, lambda phase: None)

    (part,) = engine.parts
    part.micro_batches = batches
    parameters = part.sharded.parameters
    sums = [torch.zeros(p.shape) for p in parameters]
    for i in range(len(batches)):
        loss = part.forward(i, None) / len(batches)
        for total, gradient in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
            assert gradient.dtype == torch.bfloat16
            total += gradient
    for bucket, shard in zip(engine.buckets, found, strict=True):
        assert shard.dtype == torch.float32
        for slot in bucket.plan.slots:
            torch.testing.assert_close(
                shard[slot.start : slot.stop], sums[slot.index].flatten(), rtol=0, atol=0
            )


def test_fused_accumulation_does_not_round_products_to_16_bits() -> None:
    """A gradient computed in 16 bits equals its rounding to 16 bits. An fp32 sum of products rarely does."""
    found: dict[str, list[Tensor]] = {}
    for kernels in ("fused", "megatron-2025"):
        experiment = tiny(replace(ONE, global_batch=1, kernels=kernels), replace(TINY, tied=False))
        engine = NativeEngine(experiment, meshes.single_rank_mesh(), torch.device("cpu"))
        engine.optimizer.update = lambda *arguments: None  # type: ignore[method-assign]
        engine.step(micro_batches(experiment, 0, 0), lambda phase: None)
        (bucket,) = engine.buckets
        assert bucket.gradients is not None
        found[kernels] = [bucket.gradients[slot.start : slot.stop] for slot in bucket.plan.slots]
    for parameter, rounded, exact in zip(bucket.parameters, *found.values(), strict=True):
        assert torch.equal(rounded, rounded.bfloat16().float())
        assert torch.equal(exact, exact.bfloat16().float()) is not vars(parameter)["used_once"]
        torch.testing.assert_close(exact, rounded, rtol=2.0**-8, atol=0)


def test_infinite_gradient_in_an_fp32_buffer_skips_the_step() -> None:
    """A gradient that overflows in fp16 is infinite before its addition to the fp32 buffer."""
    trained = train(tiny(replace(ONE, precision="fp16"), loss_scale=2.0**30, steps=4))
    assert trained.skipped == [0, 1, 2, 3]
