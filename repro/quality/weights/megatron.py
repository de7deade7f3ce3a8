"""Megatron-LM's checkpoints of GPT: tensor-parallel shards and pipeline stages put together.

Below the folder that was saved, `latest_checkpointed_iteration.txt` says which of `iter_0000100` or `release` counts;
in it, `mp_rank_TT` (with a pipeline `mp_rank_TT_PPP`) holds what one rank had.  Layers are numbered from 0 in
every stage, and with an interleaved schedule in every chunk (`model0`, `model1`).  What tensor parallelism splits
lies in parts: rows of the first matrix of a pair, columns of the second (1909.08053 sec. 3); the rest on every rank.

Query, key and value are rows of one matrix, in an order that `checkpoint_version` tells: without one, up to September
2020, [3, heads, width] of a rank; 1.0 [heads, width, 3]; from 2.0 on [heads, 3, width].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.config import ConfigError, Model
from repro.quality.weights import pickled
from repro.quality.weights.source import TOKENS, Stored, StoredTensors, compare, name_of

TRACKER = "latest_checkpointed_iteration.txt"
FILES = ("model_optim_rng.pt", "model_rng.pt")
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_PREFIX = re.compile(r"^(?:module\.|language_model\.|embedding\.|transformer\.|encoder\.|decoder\.)+")
_LATER = (
    (".attention.", ".self_attention."),
    (".linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".post_attention_layernorm."),
    (".pre_mlp_layernorm.", ".post_attention_layernorm."),
    (".linear_qkv.", ".query_key_value."),
    (".linear_proj.", ".dense."),
    (".linear_fc1.", ".dense_h_to_4h."),
    (".linear_fc2.", ".dense_4h_to_h."),
    ("self_attention.input_layernorm.", "input_layernorm."),
)
"""Names of 2019 and of Megatron-core, and those of 2021 in their place."""
_HEAD = "word_embeddings_for_head.weight"
"""The last pipeline stage's copy of the embedding."""
_ORDERS = {
    0.0: "[3, heads, width]",
    1.0: "[heads, width, 3]",
    2.0: "[heads, 3, width]",
    3.0: "[heads, 3, width]",
}
_LAYER = {
    "attention.norm": ("input_layernorm.weight", None),
    "attention.norm_bias": ("input_layernorm.bias", None),
    "attention.qkv": ("self_attention.query_key_value.weight", 0),
    "attention.qkv_bias": ("self_attention.query_key_value.bias", 0),
    "attention.out": ("self_attention.dense.weight", 1),
    "attention.out_bias": ("self_attention.dense.bias", None),
    "mlp.norm": ("post_attention_layernorm.weight", None),
    "mlp.norm_bias": ("post_attention_layernorm.bias", None),
    "mlp.up": ("mlp.dense_h_to_4h.weight", 0),
    "mlp.up_bias": ("mlp.dense_h_to_4h.bias", 0),
    "mlp.down": ("mlp.dense_4h_to_h.weight", 1),
    "mlp.down_bias": ("mlp.dense_4h_to_h.bias", None),
}
"""Of a layer: our name, theirs, and the dimension along which their ranks split it."""
_OUTER = {
    TOKENS: ("word_embeddings.weight", 0),
    "embed.positions": ("position_embeddings.weight", None),
    "head.norm": ("final_layernorm.weight", None),
    "head.norm_bias": ("final_layernorm.bias", None),
}


def shards_of(folder: Path) -> Path | None:
    """The folder with the ranks' folders, at or below `folder`; None if this is no checkpoint of Megatron-LM."""
    tracker = folder / TRACKER
    if tracker.is_file():
        word = tracker.read_text(encoding="utf-8").strip()
        if not (word.isdecimal() or word == "release"):
            raise ConfigError("iteration", word, "a number, or release", file=str(tracker))
        folder /= word if word == "release" else f"iter_{int(word):07d}"
        if not folder.is_dir():
            raise ConfigError("is missing", says="though the tracker beside it names it", file=str(folder))
        return folder
    return folder if any(_RANK.fullmatch(path.name) for path in folder.glob("mp_rank_*")) else None


