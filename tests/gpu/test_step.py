"""Tests of the native step on one GPU: it trains as on a CPU in every precision, with the recorded kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.kernels.families import FAMILIES
from repro.launch.rank.experiment import ExperimentRun
from repro.parallel import mesh as meshes
from tests.parallel.test_architectures import FAMILIES as MODELS
from tests.parallel.test_parity import BATCH, alone
from tests.training import TINY, tiny, train

pytestmark = pytest.mark.gpu

ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Largest relative error of one rounding, by precision."""
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
KERNEL_SETS = ["fused", "reference", "softmax", "unfused"]


def skip_unsupported(precision: str) -> None:
    """Skip bf16 on a V100, where torch emulates bf16 and reports it as supported."""
    if precision == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bf16 needs compute capability 8.0")


@pytest.fixture(autouse=True)
def disable_tf32() -> None:
    """Compute fp32 products in fp32, as on a CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("training", [{}, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *(("gpt2", kernels) for kernels in KERNEL_SETS),
        *((family, "fused") for family in ("llama", "neox", "bloom", "falcon")),
    ],
)
def test_fp32_losses_equal_those_of_a_cpu(family: str, kernels: str, training: dict[str, float]) -> None:
    """Dropout drops the same elements on a GPU and on a CPU."""
    model = MODELS.get(family, TINY)
    trained = train(tiny(Layout(micro_batch=BATCH, kernels=kernels), model, **training), "cuda")
    torch.testing.assert_close(trained.loss, alone(model=model, **training).loss, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("kernels", KERNEL_SETS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_losses_agree_with_fp32(precision: str, kernels: str, recompute: bool) -> None:
    skip_unsupported(precision)
    layout = Layout(micro_batch=BATCH, precision=precision, kernels=kernels, recompute=recompute)
    trained = train(tiny(layout), "cuda")
    torch.testing.assert_close(trained.loss, alone().loss, rtol=4 * ROUNDOFF[precision], atol=0.0)


def in_pieces(pieces: int, **keys: Any) -> Layout:
    """Return a layout with `pieces` micro-batches."""
    return Layout(micro_batch=BATCH // pieces, global_batch=BATCH, **keys)


GRAPH_LAYOUTS = {
    "one micro-batch": in_pieces(1, precision="bf16"),
    "two": in_pieces(2, precision="bf16"),
    "four, recomputed": in_pieces(4, precision="bf16", recompute=True),
    "scaled": in_pieces(4, precision="fp16"),
    "fp32 gradients": in_pieces(4, precision="bf16", grad_dtype="fp32"),
    "fused accumulation": in_pieces(4, precision="bf16", grad_dtype="fp32", kernels="megatron-2025"),
    "reference": in_pieces(4, kernels="reference"),
    "unfused": in_pieces(2, kernels="unfused"),
    **{f"ZeRO {z}": in_pieces(4, zero=z) for z in (1, 2, 3)},
    "defragmented": in_pieces(4, zero=2, recompute=True, md=True),
}


@pytest.mark.parametrize("training", [{}, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("name", GRAPH_LAYOUTS)
def test_captured_micro_batches_train_like_eager_micro_batches(name: str, training: dict[str, float]) -> None:
    layout = GRAPH_LAYOUTS[name]
    skip_unsupported(layout.precision)
    eager, captured = (
        train(tiny(replace(layout, cuda_graphs=graphs), steps=5, **training), "cuda")
        for graphs in (False, True)
    )
    # The order of the additions in the backward of attention varies between runs.
    torch.testing.assert_close(captured.loss, eager.loss, rtol=4 * ROUNDOFF[layout.precision], atol=0.0)
    torch.testing.assert_close(captured.norm, eager.norm, rtol=8 * ROUNDOFF[layout.precision], atol=0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_record_names_the_kernels_that_ran(precision: str) -> None:
    """No `fused` operator falls back to torch, and `reference` runs no `repro` kernel."""
    skip_unsupported(precision)
    recorded = {}
    for kernels in ("fused", "reference"):
        layout = Layout(micro_batch=4, precision=precision, kernels=kernels)
        experiment = tiny(layout, steps=3, untimed_steps=1, **DROPOUT)
        run = ExperimentRun(
            experiment, meshes.single_rank_mesh(), torch.device("cuda"), lambda step, phase: None
        )
        run.prelude()
        run.steps(2)
        recorded[kernels] = run.result().as_dict()["kernels"]
    assert recorded["reference"] == {"every operator": ["torch: kernels = reference"]}
    assert {"adamw_", "norm_squared", "layer_norm", "bias_gelu_backward"} <= set(recorded["fused"])
    assert all(implementations == ["cuda"] for implementations in recorded["fused"].values())


def test_every_kernel_family_loads_into_the_gpu() -> None:
    """The programs are the example programs that `repro doctor` compiles."""
    from repro.kernels.cuda.device import cuda_launcher

    for family in FAMILIES.values():
        for program in family.examples():
            cuda_launcher(0).load(program)
