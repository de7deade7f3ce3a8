"""Tests of imported and exported weights against transformers."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from repro.cli import main
from repro.config import ConfigError, Experiment, Model
from repro.quality.weights import open_weights
from repro.quality.weights.huggingface import export_huggingface
from tests.engines.native.checkpoint.saved import HALF, LAYOUTS, checkpoint, experiment, start
from tests.pool import RankPool
from tests.quality.weights.reference_weights import (
    HEADS,
    HIDDEN,
    LAYERS,
    VOCAB,
    clone_tensors,
    compare_ranges,
    gpt2,
    megatron_ranks,
    read_all,
    save_megatron,
)
from tests.training import whole_parameters

pytestmark = pytest.mark.xdist_group("ranks")
"""Group of tests that import transformers, which takes seconds."""
transformers = pytest.importorskip("transformers", reason="not installed: pip install -e '.[test]'")


def compare(folder: Path, expected: dict[str, Tensor], model: Model | None = None) -> None:
    source = open_weights(folder, model)
    source.check()
    found = read_all(source)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def model() -> Any:
    return gpt2()


@pytest.fixture(scope="module")
def native(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Return the native parameters of `model`, whose logits `test_families.py` compares with transformers."""
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return read_all(open_weights(folder))


@pytest.mark.parametrize("zipped", [True, False])
def test_old_torch_files_with_causal_masks_are_read(
    model: Any, native: dict[str, Tensor], tmp_path: Path, zipped: bool
) -> None:
    """GPT-2's files on the hub have no prefix, contain causal masks, and use the format of 2019."""
    model.config.save_pretrained(tmp_path)
    state = {name.removeprefix("transformer."): value for name, value in model.state_dict().items()}
    state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 4, 4) for i in range(LAYERS)}
    file_of = {}
    for number in (0, 1):
        part = {name: state[name] for name in sorted(state)[number::2]}
        file = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        torch.save(part, tmp_path / file, _use_new_zipfile_serialization=zipped)
        file_of |= dict.fromkeys(part, file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": file_of}))
    compare(tmp_path, native)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_converted_exactly(
    native: dict[str, Tensor], tmp_path: Path, dtype: torch.dtype
) -> None:
    gpt2().to(dtype).save_pretrained(tmp_path)
    rounded = {name: value.to(dtype).float() for name, value in native.items()}
    compare(tmp_path, rounded)


@pytest.mark.parametrize(
    ("tp", "pp", "version", "chunks"),
    [(2, 1, 0, 1), (2, 1, 1.0, 1), (2, 1, 2.0, 1), (2, 2, 3.0, 1), (1, 2, 3.0, 2)],
)
def test_megatron_ranks_are_merged(
    model: Any, native: dict[str, Tensor], tmp_path: Path, tp: int, pp: int, version: float, chunks: int
) -> None:
    save_megatron(tmp_path, megatron_ranks(model, tp, pp, version, chunks), version)
    compare(tmp_path, native)
    compare(tmp_path / "iter_0000100", native)


class DynamicLossScaler:
    """The class `fp16.loss_scaler.DynamicLossScaler`, which the oldest checkpoints contain."""

    def __init__(self) -> None:
        self.cur_scale = 2.0**16


@pytest.mark.parametrize("zipped", [True, False])
def test_training_state_in_megatron_checkpoints_is_ignored(
    model: Any, native: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    """The checkpoint has a loss scaler, random states, flat names of 2019, and no arguments: --model is needed."""
    (state,) = megatron_ranks(model, 1, 1, 0).values()
    language = state["model"]["language_model"]
    flat = {f"transformer.{name}": value for name, value in language["transformer"].items()}
    flat |= {f"{name}.weight": value["weight"] for name, value in language["embedding"].items()}
    DynamicLossScaler.__module__ = "fp16.loss_scaler"
    module = types.SimpleNamespace(DynamicLossScaler=DynamicLossScaler)
    monkeypatch.setitem(sys.modules, "fp16", types.ModuleType("fp16"))
    monkeypatch.setitem(sys.modules, "fp16.loss_scaler", module)
    content = {
        "iteration": 7,
        "model": clone_tensors(flat),
        "optimizer": {"loss_scaler": DynamicLossScaler(), "overflow": False},
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    path = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir()
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"heads: is unknown: .* --model"):
        open_weights(tmp_path)
    sizes = Model(name="like", layers=LAYERS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq=12)
    compare(tmp_path, native, sizes)


class Malicious:
    """An object whose pickle calls a function."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/evil",)


@pytest.mark.parametrize("zipped", [True, False])
def test_file_that_calls_a_function_is_refused(tmp_path: Path, model: Any, zipped: bool) -> None:
    model.config.save_pretrained(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save({"wte.weight": Malicious()}, path, _use_new_zipfile_serialization=zipped)
    message = r"must contain only tensors and plain values; loading this file would call posix\.mkdir"
    with pytest.raises(ConfigError, match=message) as error:
        open_weights(tmp_path)
    assert "\n" not in str(error.value)
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ConfigError, match="not weights"):
        open_weights(tmp_path)


def test_unexpected_tensor_is_refused_in_one_line(model: Any, tmp_path: Path) -> None:
    for name, change, expected_message in (
        ("transformer.h.1.mlp.c_fc.weight", lambda value: None, r"missing tensor h\.1\.mlp\.c_fc\.weight"),
        ("transformer.h.9.ln_1.bias", lambda value: torch.zeros(3), r"unknown tensor h\.9\.ln_1\.bias"),
        (
            "transformer.wpe.weight",
            lambda value: value[1:],
            r"wpe\.weight has shape \[11, 24\] and must have shape \[",
        ),
        ("lm_head.weight", lambda value: value + 1, "lm_head.weight: output matrix differs from the token"),
    ):
        model.config.save_pretrained(tmp_path)
        state = model.state_dict()
        state[name] = change(state.get(name))
        present = {name: value for name, value in state.items() if value is not None}
        torch.save(present, tmp_path / "pytorch_model.bin")
        with pytest.raises(ConfigError, match=expected_message) as error:
            open_weights(tmp_path).check()
        assert "\n" not in str(error.value)


def test_ranks_of_different_models_are_refused(model: Any, tmp_path: Path) -> None:
    ranks = megatron_ranks(model, 2, 1, 3.0)
    ranks[1, 0] = clone_tensors(ranks[1, 0])
    ranks[1, 0]["model"]["language_model"]["transformer"]["layers.0.input_layernorm.bias"][0] += 1
    save_megatron(tmp_path, ranks, 3.0)
    message = (
        r"mp_rank_01: layers\.0\.input_layernorm\.bias: is replicated, but differs from its copy in mp_rank_0"
    )
    with pytest.raises(ConfigError, match=message):
        open_weights(tmp_path).check()
    tokens = ranks[1, 0]["model"]["language_model"]["embedding"]["word_embeddings"]
    tokens["weight"] = tokens["weight"][:-1]
    save_megatron(tmp_path / "uneven", ranks, 3.0)
    # The two ranks have 89 rows, an odd number.
    with pytest.raises(ConfigError, match=r"mp_rank_00: .*must have shape \[44, 24\]"):
        open_weights(tmp_path / "uneven")
    (tmp_path / "iter_0000100" / "mp_rank_00" / "model_optim_rng.pt").rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"must be in mp_rank_00"):
        open_weights(tmp_path)


def test_unsupported_megatron_model_and_unknown_folder_are_refused(model: Any, tmp_path: Path) -> None:
    for name, setting, message in (
        ("bias_gelu_fusion", False, "GELU by the tanh approximation"),
        ("untie_embeddings_and_output_weights", True, "untie_embeddings_and_output_weights"),
        ("layernorm_epsilon", 1e-6, "layernorm_epsilon"),
    ):
        args = argparse.Namespace(num_attention_heads=HEADS, **{name: setting})
        save_megatron(tmp_path / name, megatron_ranks(model, 1, 1, 3.0), 3.0, args=args)
        with pytest.raises(ConfigError, match=message):
            open_weights(tmp_path / name)
    message = r"must be a folder of Hugging Face transformers .* Megatron-LM .* `repro run`"
    with pytest.raises(ConfigError, match=message):
        open_weights(tmp_path)


def train_to_checkpoint(trained: Experiment, root: Path) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    run = start(trained, root)
    run.prelude()
    run.steps(HALF - run.index)
    run.engine.synchronize()
    return whole_parameters(run.engine, run.mesh.tp)


@pytest.mark.parametrize("layout", ["tp2", "dp2-z3"])
def test_native_checkpoints_of_any_layout_are_exported(two: RankPool, tmp_path: Path, layout: str) -> None:
    """The folder of one step and the folder of all steps are read; transformers loads the export."""
    trained = experiment(LAYOUTS[layout])
    expected = two.run(train_to_checkpoint, trained, tmp_path)[0]
    folder = checkpoint(tmp_path, trained)
    source = open_weights(folder)
    compare(folder, expected)
    compare(folder.parent, expected)
    compare_ranges(source, expected, 2)
    written = export_huggingface(source, tmp_path / "out")
    assert [path.name for path in written if path.suffix == ".safetensors"] == ["model.safetensors"]
    compare(tmp_path / "out", expected)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert loaded.config.eos_token_id == loaded.config.vocab_size - 1


def test_rank_reads_any_range_of_its_shard(model: Any, native: dict[str, Tensor], tmp_path: Path) -> None:
    """Each tp rank reads ranges of its shard from files of two ranks."""
    save_megatron(tmp_path, megatron_ranks(model, 2, 1, 2.0), 2.0)
    for ranks in (1, 2):
        compare_ranges(open_weights(tmp_path), native, ranks)


def test_export_omits_the_padding_of_the_vocabulary(
    model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs)
    assert main(["export-weights", "--weights", str(theirs), "--output", str(ours), "--vocab", "70"]) == 0
    assert "config.json" in capsys.readouterr().out
    loaded = transformers.GPT2LMHeadModel.from_pretrained(ours)
    assert torch.equal(loaded.transformer.wte.weight, model.transformer.wte.weight[:70])
    assert main(["export-weights", "--weights", str(theirs), "--output", str(ours), "--vocab", "91"]) == 2
    assert "--vocab = 91: must be 1 to 90" in capsys.readouterr().err
    assert main(["export-weights", "--weights", str(tmp_path / "none"), "--output", str(ours)]) == 2
