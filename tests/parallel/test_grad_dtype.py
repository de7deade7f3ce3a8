"""Tests of fp32 gradients in 16-bit training: every layout sums the same gradients without rounding to 16 bits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from repro.config import Layout
from repro.engines.native.engine import NativeEngine
from repro.parallel import mesh as meshes
from tests.parallel.test_parity import BATCH, UNIT, name_of, relative_distance
from tests.pool import pool_of
from tests.training import FEW, TINY, Trained, micro_batches, tiny, train

ONE = Layout(micro_batch=1, global_batch=BATCH, precision="bf16", grad_dtype="fp32")
"""One process with micro-batches of one sample, as on all replicas of the other layouts."""


@cache
def alone(layout: Layout) -> Trained:
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
    expected, unit = alone(layout), UNIT[layout.precision]
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
