"""Tests of FLOP counts against Megatron-LM's equation, torch's counter and published throughputs."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from repro.config import ConfigError, Model
from repro.config.models import load_model
from repro.model.counts import hardware_flops, layers_forward, model_flops


@pytest.mark.parametrize("name", ["gpt2-1.5b", "megatron-2020-4b", "yuan-1.0-245b"])
def test_flop_counts_equal_the_papers_equation(name: str) -> None:
    model, samples = load_model(name), 24
    s, layers, h, v = model.seq, model.layers, model.hidden, model.vocab

    def equation(factor: int, logits: int) -> Fraction:
        sums = 1 + Fraction(s, 6 * h) + Fraction(v, logits * layers * h)
        return factor * samples * s * layers * h**2 * sums

    assert hardware_flops(model, s, samples, recompute=True) == equation(96, 16)
    assert hardware_flops(model, s, samples, recompute=False) == equation(72, 12)
    assert model_flops(model, s, samples) == equation(72, 12)


@pytest.mark.parametrize(("ffn", "head_dim"), [(0, 0), (80, 24)])
def test_torch_counts_the_same_flops(ffn: int, head_dim: int) -> None:
    model = Model(name="x", layers=3, hidden=64, heads=4, vocab=96, seq=32, ffn=ffn, head_dim=head_dim)
    samples, s, h, inner = 2, 20, model.hidden, model.heads * model.head_width
    shapes = [(h, 3 * inner), (inner, h), (h, model.ffn_width), (model.ffn_width, h)]
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        x = torch.empty(samples * s, h, requires_grad=True)
        for _ in range(model.layers):
            qkv, proj, up, down = (torch.empty(shape, requires_grad=True) for shape in shapes)
            heads = (part.reshape(samples, s, model.heads, -1) for part in (x @ qkv).chunk(3, -1))
            q, k, v = (part.transpose(1, 2) for part in heads)
            mixed = ((q @ k.mT) @ v).transpose(1, 2).reshape(samples * s, inner)
            x = mixed @ proj @ up @ down
        logits = x @ torch.empty(h, model.vocab, requires_grad=True)
        logits.sum().backward()
    assert counter.get_total_flops() == model_flops(model, s, samples)


def test_flops_of_grouped_query_attention_and_gated_mlp() -> None:
    """Llama 2 70B has q and output matrices, k and v matrices of 1/8 width, three MLP matrices and an LM head."""
    model = load_model("llama2-70b")
    h, f, s = 8192, 28672, 4096
    per_token = 2 * (2 * h * h + 2 * h * h // 8 + 3 * h * f) + 4 * s * h
    assert layers_forward(model, s, 3) == 80 * 3 * s * per_token
    assert model_flops(model, s, 3) == 3 * 3 * s * (80 * per_token + 2 * h * 32000)


@pytest.mark.parametrize(
    ("name", "samples_per_s", "teraflops"),
    [
        # claim ds-64gpu-table: printed samples/s on 64 GPUs, and TFLOP/s per GPU derived from them.
        ("deepspeed-1.5b", 128.56, 27.8),
        ("deepspeed-4b", 49.36, 28.2),
        ("deepspeed-8b", 24.57, 27.4),
        ("deepspeed-20b", 3.42, 8.9),
        ("deepspeed-1.5b", 151.35, 32.8),
        ("deepspeed-4b", 75.13, 42.9),
        ("deepspeed-8b", 43.52, 48.6),
        ("deepspeed-20b", 12.65, 32.9),
    ],
)
def test_flops_give_the_published_throughput(name: str, samples_per_s: float, teraflops: float) -> None:
    flops = hardware_flops(load_model(name), 1024, 1, recompute=True) * samples_per_s / 64
    assert flops / 1e12 == pytest.approx(teraflops, abs=0.06)


def test_flops_of_yuans_step_and_its_share_of_peak() -> None:
    layers = 4 * layers_forward(load_model("yuan-1.0-245b"), 2048, 3360)  # the source leaves the logits out
    assert f"{layers / 1e18:.2f}" == "13.76"
    assert f"{100 * layers / 46.20 / 2128 / 312e12:.2f}" == "44.85"


def test_only_gpt_models_have_flops() -> None:
    with pytest.raises(ConfigError, match="bert-large"):
        model_flops(load_model("bert-large"), 512, 1)
