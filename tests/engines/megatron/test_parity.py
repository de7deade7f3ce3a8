"""Parity tests: megatron-core and engine native have equal losses, norms and parameters in each layout."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from repro.config import Layout
from tests.engines.megatron.both import build, needs_megatron, train_both
from tests.engines.runs import pool_of
from tests.pool import RankPool
from tests.training import LEARNING, Trained, micro_batches, smallest, tiny

pytestmark = needs_megatron
B = 8
INTERLEAVED: dict[str, Any] = {"pp": 2, "schedule": "interleaved", "chunks": 2}
LAYOUTS = {
    "tp": Layout(tp=2, micro_batch=8, global_batch=B),
    "tp-sp": Layout(tp=2, sp=True, micro_batch=4, global_batch=B),
    "pp": Layout(pp=2, micro_batch=2, global_batch=B),
    "pp-interleaved": Layout(micro_batch=2, global_batch=B, **INTERLEAVED),
    "pp-uneven": Layout(pp=2, stage_layers=(1, 2), micro_batch=2, global_batch=B),
    "pp-separate-ends": Layout(stage_layers=(0, 1, 1, 0), micro_batch=2, global_batch=B, **INTERLEAVED),
    "dp": Layout(dp=2, micro_batch=4, global_batch=B),
    "dp-accumulate": Layout(dp=2, micro_batch=1, bucket_bytes=3000, global_batch=B),
    "dp-no-overlap": Layout(dp=2, overlap=False, micro_batch=4, global_batch=B),
    "zero1": Layout(dp=2, zero=1, micro_batch=4, global_batch=B),
    "zero1-accumulate": Layout(dp=2, zero=1, micro_batch=1, bucket_bytes=3000, global_batch=B),
    "zero1-gather-first": Layout(dp=2, zero=1, gather_overlap=False, micro_batch=4, global_batch=B),
    "recompute": Layout(tp=2, recompute=True, micro_batch=4, global_batch=B),
    "recompute-sp": Layout(tp=2, sp=True, recompute=True, micro_batch=8, global_batch=B),
    "pa": Layout(tp=2, recompute=True, pa=True, micro_batch=4, global_batch=B),
    "tp-dp-zero1-sp": Layout(tp=2, dp=2, zero=1, sp=True, micro_batch=2, global_batch=B),
    "tp-sp-pp-interleaved": Layout(tp=2, sp=True, micro_batch=2, global_batch=B, **INTERLEAVED),
    "pp-dp-zero1": Layout(pp=2, dp=2, zero=1, micro_batch=1, bucket_bytes=3000, global_batch=B),
    "pp-dp-inner-stages": Layout(pp=2, dp=2, order="pp-dp-tp", micro_batch=1, global_batch=B),
    "pp4-interleaved": Layout(recompute=True, global_batch=B, **INTERLEAVED | {"pp": 4}),
    "pp4-interleaved-no-overlap": Layout(overlap=False, global_batch=B, **INTERLEAVED | {"pp": 4}),
}


ONE_RANK = """
import torch
from repro.config import Layout
from repro.engines import build_engine
from repro.parallel import mesh as meshes
from tests.engines.megatron.both import collect, train_step
from tests.training import Trained, tiny

for name in ("megatron", "native"):
    experiment, trained = tiny(Layout(micro_batch=8), engine=name), Trained([], [], {})
    engine = build_engine(experiment, meshes.single_rank_mesh(), torch.device("cpu"))
    for step in range(experiment.training.steps):
        train_step(engine, experiment, trained, step)
    collect(engine, trained)
    print(*trained.loss)
"""


def test_one_rank_trains_without_a_process_group() -> None:
    """The process starts like the rank of a job of one rank, which joins no process group."""
    done = subprocess.run([sys.executable, "-c", ONE_RANK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found, expected = ([float(loss) for loss in line.split()] for line in done.stdout.splitlines())
    assert found == pytest.approx(expected, rel=1e-5)


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the relative distance between all parameters as one vector."""
    assert found.keys() == expected.keys()
    vector, target = (torch.cat([p[name].float().flatten() for name in expected]) for p in (found, expected))
    return float((vector - target).norm() / target.norm())


def assert_same(megatron: Trained, native: Trained, loss: float, norm: float, parameters: float) -> None:
    torch.testing.assert_close(torch.tensor(megatron.loss), torch.tensor(native.loss), rtol=loss, atol=0.0)
    torch.testing.assert_close(torch.tensor(megatron.norm), torch.tensor(native.norm), rtol=norm, atol=0.0)
    assert distance(megatron.parameters, native.parameters) <= parameters
    assert megatron.skipped == native.skipped
    assert megatron.scale == native.scale
    assert megatron.pipeline == native.pipeline


