"""Tests of parameters, model-state bytes and FLOP against published counts, their equations, and torch."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from repro.config import ConfigError, Model
from repro.config.models import load_model
from repro.model.counts import (
    hardware_flops,
    layers_forward,
    model_flops,
    parameters_by_part,
    states_bytes,
    total_parameters,
)


@given(*(st.integers(1, most) for most in (3, 4, 8, 64, 50, 20)))
@settings(max_examples=30)
def test_gpt_parameters_equal_those_of_torch_modules(
    layers: int, heads: int, width: int, ffn: int, vocab: int, seq: int
) -> None:
    h = heads * width
    model = Model(name="any", layers=layers, hidden=h, heads=heads, vocab=vocab, seq=seq, ffn=ffn)
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(h, heads, ffn, norm_first=True)
        parts = [nn.Embedding(vocab, h), nn.Embedding(seq, h), nn.LayerNorm(h)]
    blocks = layers * sum(p.numel() for p in layer.parameters())
    assert total_parameters(model) == blocks + sum(p.numel() for part in parts for p in part.parameters())


RELEASED = {
    "gpt2-1.5b": 1_557_611_200,
    # Elements of the released tensors, from the model pages on huggingface.co; of BLOOM and GPT-NeoX, from the cards.
    # tests/quality/weights/test_families.py tests Falcon.
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "gpt-neox-20b": 20_554_567_680,
    "bloom-176b": 176_247_271_424,
    "t5-11b": 11_307_321_344,
}


def test_parameters_equal_released_checkpoints_and_published_sizes() -> None:
    assert {name: total_parameters(load_model(name)) for name in RELEASED} == RELEASED
    # Billions as printed with more digits than in the names: MEG-README images/tables.tex; MEG2 Table 1; GPT3
    # Table D.1. tests/config/test_model_files.py compares the counts of all models with their names.
    for name, published in (
        *(("megatron-2020-1b", "1.16"), ("megatron-2020-2b", "2.03"), ("megatron-2020-4b", "4.24")),
        *(("megatron-2020-8b", "8.67"), ("megatron-1t", "1008.0"), ("megatron-175b", "174.6")),
        *(("yuan-1.0-245b", "245.7"), ("gpt3-175b", "174.6")),
    ):
        decimals = len(published.partition(".")[2])
        assert f"{total_parameters(load_model(name)) / 1e9:.{decimals}f}" == published, name


def test_parameters_of_released_bert_checkpoints() -> None:
    heads = ("word_head", "sentence_head")  # the released checkpoints do not contain the heads
    large = load_model("bert-large")
    base = replace(large, layers=12, hidden=768, heads=12)
    for model, released in ((large, 335_141_888), (base, 109_482_240)):
        parts = parameters_by_part(model)
        assert sum(parts.values()) - sum(parts[head] for head in heads) == released


def test_parameters_of_released_t5_checkpoints() -> None:
    for layers, hidden, ffn, heads, head_dim, released in (
        (6, 512, 2048, 8, 64, 60_506_624),
        (12, 768, 3072, 12, 64, 222_903_552),
        (24, 1024, 16384, 32, 128, 2_851_598_336),
    ):
        sizes = {"hidden": hidden, "ffn": ffn, "heads": heads, "head_dim": head_dim}
        model = replace(load_model("t5-11b"), layers=layers, decoder_layers=layers, **sizes)
        assert total_parameters(model) == released


TABLE_1 = {  # 1910.02054v3 p. 11, Nd: GB as printed for 7.5B, 128B and 1T parameters with stages 1, 2 and 3
    1: "120 120 120 2048 2048 2048 16000 16000 16000",
    4: "52.5 41.3 30 896 704 512 7000 5500 4000",
    16: "35.6 21.6 7.5 608 368 128 4750 2875 1000",
    64: "31.4 16.6 1.88 536 284 32 4187 2218 250",
    256: "30.4 15.4 0.47 518 263 8 4046 2054 62.5",
    1024: "30.1 15.1 0.12 513 257 2 4011 2013 15.6",
}


@pytest.mark.parametrize("nd", TABLE_1)
def test_model_states_equal_table_1_rounded_or_truncated(nd: int) -> None:
    columns = [(psi, stage) for psi in (7_500_000_000, 128 * 10**9, 10**12) for stage in (1, 2, 3)]
    for (psi, stage), printed in zip(columns, TABLE_1[nd].split(), strict=True):
        scale = 10 ** len(printed.partition(".")[2])
        exact = states_bytes(psi, nd, stage) / 1e9 * scale
        assert round(float(printed) * scale) in (math.floor(exact), math.ceil(exact)), (psi, stage)


def test_model_states_equal_figure_1() -> None:
    sizes = [states_bytes(7_500_000_000, 64, stage) / 1e9 for stage in range(4)]
    assert [f"{size:.1f}" for size in sizes] == ["120.0", "31.4", "16.6", "1.9"]


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


def test_flops_give_the_published_throughput() -> None:
    """Claim ds-64gpu-table has printed samples/s on 64 GPUs, and TFLOP/s per GPU derived from them."""
    for name, samples_per_s, teraflops in (
        *(("deepspeed-1.5b", 128.56, 27.8), ("deepspeed-4b", 49.36, 28.2)),
        *(("deepspeed-8b", 24.57, 27.4), ("deepspeed-20b", 3.42, 8.9)),
        *(("deepspeed-1.5b", 151.35, 32.8), ("deepspeed-4b", 75.13, 42.9)),
        *(("deepspeed-8b", 43.52, 48.6), ("deepspeed-20b", 12.65, 32.9)),
    ):
        flops = hardware_flops(load_model(name), 1024, 1, recompute=True) * samples_per_s / 64
        assert flops / 1e12 == pytest.approx(teraflops, abs=0.06), name


def test_flops_of_yuans_step_and_its_share_of_peak() -> None:
    layers = 4 * layers_forward(load_model("yuan-1.0-245b"), 2048, 3360)  # the source leaves the logits out
    assert f"{layers / 1e18:.2f}" == "13.76"
    assert f"{100 * layers / 46.20 / 2128 / 312e12:.2f}" == "44.85"


def test_only_gpt_models_have_flops() -> None:
    with pytest.raises(ConfigError, match="bert-large"):
        model_flops(load_model("bert-large"), 512, 1)
