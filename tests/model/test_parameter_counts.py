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

GPTS = [
    n
    for n in model_names()
    if (m := load_model(n)).architecture == "gpt" and not m.ffn and not m.departures()
]
"""Models with GPT-2's layer and an MLP of width 4h, as in the equation."""


def equation_2(model: Model) -> Fraction:
    """Return P = 12 l h^2 (1 + 13/12h + (V+s)/12lh), 2104.04473 sec. 5."""
    layers, h = model.layers, model.hidden
    extra = Fraction(13, 12 * h) + Fraction(model.vocab + model.seq, 12 * layers * h)
    return 12 * layers * h**2 * (1 + extra)


def test_gpt_parameters_are_equation_2_plus_the_final_norm() -> None:
    for model in map(load_model, GPTS):
        assert total_parameters(model) == equation_2(model) + 2 * model.hidden, model.name


@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 4),
    width=st.integers(1, 8),
    ffn=st.integers(1, 64),
    vocab=st.integers(1, 50),
    seq=st.integers(1, 20),
)
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
        # Billions as printed: MEG1 Tables 1, 2; MEG-README images/tables.tex; MEG2 Table 1; GPT3 Table D.1.
        ("megatron-1.2b", "1.2"),
        ("megatron-2.5b", "2.5"),
        ("megatron-4.2b", "4.2"),
        ("megatron-8.3b", "8.3"),
        ("megatron-8.3b-h24", "8.3"),
        ("megatron-2020-1b", "1.16"),
        ("megatron-2020-2b", "2.03"),
        ("megatron-2020-4b", "4.24"),
        ("megatron-2020-8b", "8.67"),
        ("megatron-1.7b", "1.7"),
        ("megatron-3.6b", "3.6"),
        ("megatron-7.5b", "7.5"),
        ("megatron-18.4b", "18.4"),
        ("megatron-39.1b", "39.1"),
        ("megatron-76.1b", "76.1"),
        ("megatron-145.6b", "145.6"),
        ("megatron-310.1b", "310.1"),
        ("megatron-529.6b", "529.6"),
        ("megatron-1t", "1008.0"),
        ("megatron-91b", "91"),
        ("gpt3-175b", "174.6"),
        ("megatron-175b", "174.6"),
        ("yuan-1.0-245b", "245.7"),
        ("turing-nlg-17b", "17"),
        ("zero-1.16b", "1.16"),
        ("zero-40b", "40"),
        ("zero-60b", "60"),
        ("deepspeed-20b", "20"),
    ],
)
def test_published_sizes_are_rounded_parameter_counts(name: str, published: str) -> None:
    decimals = len(published.partition(".")[2])
    assert f"{total_parameters(load_model(name)) / 1e9:.{decimals}f}" == published


def test_published_1_38b_model_has_1_21b_parameters() -> None:
    model = load_model("zero-1.38b")
    assert f"{total_parameters(model) / 1e9:.2f}" == "1.21"
    assert "1.21B" in model.note
    assert model.published_name == "1.38B"


@pytest.mark.parametrize(("layers", "printed"), [(88, 40), (132, 60)])
def test_hidden_size_4096_of_table_4_contradicts_its_parameters(layers: int, printed: int) -> None:
    right = load_model(f"zero-{printed}b")
    wrong = replace(right, hidden=4096)
    assert right.layers == layers
    assert round(total_parameters(right) / 1e9) == printed
    assert total_parameters(wrong) < 0.5 * printed * 1e9


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "released"),
    [
        # Parameters of the released checkpoints gpt2, gpt2-medium, gpt2-large and gpt2-xl.
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),
        (36, 1280, 20, 774_030_080),
        (48, 1600, 25, 1_557_611_200),
    ],
)
def test_parameters_of_released_gpt2_checkpoints(layers: int, hidden: int, heads: int, released: int) -> None:
    model = Model(name="gpt2", layers=layers, hidden=hidden, heads=heads, vocab=50257, seq=1024)
    assert total_parameters(model) == released
    if layers == 48:
        assert total_parameters(load_model("gpt2-1.5b")) == released


RELEASED = {
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
}


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_of_other_released_checkpoints(name: str) -> None:
    assert total_parameters(load_model(name)) == RELEASED[name]


def test_parameters_of_released_bert_checkpoints() -> None:
    heads = ("word_head", "sentence_head")  # the released checkpoints do not contain the heads
    large = parameters_by_part(load_model("bert-large"))
    assert sum(large.values()) - sum(large[part] for part in heads) == 335_141_888
    base = replace(load_model("bert-large"), layers=12, hidden=768, heads=12)
    assert total_parameters(base) - sum(parameters_by_part(base)[part] for part in heads) == 109_482_240


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "heads", "head_dim", "released"),
    [
        (6, 512, 2048, 8, 64, 60_506_624),
        (12, 768, 3072, 12, 64, 222_903_552),
        (24, 1024, 4096, 16, 64, 737_668_096),
        (24, 1024, 16384, 32, 128, 2_851_598_336),
        (24, 1024, 65536, 128, 128, 11_307_321_344),
    ],
)
def test_parameters_of_released_t5_checkpoints(
    layers: int, hidden: int, ffn: int, heads: int, head_dim: int, released: int
) -> None:
    model = replace(
        load_model("t5-11b"),
        layers=layers,
        decoder_layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        head_dim=head_dim,
    )
    assert total_parameters(model) == released
    if ffn == 65536:
        assert model == load_model("t5-11b")