@pytest.mark.parametrize("name", LAYOUTS)
def test_fp32_training_agrees_to_1e5_over_20_steps(request: pytest.FixtureRequest, name: str) -> None:
    layout = LAYOUTS[name]
    for megatron, native in pool_of(request, layout).run(train_both, layout, {}):
        assert native.loss[-1] < 0.9 * native.loss[0], "the loss must fall, or parity proves little"
        assert sum(norm > 0.3 for norm in native.norm) > 10, "clipping must act, so that a wrong norm shows"
        assert_same(megatron, native, loss=1e-5, norm=1e-5, parameters=1e-5)


def test_training_agrees_without_clipping_under_cosine_decay(two: RankPool) -> None:
    training = LEARNING | {"clip": 0.0, "schedule": "cosine", "weight_decay": 0.3}
    for megatron, native in two.run(train_both, LAYOUTS["tp"], training):
        assert_same(megatron, native, loss=1e-5, norm=1e-5, parameters=1e-5)


UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11}


@pytest.mark.parametrize("name", ["tp-sp", "pp-interleaved", "dp", "zero1", "recompute"])
@pytest.mark.parametrize("precision", UNITS)
def test_16_bit_training_agrees_within_rounding(two: RankPool, name: str, precision: str) -> None:
    """The first loss is that of equal 16-bit weights. In bf16, only megatron-core sums gradients in fp32."""
    unit = UNITS[precision]
    for megatron, native in two.run(train_both, replace(LAYOUTS[name], precision=precision), {"steps": 10}):
        assert abs(megatron.loss[0] / native.loss[0] - 1) <= unit / 16
        assert_same(megatron, native, loss=4 * unit, norm=16 * unit, parameters=4 * unit)


@pytest.mark.parametrize("name", ["dp-accumulate", "zero1-accumulate"])
@pytest.mark.parametrize("precision", UNITS)
def test_fp32_gradients_of_16_bit_training_agree(two: RankPool, name: str, precision: str) -> None:
    unit = UNITS[precision]
    layout = replace(LAYOUTS[name], precision=precision, grad_dtype="fp32")
    for megatron, native in two.run(train_both, layout, {"steps": 10}):
        assert_same(megatron, native, loss=4 * unit, norm=4 * unit, parameters=unit)


def test_loss_scales_and_skipped_steps_agree(two: RankPool) -> None:
    """The first scale overflows; both engines skip, halve and double at the same steps."""
    rules = {"steps": 12, "loss_scale": 2.0**24, "loss_scale_window": 4, "loss_scale_hysteresis": 2}
    for megatron, native in two.run(train_both, replace(LAYOUTS["tp"], precision="fp16"), rules):
        assert native.skipped, "a step must overflow"
        assert len(set(native.scale)) > 2
        assert megatron.skipped == native.skipped
        assert megatron.scale == native.scale


@pytest.mark.parametrize("name", ["tp", "pp-interleaved", "zero1"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_initial_parameters_are_equal_bit_for_bit(two: RankPool, name: str, precision: str) -> None:
    for megatron, native in two.run(_first_parameters, LAYOUTS[name], precision):
        assert megatron.keys() == native.keys()
        for parameter, value in native.items():
            assert torch.equal(megatron[parameter], value), parameter


def _first_parameters(layout: Layout, precision: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    experiment = tiny(replace(layout, precision=precision), smallest(layout), "megatron")
    megatron = build(experiment).full_parameters()
    return megatron, build(replace(experiment, engine="native")).full_parameters()


def test_losses_of_all_tokens_of_the_first_batch_agree(two: RankPool) -> None:
    for megatron, native in two.run(_first_losses, LAYOUTS["tp"]):
        torch.testing.assert_close(megatron, native, rtol=1e-6, atol=0.0)


def _first_losses(layout: Layout) -> tuple[Tensor, Tensor]:
    experiment = tiny(layout, smallest(layout), "megatron")
    engine = build(experiment)
    native = build(replace(experiment, engine="native"))
    (batch,) = micro_batches(experiment, 0, 0)
    with torch.no_grad():
        positions = torch.arange(experiment.seq).expand_as(batch.tokens)
        with engine.active:
            megatron = engine.models[0](batch.tokens, positions, None, labels=batch.targets)
        model = native.parts[0].model
        x = model.embed(batch.tokens, batch.place)
        for block in model.blocks.values():
            x = block(x, batch.place)
        return megatron.flatten(), model.head(x, batch.targets)