class Megatron(StoredTensors):
    """All ranks' files of one iteration."""

    def __init__(self, folder: Path, model: Model | None = None):
        self._folder = folder
        paths = _paths(folder)
        self._tp, self._pp = 1 + max(t for t, _ in paths), 1 + max(p for _, p in paths)
        if len(paths) != self._tp * self._pp:
            right = f"one of each of {self._tp} x {self._pp} tensor-parallel and pipeline ranks; there are {len(paths)}"
            raise ConfigError("mp_rank_*", says=f"needs {right}", file=str(folder))
        ranks = {at: _content(path) for at, path in paths.items()}
        first = ranks[0, 0]
        self._version = _version(first, folder)
        arguments = first.get("args")
        said = dict(vars(arguments)) if isinstance(arguments, pickled.StandIn) else {}
        _refuse(said, folder)
        shards = [self._shard({p: ranks[t, p] for p in range(self._pp)}) for t in range(self._tp)]
        sizes = self._sizes(shards, said, model)
        for t, shard in enumerate(shards):
            where = f"{folder}/mp_rank_{t:02d}"
            compare(where, dict(self._expected(sizes)), shard, [_HEAD])
        self._shards = shards
        stored = {ours: self._stored(ours, theirs, dim, sizes) for ours, theirs, dim in _pairs(sizes.layers)}
        super().__init__(f"Megatron-LM, tp {self._tp}, pp {self._pp}", sizes, paths.values(), stored)

    def check(self) -> None:
        """What every rank has is the same on all, and the last stage's embedding that of the first."""
        for t, shard in enumerate(self._shards):
            where = f"{self._folder}/mp_rank_{t:02d}"
            for name, tensor in shard.items():
                if _split(name) is None and not torch.equal(tensor, self._shards[0][name]):
                    raise ConfigError(name, says="is not the same as in mp_rank_00", file=where)
            head = shard.get(_HEAD)
            if head is not None and not torch.equal(head, shard[_OUTER[TOKENS][0]]):
                raise ConfigError(
                    _HEAD, says="is not the first stage's embedding; our GPT's is tied", file=where
                )

    def _shard(self, stages: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
        """One tensor-parallel rank's tensors, its stages' layers numbered through."""
        chunks = sum(f"model{i}" in stages[0] for i in range(1024)) or 1
        parts = [
            _named(stages[p].get(f"model{c}" if "model0" in stages[p] else "model"), self._folder)
            for c in range(chunks)
            for p in range(self._pp)
        ]
        found: dict[str, Tensor] = {}
        layers = 0
        for part in parts:
            numbers = {int(name.split(".")[1]) for name in part if name.startswith("layers.")}
            for name, tensor in part.items():
                if name.startswith("layers."):
                    _, number, rest = name.split(".", 2)
                    name = f"layers.{layers + int(number)}.{rest}"
                if name == "word_embeddings.weight" and name in found:
                    name = _HEAD
                found[name] = tensor
            layers += len(numbers)
        return found

    def _sizes(self, shards: list[dict[str, Tensor]], said: Mapping[str, Any], model: Model | None) -> Model:
        """From the shapes; the heads as the checkpoint's arguments have them, or `model` where there are none."""
        shard, where = shards[0], str(self._folder)
        names = ("word_embeddings.weight", "position_embeddings.weight", "layers.0.mlp.dense_h_to_4h.weight")
        if lacking := [name for name in names if name not in shard]:
            raise ConfigError("weights", says=f"lacks {lacking[0]}: no GPT of Megatron-LM", file=where)
        tokens, positions, up = (shard[name] for name in names)
        heads = said.get("num_attention_heads") or (model.heads if model is not None else None)
        if not isinstance(heads, int):
            right = (
                "needs --model: a checkpoint of 2019 has no arguments, and its shapes do not say the heads"
            )
            raise ConfigError("heads", says=right, file=where)
        if model is not None and model.hidden != tokens.shape[1]:
            raise ConfigError(
                "--model", model.name, f"of width {tokens.shape[1]}, as the weights", file=where
            )
        try:
            return Model(
                name=name_of(self._folder.parent),
                layers=len({name.split(".")[1] for name in shard if name.startswith("layers.")}),
                hidden=tokens.shape[1],
                heads=heads,
                vocab=sum(each["word_embeddings.weight"].shape[0] for each in shards),
                seq=positions.shape[0],
                ffn=up.shape[0] * self._tp,
            )
        except ConfigError as error:
            raise error.within(file=where) from None

    def _expected(self, model: Model) -> Iterator[tuple[str, list[int]]]:
        """Names and shapes of one tensor-parallel rank."""
        h, f, inner, t = model.hidden, model.ffn_width // self._tp, model.hidden // self._tp, self._tp
        shapes = {
            "attention.qkv": [3 * inner, h],
            "attention.qkv_bias": [3 * inner],
            "attention.out": [h, inner],
        }
        shapes |= {"mlp.up": [f, h], "mlp.up_bias": [f], "mlp.down": [h, f]}
        shapes |= {TOKENS: [model.vocab // t, h], "embed.positions": [model.seq, h]}
        for ours, theirs, _ in _pairs(model.layers):
            yield theirs, shapes.get(ours.split(".", 2)[-1] if ours.startswith("blocks.") else ours, [h])

    def _stored(self, ours: str, theirs: str, dim: int | None, model: Model) -> Stored:
        parts = [shard[theirs] for shard in self._shards]
        if dim is None:
            return Stored((parts[0],))
        if not ours.endswith((".qkv", ".qkv_bias")):
            return Stored(tuple(parts), dim)
        return Stored(tuple(self._heads_apart(part, model) for part in parts), 1)

    def _heads_apart(self, part: Tensor, model: Model) -> Tensor:
        """A view [3, heads / t, width, ...] of a rank's query, key and value."""
        heads, width, rest = model.heads // self._tp, model.head_width, part.shape[1:]
        if self._version == 0:
            return part.view(3, heads, width, *rest)
        if self._version == 1:
            return part.view(heads, width, 3, *rest).movedim(2, 0)
        return part.view(heads, 3, width, *rest).movedim(1, 0)


def _pairs(layers: int) -> Iterator[tuple[str, str, int | None]]:
    """Our name, theirs, and the dimension that their ranks split, of every parameter."""
    for ours, (theirs, dim) in _OUTER.items():
        yield ours, theirs, dim
    for i in range(layers):
        for ours, (theirs, dim) in _LAYER.items():
            yield f"blocks.{i}.{ours}", f"layers.{i}.{theirs}", dim


def _split(theirs: str) -> int | None:
    """The dimension along which their ranks split a tensor."""
    name = theirs.split(".", 2)[-1] if theirs.startswith("layers.") else theirs
    return 0 if name == _HEAD else dict((*_LAYER.values(), *_OUTER.values())).get(name)


def _paths(folder: Path) -> dict[tuple[int, int], Path]:
    """Every rank's file by its tensor-parallel rank and stage."""
    found = {}
    for path in sorted(folder.iterdir()):
        match = _RANK.fullmatch(path.name)
        file = next((path / name for name in FILES if (path / name).is_file()), None)
        if match and file is not None:
            found[int(match[1]), int(match[2] or 0)] = file
    if (0, 0) not in found:
        right = f"mp_rank_00/{FILES[0]}; a distributed checkpoint of Megatron-core is not read"
        raise ConfigError("weights", says=f"needs {right}", file=str(folder))
    return found


def _content(path: Path) -> dict[str, Any]:
    content = pickled.load(path)
    if not isinstance(content, dict) or not {"model", "model0"} & content.keys():
        raise ConfigError("model", says="is missing: no checkpoint of Megatron-LM", file=str(path))
    return content


def _version(content: Mapping[str, Any], folder: Path) -> float:
    version = content.get("checkpoint_version", 0) or 0
    if version not in _ORDERS:
        known = ", ".join(f"{number:g} {order}" for number, order in _ORDERS.items())
        raise ConfigError("checkpoint_version", version, f"one of {known}", file=str(folder))
    return float(version)


def _refuse(said: Mapping[str, Any], folder: Path) -> None:
    """Raise `ConfigError` for a model that our GPT is not."""
    fused = said.get("bias_gelu_fusion", True) or said.get("openai_gelu") or said.get("onnx_safe")
    for key, wrong, right in (
        ("bias_gelu_fusion", not fused, "true, or openai_gelu: our GELU is the tanh approximation"),
        ("swiglu", bool(said.get("swiglu")), "false"),
        (
            "apply_residual_connection_post_layernorm",
            said.get("apply_residual_connection_post_layernorm"),
            "false",
        ),
        ("untie_embeddings_and_output_weights", said.get("untie_embeddings_and_output_weights"), "false"),
        ("layernorm_epsilon", said.get("layernorm_epsilon", 1e-5) != 1e-5, "1e-5"),
        ("norm_epsilon", said.get("norm_epsilon", 1e-5) != 1e-5, "1e-5"),
    ):
        if wrong:
            raise ConfigError(f"args.{key}", said.get(key), f"{right}, as in our GPT", file=str(folder))


def _named(state: Any, folder: Path) -> dict[str, Tensor]:
    """A state's tensors by the names of 2021, whatever tables they were in."""
    if not isinstance(state, Mapping):
        raise ConfigError("model", says="is not a table of tensors", file=str(folder))
    found = {}
    for name, tensor in _flat(state):
        name = _PREFIX.sub("", name)
        for old, new in _LATER:
            name = name.replace(old, new)
        if not name.endswith("._extra_state"):
            found[_HEAD if name == "output_layer.weight" else name] = tensor
    return found


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
