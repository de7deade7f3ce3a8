"""Tests of parameter counts against published counts, Megatron-LM's equation and torch's modules."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from repro.config import Model
from repro.config.models import load_model, model_names
from repro.model.counts import parameters_by_part, total_parameters


def test_gpt_parameters_are_equation_2_plus_the_final_norm() -> None:
    """P = 12 l h^2 (1 + 13/12h + (V+s)/12lh), 2104.04473 sec. 5, for GPT-2's layer with an MLP of width 4h."""
    for model in map(load_model, model_names()):
        if model.architecture == "gpt" and not model.ffn and not model.departures():
            layers, h = model.layers, model.hidden
            extra = Fraction(13, 12 * h) + Fraction(model.vocab + model.seq, 12 * layers * h)
            assert total_parameters(model) == 12 * layers * h**2 * (1 + extra) + 2 * h, model.name


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


@pytest.mark.parametrize(
    ("name", "published"),
    [
        # Billions as printed with more digits than in the names: MEG-README images/tables.tex; MEG2 Table 1; GPT3
        # Table D.1. tests/config/test_model_files.py compares the counts of all models with their names.
        *(("megatron-2020-1b", "1.16"), ("megatron-2020-2b", "2.03"), ("megatron-2020-4b", "4.24")),
        *(("megatron-2020-8b", "8.67"), ("megatron-1t", "1008.0"), ("megatron-175b", "174.6")),
        *(("yuan-1.0-245b", "245.7"), ("gpt3-175b", "174.6")),
    ],
)
def test_published_sizes_are_rounded_parameter_counts(name: str, published: str) -> None:
    decimals = len(published.partition(".")[2])
    assert f"{total_parameters(load_model(name)) / 1e9:.{decimals}f}" == published


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


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_of_other_released_checkpoints(name: str) -> None:
    assert total_parameters(load_model(name)) == RELEASED[name]


def test_parameters_of_released_bert_checkpoints() -> None:
    heads = ("word_head", "sentence_head")  # the released checkpoints do not contain the heads
    large = load_model("bert-large")
    base = replace(large, layers=12, hidden=768, heads=12)
    for model, released in ((large, 335_141_888), (base, 109_482_240)):
        parts = parameters_by_part(model)
        assert sum(parts.values()) - sum(parts[head] for head in heads) == released


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "heads", "head_dim", "released"),
    [
        (6, 512, 2048, 8, 64, 60_506_624),
        (12, 768, 3072, 12, 64, 222_903_552),
        (24, 1024, 16384, 32, 128, 2_851_598_336),
    ],
)
def test_parameters_of_released_t5_checkpoints(
    layers: int, hidden: int, ffn: int, heads: int, head_dim: int, released: int
) -> None:
    sizes = {"hidden": hidden, "ffn": ffn, "heads": heads, "head_dim": head_dim}
    model = replace(load_model("t5-11b"), layers=layers, decoder_layers=layers, **sizes)
    assert total_parameters(model) == released
