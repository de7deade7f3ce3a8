"""Hugging Face's GPT-2: which tensor of its folder is which parameter of ours, there and back.

Its matrices are `Conv1D`s, stored as [in, out]; query, key and value are one of them, side by side.  The logits' matrix
is the token embedding, which files may have a second time (`lm_head.weight`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repro.config import ConfigError, Model
from repro.weights import pickled, tensors_file
from repro.weights.source import TOKENS, Stored, StoredTensors, compare, name_of

CONFIG = "config.json"
GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the one GELU that GPT-2 and our GPT have, the tanh approximation."""
_FIXED = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""What our GPT has no other value for; left out, a key has this one."""
_MASK = re.compile(r"h\.\d+\.attn\.(?:masked_)?bias")
"""The causal mask, which old files have as a tensor."""
_HEAD = "lm_head.weight"


class Counterpart(NamedTuple):
    """A tensor of GPT-2's that is a parameter of ours."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    """Theirs."""
    matrix: bool = False
    """Whether it is a `Conv1D`'s, [in, out] where ours is [out, in]."""


def counterparts(model: Model) -> Iterator[Counterpart]:
    """All of a model's tensors, in the order of its layers."""
    h, f, inner = model.hidden, model.ffn_width, model.heads * model.head_width
    yield Counterpart(TOKENS, "wte.weight", (model.vocab, h))
    yield Counterpart("embed.positions", "wpe.weight", (model.seq, h))
    for i in range(model.layers):
        for part, norm, linears in (
            ("attention", "ln_1", (("qkv", "attn.c_attn", h, 3 * inner), ("out", "attn.c_proj", inner, h))),
            ("mlp", "ln_2", (("up", "mlp.c_fc", h, f), ("down", "mlp.c_proj", f, h))),
        ):
            ours, theirs = f"blocks.{i}.{part}", f"h.{i}"
            yield Counterpart(f"{ours}.norm", f"{theirs}.{norm}.weight", (h,))
            yield Counterpart(f"{ours}.norm_bias", f"{theirs}.{norm}.bias", (h,))
            for name, linear, inputs, outputs in linears:
                yield Counterpart(f"{ours}.{name}", f"{theirs}.{linear}.weight", (inputs, outputs), True)
                yield Counterpart(f"{ours}.{name}_bias", f"{theirs}.{linear}.bias", (outputs,))
    yield Counterpart("head.norm", "ln_f.weight", (h,))
    yield Counterpart("head.norm_bias", "ln_f.bias", (h,))


class HuggingFace(StoredTensors):
    """A folder as `GPT2LMHeadModel.save_pretrained` writes it."""

    def __init__(self, folder: Path):
        files, found = _tensors(folder)
        found = {name.removeprefix("transformer."): tensor for name, tensor in found.items()}
        model = _model(folder)
        pairs = list(counterparts(model))
        masks = [name for name in found if _MASK.fullmatch(name)]
        expected = {pair.theirs: pair.shape for pair in pairs}
        compare(str(folder), expected, found, [*masks, _HEAD])
        self._head = found.get(_HEAD)
        self._folder = folder
        stored = {pair.ours: Stored((_ours(pair, found[pair.theirs], model),)) for pair in pairs}
        super().__init__("Hugging Face GPT-2", model, files, stored)

    def check(self) -> None:
        """The head is the embedding."""
        if self._head is not None and not torch.equal(self._head, self.stored[TOKENS].parts[0]):
            right = "is another matrix than wte.weight; our GPT's head is its token embedding"
            raise ConfigError(_HEAD, says=right, file=str(self._folder))


def _ours(pair: Counterpart, tensor: Tensor, model: Model) -> Tensor:
    """A view of theirs in our orientation; of query, key and value with the heads apart, so that tp splits them."""
    view = tensor.t() if pair.matrix else tensor
    if pair.ours.endswith((".qkv", ".qkv_bias")):
        view = view.view(3, model.heads, model.head_width, *view.shape[1:])
    return view


def _model(folder: Path) -> Model:
    path = folder / CONFIG
    config = _json(path)
    for key, right in _FIXED.items():
        value = config.get(key, right)
        if value != right:
            raise ConfigError(key, value, f"{right}, as in GPT-2 and in our GPT", file=str(path))
    activation = config.get("activation_function", GELU[0])
    if activation not in GELU:
        right = f"{GELU[0]}, GPT-2's tanh approximation, which our GPT has"
        raise ConfigError("activation_function", activation, right, file=str(path))
    try:
        return Model(
            name=name_of(folder),
            layers=config["n_layer"],
            hidden=config["n_embd"],
            heads=config["n_head"],
            vocab=config["vocab_size"],
            seq=config.get("n_positions") or config["n_ctx"],
            ffn=config.get("n_inner") or 0,
        )
    except KeyError as error:
        raise ConfigError(
            str(error.args[0]), says="is missing from GPT-2's configuration", file=str(path)
        ) from None
    except TypeError as error:
        raise ConfigError("sizes", says=f"must be whole numbers: {error}", file=str(path)) from None
    except ConfigError as error:
        raise error.within(file=str(path)) from None


def _tensors(folder: Path) -> tuple[list[Path], dict[str, Tensor]]:
    """The files with the weights, and all of their tensors; of both kinds that of safetensors."""
    for name, read in (("model.safetensors", tensors_file.read), ("pytorch_model.bin", pickled.load)):
        index = folder / f"{name}.index.json"
        if index.is_file():
            where = _json(index).get("weight_map")
            if not isinstance(where, Mapping):
                raise ConfigError("weight_map", says="is missing from the index", file=str(index))
            files = [folder / file for file in dict.fromkeys(map(str, where.values()))]
            # An index names files of its folder; another path is not followed.
            if strange := [path for path in files if path.parent != folder]:
                raise ConfigError("weight_map", str(strange[0]), "files of the same folder", file=str(index))
        elif (folder / name).is_file():
            files = [folder / name]
        else:
            continue
        found: dict[str, Tensor] = {}
        for path in files:
            content = read(path)
            if not isinstance(content, Mapping) or not all(isinstance(t, Tensor) for t in content.values()):
                raise ConfigError("weights", says="needs a table of tensors by name", file=str(path))
            found |= content
        return files, found
    right = "model.safetensors or pytorch_model.bin, or the index of their parts"
    raise ConfigError("weights", expected=right, file=str(folder))


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(error.strerror or "cannot be read", file=str(path)) from None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ConfigError("not JSON", says="needs a JSON object", file=str(path))
    return document


def configuration(model: Model, vocab: int) -> dict[str, Any]:
    """`config.json` of our GPT: what transformers makes a `GPT2LMHeadModel` of."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        **_FIXED,
        "activation_function": GELU[0],
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_positions": model.seq,
        "n_ctx": model.seq,
        "n_inner": model.ffn_width,
        "vocab_size": vocab,
        # Ids beyond the vocabulary make transformers warn; a model that is not GPT-2's has no end of text of its own.
        "bos_token_id": vocab - 1,
        "eos_token_id": vocab - 1,
        "torch_dtype": "float32",
    }
