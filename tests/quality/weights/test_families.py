"""Tests of small random models of each family: logits equal those of transformers, and exports are exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from repro.config import ConfigError, Layout, Training
from repro.config.models import load_model
from repro.model.counts import total_parameters
from repro.model.gpt import GPT, BatchPosition
from repro.parallel import mesh as meshes
from repro.quality.weights import open_weights
from repro.quality.weights.huggingface import export_huggingface, family_of_model
from repro.quality.weights.source import WeightSource
from tests.quality.weights.reference_weights import VOCAB, compare_ranges, gpt2, randomise, read_all

pytestmark = pytest.mark.xdist_group("ranks")
"""Group of tests that import transformers, which takes seconds."""
transformers = pytest.importorskip("transformers", reason="not installed: pip install -e '.[test]'")

SEQ = 24
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
LLAMA = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, **ENDS}
LLAMA |= {"num_attention_heads": 4, "max_position_embeddings": SEQ}
ROTARY = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
NEOX = {**LLAMA, "rope_parameters": ROTARY}
FALCON = {**LLAMA, "num_kv_heads": 2, "ffn_hidden_size": 128}
BLOOM = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 6, **ENDS}
"""Configuration with six heads, because ALiBi has another rule of slopes if their number is no power of two."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**LLAMA, "num_key_value_heads": 2, "rms_norm_eps": 1e-3}),
    "llama-all-keys": ("Llama", {**LLAMA, "num_key_value_heads": 4, "head_dim": 6}),
    "mistral": ("Mistral", {**LLAMA, "num_key_value_heads": 1, "sliding_window": None}),
    "qwen2": ("Qwen2", {**LLAMA, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "neox": ("GPTNeoX", NEOX),
    "neox-sequential": ("GPTNeoX", {**NEOX, "use_parallel_residual": False, "hidden_act": "gelu_new"}),
    "bloom": ("Bloom", BLOOM),
    "falcon": ("Falcon", {**FALCON, "multi_query": True}),
    "falcon-40b": ("Falcon", {**FALCON, "new_decoder_architecture": True}),
}


def random_model(name: str) -> Any:
    """Return a model with random parameters, including biases and norms."""
    if name == "gpt2":
        return gpt2(n_positions=SEQ)
    kind, config = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**config)
    return randomise(getattr(transformers, f"{kind}ForCausalLM")(config))


def native_logits(source: WeightSource, tokens: Tensor) -> Tensor:
    module = GPT(source.model, Layout(), Training(), meshes.single_rank_mesh().tp).requires_grad_(False)
    owners = dict(module.named_modules())
    for name, value in read_all(source).items():
        owner, _, short = name.rpartition(".")
        owners[owner]._parameters[short] = torch.nn.Parameter(value, requires_grad=False)
    if source.model.tied:
        module.head.tokens = module.embed.tokens
    module.head.of_logits = lambda logits, targets: logits
    x = module.hidden(tokens, tokens.shape[1], BatchPosition(0, 0))
    return module.head(x, tokens).view(*tokens.shape, -1)


@pytest.mark.parametrize("name", ["gpt2", *MODELS])
def test_logits_equal_those_of_transformers_after_import_and_export(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    tokens = torch.randint(VOCAB, (3, SEQ), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(tokens).logits
    model.save_pretrained(tmp_path / "theirs")
    source = open_weights(tmp_path / "theirs")
    source.check()
    assert expected.std() > 0.3, "equal logits would prove little"
    torch.testing.assert_close(native_logits(source, tokens), expected, rtol=1e-5, atol=1e-5)
    written = export_huggingface(source, tmp_path / "ours", shard_bytes=20_000)
    files = [path.name for path in written if path.suffix == ".safetensors"]
    count = len(files)
    assert count > 1
    assert files == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)], "usual names"
    reloaded, loading_info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(loading_info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(reloaded.eval()(tokens).logits, expected, rtol=1e-6, atol=1e-6)
    exported = read_all(open_weights(tmp_path / "ours"))
    for key, value in read_all(source).items():
        assert torch.equal(exported[key], value), key


@pytest.mark.parametrize("name", ["falcon-7b", "falcon-40b", "bloom-176b", "gpt-neox-20b", "qwen2.5-7b"])
def test_transformers_has_an_equal_number_of_parameters(name: str) -> None:
    model = load_model(name)
    family = family_of_model(model)
    assert family is not None
    document = family.document(model, model.vocab)
    config = transformers.AutoConfig.for_model(document.pop("model_type"), **document)
    with torch.device("meta"):
        model_of_transformers = transformers.AutoModelForCausalLM.from_config(config)
    model_of_transformers.tie_weights()
    assert sum(p.numel() for p in model_of_transformers.parameters()) == total_parameters(model)


@pytest.mark.parametrize("name", ["llama", "falcon-40b", "neox"])
def test_rank_reads_any_range_of_its_shard(name: str, tmp_path: Path) -> None:
    random_model(name).save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    for ranks in (2, 4):
        compare_ranges(source, read_all(source), ranks)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "rope_type = 'llama3': must be default"),
        ("llama", {"attention_bias": True}, "attention_bias = true: must be False"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = true: must be false, since"),
        ("falcon", {"alibi": True}, "alibi = true: must be False"),
        ("falcon", {"parallel_attn": False}, "parallel_attn = false: must be True"),
        ("neox", {"hidden_act": "relu"}, "hidden_act = 'relu': must be one of gelu_new"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = false: must be True"),
        ("bloom", {"model_type": "opt"}, "model_type = 'opt': must be one of gpt2, llama, qwen2, gpt_neox,"),
        ("bloom", {"n_layer": None}, "n_layer: is missing; configurations of the model family BLOOM need"),
    ],
)
def test_unsupported_configuration_is_refused_in_one_line(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    random_model(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=message) as error:
        open_weights(tmp_path)
    assert "\n" not in str(error.value)
    assert "config.json" in str(error.value)


def test_export_of_a_layer_without_a_family_is_refused(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    source.model = type(source.model)(**{**vars(source.model), "positions": "alibi", "rotary_base": 10000.0})
    message = r"no supported model family of transformers has layers with .*positions = alibi"
    with pytest.raises(ConfigError, match=message):
        export_huggingface(source, tmp_path / "out")
