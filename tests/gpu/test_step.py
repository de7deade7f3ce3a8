"""The whole native step on one GPU: the same training as on a CPU, in every precision, by the kernels it claims."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from repro.config import Layout
from repro.kernels.families import FAMILIES
from repro.launch.rank.experiment import ExperimentRun
from repro.parallel import mesh as meshes
from tests.parallel.test_architectures import FAMILIES as LAYERS
from tests.parallel.test_parity import BATCH, alone
from tests.training import tiny, train

pytestmark = pytest.mark.gpu

UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Largest relative error of one rounding."""
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1}
WAYS = ["fused", "reference", "softmax", "unfused"]


def supported(precision: str) -> None:
    """A V100 emulates bf16, and torch calls that supported."""
    if precision == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bf16 needs compute capability 8.0")


@pytest.fixture(autouse=True)
def exact() -> None:
    """fp32 products are fp32, as on the CPU that they are compared with."""
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("training", [{}, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("kernels", WAYS)
def test_fp32_is_what_a_cpu_trains(kernels: str, training: dict[str, float]) -> None:
    """Dropout drops the same elements on both."""
    found = train(tiny(Layout(micro_batch=BATCH, kernels=kernels), **training), "cuda")
    torch.testing.assert_close(found.loss, alone(**training).loss, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("training", [{}, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("family", ["llama", "neox", "bloom", "falcon"])
def test_other_layers_are_what_a_cpu_trains(family: str, training: dict[str, float]) -> None:
    model = LAYERS[family]
    found = train(tiny(Layout(micro_batch=BATCH), model, **training), "cuda")
    torch.testing.assert_close(found.loss, alone(model=model, **training).loss, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("kernels", WAYS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_within_its_rounding_of_fp32(precision: str, kernels: str, recompute: bool) -> None:
    supported(precision)
    layout = Layout(micro_batch=BATCH, precision=precision, kernels=kernels, recompute=recompute)
    found = train(tiny(layout), "cuda")
    torch.testing.assert_close(found.loss, alone().loss, rtol=4 * UNIT[precision], atol=0.0)


GRAPH_LAYOUTS = {
    "one micro-batch": Layout(micro_batch=BATCH, precision="bf16"),
    "two": Layout(micro_batch=BATCH // 2, global_batch=BATCH, precision="bf16"),
    "four, recomputed": Layout(micro_batch=BATCH // 4, global_batch=BATCH, precision="bf16", recompute=True),
    "scaled": Layout(micro_batch=BATCH // 4, global_batch=BATCH, precision="fp16"),
    "fp32 gradients": Layout(micro_batch=BATCH // 4, global_batch=BATCH, precision="bf16", grad_dtype="fp32"),
    "fused accumulation": Layout(
        micro_batch=BATCH // 4,
        global_batch=BATCH,
        precision="bf16",
        grad_dtype="fp32",
        kernels="megatron-2025",
    ),
    "reference": Layout(micro_batch=BATCH // 4, global_batch=BATCH, kernels="reference"),
    "unfused": Layout(micro_batch=BATCH // 2, global_batch=BATCH, kernels="unfused"),
    **{f"ZeRO {z}": Layout(micro_batch=BATCH // 4, global_batch=BATCH, zero=z) for z in (1, 2, 3)},
    "defragmented": Layout(micro_batch=BATCH // 4, global_batch=BATCH, zero=2, recompute=True, md=True),
}


@pytest.mark.parametrize("training", [{}, DROPOUT], ids=["", "dropout"])
@pytest.mark.parametrize("name", GRAPH_LAYOUTS)
def test_captured_micro_batches_train_like_eager_ones(name: str, training: dict[str, float]) -> None:
    layout = GRAPH_LAYOUTS[name]
    supported(layout.precision)
    eager, captured = (
        train(tiny(replace(layout, cuda_graphs=graphs), steps=5, **training), "cuda")
        for graphs in (False, True)
    )
    # Attention's backward adds in another order from run to run.
    torch.testing.assert_close(captured.loss, eager.loss, rtol=4 * UNIT[layout.precision], atol=0.0)
    torch.testing.assert_close(captured.norm, eager.norm, rtol=8 * UNIT[layout.precision], atol=0.0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_record_names_the_kernels(precision: str) -> None:
    """No operator falls back, and the reference calls none of ours."""
    supported(precision)
    seen = {}
    for kernels in ("fused", "reference"):
        layout = Layout(micro_batch=4, precision=precision, kernels=kernels)
        experiment = tiny(layout, steps=3, untimed_steps=1, **DROPOUT)
        run = ExperimentRun(
            experiment, meshes.single_rank_mesh(), torch.device("cuda"), lambda step, phase: None
        )
        run.prelude()
        run.steps(2)
        seen[kernels] = run.result().as_dict()["kernels"]
    assert seen["reference"] == {"every operator": ["torch: kernels = reference"]}
    assert {"adamw_", "norm_squared", "layer_norm", "bias_gelu_backward"} <= set(seen["fused"])
    assert all(hows == ["cuda"] for hows in seen["fused"].values())


def test_every_family_is_loaded_and_launched_nowhere_else() -> None:
    """What `repro doctor` calls the usual programs loads into this GPU."""
    from repro.kernels.cuda.device import cuda_launcher

    for family in FAMILIES.values():
        for program in family.examples():
            cuda_launcher(0).load(program)
