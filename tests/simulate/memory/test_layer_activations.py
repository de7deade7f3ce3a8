"""Tests of the activations that one layer retains: a trace against the closed forms of 2205.05198, to the byte.

Each difference is one saved tensor: the statistics of a layer norm, or a dropout mask that is recomputed.
"""

from __future__ import annotations

from typing import Any

import pytest

from repro.claims.formulas import layer_activation_bytes
from repro.config import Layout, Model
from repro.simulate.memory.live_bytes import LiveBytes, measure_live_bytes
from repro.simulate.trace.roles import roles, trace
from tests.training import tiny

KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "eq1": (1, {}),
    "eq2": (2, {}),
    "eq4": (2, {"sp": True}),
    "selective": (1, {"recompute": "selective"}),
    "selective-tp": (2, {"recompute": "selective"}),
    "eq6": (4, {"recompute": "selective", "sp": True}),
}


def retained(layers: int, b: int, s: int, h: int, a: int, keys: dict[str, Any]) -> int:
    """Return the peak of activations and checkpoints of all layers, the embedding and the head."""
    model = Model(name="m", layers=layers, hidden=h, heads=a, vocab=256, seq=s)
    layout = Layout(**{"precision": "fp16", "kernels": "softmax", "micro_batch": b, **keys})
    experiment = tiny(layout, model, dropout=0.1, attention_dropout=0.1)
    most = measure_live_bytes(trace(experiment, roles(experiment)[0]).events).most
    return most["activations"] + most["checkpoints"]


def layer_bytes(*sizes: int, **keys: Any) -> int:
    return retained(5, *sizes, keys) - retained(4, *sizes, keys)


@pytest.mark.parametrize(
    ("kernels", "b", "s", "h", "a"), [("softmax", 1, 64, 64, 16), ("unfused", 2, 128, 96, 8)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_retains_the_papers_bytes_without_masks(
    kind: str, kernels: str, b: int, s: int, h: int, a: int
) -> None:
    tp, keys = KINDS[kind]
    selective, sp = keys.get("recompute") == "selective", bool(keys.get("sp"))
    paper = layer_activation_bytes(b, s, h, a, tp, sp=sp, selective=selective)
    split = tp if sp else 1
    # The paper counts one byte per element of each mask; dropout here computes its mask from a key.
    masks_of_both_branches = 2 * s * b * h // split
    mask_of_scores = 0 if selective else a * s * s * b // tp
    # Both norms retain mean and inverse deviation of each token in fp32, which the paper neglects.
    statistics = 2 * 2 * 4 * s * b // split
    found = layer_bytes(b, s, h, a, tp=tp, kernels=kernels, **keys)
    assert found - paper == statistics - masks_of_both_branches - mask_of_scores


SIZES = {"hidden": 64, "heads": 8, "kv_heads": 4, "ffn": 160, "vocab": 256, "seq": 128}
LLAMA = {"norm": "rms", "positions": "rotary", "mlp": "swiglu", "biases": "none", "tied": False} | SIZES


def megatron_core(layers: int, tp: int, kernels: str = "megatron-2025") -> LiveBytes:
    """Return the live bytes of a traced step of Llama layers with the operators of Megatron-core."""
    model = Model(name="m", layers=layers, **LLAMA)
    keys: dict[str, Any] = {"precision": "bf16", "grad_dtype": "fp32", "zero": 1, "overlap": False}
    layout = Layout(kernels=kernels, tp=tp, sp=tp > 1, micro_batch=1, **keys)
    experiment = tiny(layout, model, dropout=0, attention_dropout=0)
    return LiveBytes(trace(experiment, roles(experiment)[0]).events)


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_core_layers_retain_the_tensors_of_transformer_engine(tp: int) -> None:
    """Transformer Engine 2.11 saves these tensors (module/layernorm_linear.py, attention, Megatron's fused SwiGLU)."""
    s, h, d, f = 128, 64, 8, 160
    inputs_and_normalised = 2 * 2 * s * h // tp
    queries_keys_values_result = s * (8 + 4 + 4 + 8) * d // tp
    gate_up_and_product = s * 3 * f // tp
    log_sums, deviations = 4 * 8 * s // tp, 2 * 4 * s // tp
    expected = 2 * (inputs_and_normalised + queries_keys_values_result + gate_up_and_product)
    found = megatron_core(3, tp).most["activations"] - megatron_core(2, tp).most["activations"]
    random_state = 3 * 8  # of torch's fused attention
    assert found == expected + log_sums + deviations + random_state


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_core_retains_one_dummy_gradient_per_shape(tp: int) -> None:
    """`get_dummy_wgrad` stores one 16-bit tensor for each shape, whatever the number of layers."""
    h, inner, keys_and_values, f, vocab = 64, 64, 2 * 32, 160, 256
    shapes = {(inner + keys_and_values) * h, h * inner, 2 * f * h, h * f, vocab * h}
    retained = [megatron_core(2, tp, kernels).after(-1)["other"] for kernels in ("megatron-2025", "fused")]
    assert retained[0] - retained[1] == 2 * sum(shapes) // tp


@pytest.mark.parametrize(("tp", "copies"), [(1, 3), (2, 4)])
def test_the_torchtitan_loss_has_fp32_copies_of_all_logits(tp: int, copies: int) -> None:
    """log_softmax's backward has three: its result, the gradient of the result, and the gradient of the logits.

    torch's `loss_parallel` has four: the result, the gradient, exp(result), and their sum or product.
    """
    keys: dict[str, Any] = {"kernels": "torchtitan-2024", "precision": "bf16", "micro_batch": 1}
    layout = Layout(tp=tp, sp=tp > 1, **keys)
    found = []
    for vocab in (16384, 32768):
        experiment = tiny(layout, Model(name="m", layers=2, **{**LLAMA, "vocab": vocab}))
        found.append(measure_live_bytes(trace(experiment, roles(experiment)[0]).events).by_category)
    temporary = [peak["activations"] + peak["other"] for peak in found]
    assert temporary[1] - temporary[0] == 4 * copies * LLAMA["seq"] * 16384 // tp


def test_a_checkpointed_layer_retains_only_its_input() -> None:
    """The input has the paper's 2 s b h bytes, also under tensor parallelism. Sequence parallelism splits it."""
    b, s, h, _ = sizes = 2, 128, 96, 8
    assert layer_bytes(*sizes, tp=2, recompute="block") == 2 * s * b * h
    assert layer_bytes(*sizes, tp=2, sp=True, recompute="block") == 2 * s * b * h // 2


def test_an_unfused_softmax_retains_fp32_scores_and_a_mask() -> None:
    """Two heads of one sample per rank are no multiple of four, so the softmax runs in fp32 with a mask tensor."""
    b, s, h, a, tp = 1, 64, 64, 4, 2
    scores = a * s * s * b // tp
    difference = layer_bytes(b, s, h, a, tp=tp) - layer_activation_bytes(b, s, h, a, tp)
    fp32_excess, mask_of_future = (4 - 2) * scores, s * s
    assert difference == fp32_excess + mask_of_future - scores - 2 * s * b * h + 2 * 2 * 4 * s * b
    paper = layer_activation_bytes(b, s, h, a, tp, selective=1)
    assert layer_bytes(b, s, h, a, tp=tp, recompute="selective") - paper == -2 * s * b * h + 16 * s * b
