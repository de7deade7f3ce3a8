"""Tests of a complete training step with the CUDA sources on the CPU: no operator falls back to torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.kernels.cuda import device
from tests.kernels.bindings import BINDINGS, Binding, registered_for_cpu
from tests.kernels.on_cpu import Host
from tests.parallel.test_architectures import FAMILIES
from tests.training import TINY, tiny, train

SMALL = replace(TINY, name="two", layers=2)
SCORES = {"causal_softmax", "causal_softmax_backward"}
"""Operators that only the operator set `softmax` calls."""
GPT2 = {"layer_norm", "layer_norm_backward", "bias_gelu", "bias_gelu_backward"}
LLAMA = {"rms_norm", "rms_norm_backward", "swiglu", "swiglu_backward", "rotary"}


@pytest.fixture
def sources(session_host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the CUDA bindings for tensors on the CPU; a fallback is an error."""
    session_host.reversed = False
    monkeypatch.setattr(device, "_ran", Counter())
    monkeypatch.setattr(device, "_reported_reasons", set())
    monkeypatch.setattr(device, "cuda_launcher", lambda index: session_host)

    def dispatched(name: str, binding: Binding) -> Callable[..., Any]:
        return device.cuda_dispatcher(name, binding, lambda *_: pytest.fail("torch's operators ran"))

    with registered_for_cpu(dispatched):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "kernels", "layer"),
    [("fp16", "fused", GPT2), ("bf16", "softmax", GPT2), ("bf16", "fused", LLAMA)],
    ids=["fp16", "bf16-softmax", "bf16-llama"],
)
def test_cuda_sources_train_like_torch_operators(
    precision: str, kernels: str, layer: set[str], request: pytest.FixtureRequest
) -> None:
    """The steps have loss scaling, clipping, dropout and recomputation; losses agree within a few roundings."""
    layout = Layout(micro_batch=2, global_batch=4, precision=precision, kernels=kernels, recompute=True)
    dropouts = {"dropout": 0.1, "attention_dropout": 0.1 if kernels == "softmax" else 0.0}
    model = SMALL if layer is GPT2 else FAMILIES["llama"]
    experiment = tiny(layout, model, steps=4, **dropouts)
    expected = train(experiment)
    request.getfixturevalue("sources")
    found = train(experiment)
    ran = device.ran()
    others = (GPT2 | LLAMA) - layer | (SCORES if kernels == "fused" else set())
    # Sums over rows of a CPU tensor are computed by torch.
    assert {name for name, _ in ran} == set(BINDINGS) - others - {"sum_rows"}
    assert {how for _, how in ran} == {"cuda"}
    unit = {"bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    torch.testing.assert_close(found.loss, expected.loss, rtol=4 * unit, atol=0.0)
    torch.testing.assert_close(found.norm, expected.norm, rtol=40 * unit, atol=0.0)
