"""Reader of Megatron-LM checkpoints of GPT, which joins tensor-parallel shards and pipeline stages.

`latest_checkpointed_iteration.txt` names a folder, `iter_0000100` or `release`, with one folder per rank: `mp_rank_TT`
(tensor-parallel rank), or `mp_rank_TT_PPP` with pipeline stages. Stages, and chunks of an interleaved schedule
(`model0`, `model1`), number their layers from 0. `checkpoint_version` gives the order of the rows of query, key and
value in their matrix (`_QKV_ORDERS`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.config import ConfigError, Model, require
from repro.quality.weights.source import TOKEN_EMBEDDING, WeightSource, check_tensors, name_from_folder
from repro.quality.weights.tensor_files import Placeholder, read_torch_file

TRACKER_FILE = "latest_checkpointed_iteration.txt"
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt")
_RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
_PREFIX = re.compile(r"^(?:module\.|language_model\.|embedding\.|transformer\.|encoder\.|decoder\.)+")
_RENAMED_TO_2021 = (
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
"""Parts of tensor names in Megatron-LM of 2019 and in Megatron-core, and the corresponding names of 2021."""
_HEAD = "word_embeddings_for_head.weight"
"""Tensor name of the copy of the token embedding on the last pipeline stage."""
_QKV_ORDERS = {
    0.0: "[3, heads, width]",
    1.0: "[heads, width, 3]",
    2.0: "[heads, 3, width]",
    3.0: "[heads, 3, width]",
}
_LAYER_NAMES = {
    "attention.norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.out": "self_attention.dense",
    "mlp.norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
"""Names of a layer's matrices and norms in Megatron-LM, by their names in this suite's GPT."""
_OUTER_NAMES = {
    TOKEN_EMBEDDING: "word_embeddings.weight",
    "embed.positions": "position_embeddings.weight",
    "head.norm": "final_layernorm.weight",
    "head.norm_bias": "final_layernorm.bias",
}


def find_rank_folders(folder: Path) -> Path | None:
    """Return `folder` or its subfolder that contains the rank folders of a Megatron-LM checkpoint; None without one."""
    tracker = folder / TRACKER_FILE
    if tracker.is_file():
        word = tracker.read_text(encoding="utf-8").strip()
        if not (word.isdecimal() or word == "release"):
            raise ConfigError("iteration", word, "an iteration number or release", file=str(tracker))
        folder /= word if word == "release" else f"iter_{int(word):07d}"
        require(folder.is_dir(), "is missing", says=f"{TRACKER_FILE} names this folder", file=str(folder))
        return folder
    return folder if any(_RANK_FOLDER.fullmatch(path.name) for path in folder.glob("mp_rank_*")) else None


@dataclass(frozen=True)
class SplitTensor:
    """One parameter of a model as parts from several tensor-parallel ranks, which are concatenated along `dim`.

    The parts are views that may subdivide dimensions: [3, heads, width, h] for a parameter [3, heads * width, h].
    """

    parts: tuple[Tensor, ...]
    dim: int = 0

    @property
    def shape(self) -> list[int]:
        """Return the shape of the full parameter, the concatenation of the parts of all tensor-parallel ranks."""
        shape = list(self.parts[0].shape)
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return shape

    def narrow(self, dim: int, first: int, last: int) -> SplitTensor:
        """Return a view of the indices `first` to `last` (exclusive) along `dim`, without indices beyond the size."""
        if dim != self.dim:
            return SplitTensor(tuple(part.narrow(dim, first, last - first) for part in self.parts), self.dim)
        found, begin = [], 0
        for part in self.parts:
            low, high = max(first, begin), min(last, begin + part.shape[dim])
            if low < high:
                found.append(part.narrow(dim, low - begin, high - low))
            begin += part.shape[dim]
        return SplitTensor(tuple(found) or (self.parts[0].narrow(dim, 0, 0),), self.dim)


class MegatronCheckpoint(WeightSource):
    """Weights of a Megatron-LM checkpoint, joined from the files of all ranks."""

    def __init__(self, folder: Path, model: Model | None = None):
        self._folder = folder
        paths = _rank_files(folder)
        self._tp, self._pp = 1 + max(t for t, _ in paths), 1 + max(p for _, p in paths)
        if len(paths) != self._tp * self._pp:
            kinds = "tensor-parallel ranks x pipeline stages"
            right = f"{self._tp} x {self._pp} folders ({kinds}), not {len(paths)}"
            raise ConfigError("mp_rank_*", says=f"must be {right}", file=str(folder))
        ranks = {at: _read_checkpoint(path) for at, path in paths.items()}
        self._version = _checkpoint_version(ranks[0, 0], folder)
        namespace = ranks[0, 0].get("args")
        arguments = vars(namespace) if isinstance(namespace, Placeholder) else {}
        _check_arguments(arguments, folder)
        shards = [self._shard({p: ranks[t, p] for p in range(self._pp)}) for t in range(self._tp)]
        self.kind, self.files = f"Megatron-LM, tp {self._tp}, pp {self._pp}", tuple(paths.values())
        self.model = self._model(shards, arguments, model)
        for t, shard in enumerate(shards):
            check_tensors(f"{folder}/mp_rank_{t:02d}", dict(self._expected_shapes()), shard, [_HEAD])
        self._shards = shards
        pairs = _name_pairs(self.model.layers)
        self._stored = {ours: self._join_ranks(ours, theirs) for ours, theirs in pairs}

    def elements(
        self, name: str, start: int, stop: int, rank: int = 0, ranks: int = 1, rows: int = 0
    ) -> Tensor:
        stored, split = self._stored[name], self.parameter_shapes[name].split
        shape = stored.shape
        if rows:
            shape[0] = rows
        if split is not None:
            shape[split] //= ranks
            stored = stored.narrow(split, rank * shape[split], (rank + 1) * shape[split])
        row = math.prod(shape[1:])
        first, last = start // row, -(-stop // row)
        stored = stored.narrow(0, first, last)
        block = stored.parts[0] if len(stored.parts) == 1 else torch.cat(stored.parts, stored.dim)
        found = block.reshape(-1)[start - first * row : stop - first * row].float()
        missing = stop - start - found.numel()
        return torch.nn.functional.pad(found, (0, missing)) if missing else found

    def check(self) -> None:
        """Raise `ConfigError` if ranks have different values of a replicated tensor or of the shared embedding."""
        ours = {theirs: ours for ours, theirs in _name_pairs(self.model.layers)}
        for t, shard in enumerate(self._shards):
            where = f"{self._folder}/mp_rank_{t:02d}"
            for name, tensor in shard.items():
                is_split = name == _HEAD or self.parameter_shapes[ours[name]].split is not None
                if not is_split and not torch.equal(tensor, self._shards[0][name]):
                    says = "is replicated, but differs from its copy in mp_rank_00"
                    raise ConfigError(name, says=says, file=where)
            head = shard.get(_HEAD)
            if head is not None and not torch.equal(head, shard[_OUTER_NAMES[TOKEN_EMBEDDING]]):
                says = "differs from the token embedding on the first pipeline stage; the two copies must be equal"
                raise ConfigError(_HEAD, says=says, file=where)

    def _shard(self, stages: Mapping[int, Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the tensors of a tensor-parallel rank from all its stages, with layers numbered across stages."""
        chunks = sum(f"model{i}" in stages[0] for i in range(1024)) or 1
        found: dict[str, Tensor] = {}
        layers = 0
        for c, p in product(range(chunks), range(self._pp)):
            state = stages[p].get(f"model{c}" if "model0" in stages[p] else "model")
            part = _tensors_by_name(state, self._folder)
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

    def _model(
        self, shards: list[dict[str, Tensor]], arguments: Mapping[str, Any], model: Model | None
    ) -> Model:
        """Return the model of a checkpoint's tensor shapes, with heads from the checkpoint's arguments or `model`."""
        shard, where = shards[0], str(self._folder)
        names = ("word_embeddings.weight", "position_embeddings.weight", "layers.0.mlp.dense_h_to_4h.weight")
        if lacking := [name for name in names if name not in shard]:
            says = f"must be a checkpoint of a Megatron-LM GPT; tensor {lacking[0]} is missing"
            raise ConfigError("weights", says=says, file=where)
        tokens, positions, up = (shard[name] for name in names)
        heads = arguments.get("num_attention_heads") or (model.heads if model is not None else None)
        if not isinstance(heads, int):
            right = "is unknown: checkpoints of 2019 lack the number of heads; name the model with --model"
            raise ConfigError("heads", says=right, file=where)
        if model is not None and model.hidden != tokens.shape[1]:
            right = f"a model of hidden size {tokens.shape[1]}, which is the hidden size of the weights"
            raise ConfigError("--model", model.name, right, file=where)
        try:
            return Model(
                name=name_from_folder(self._folder.parent),
                layers=len({name.split(".")[1] for name in shard if name.startswith("layers.")}),
                hidden=tokens.shape[1],
                heads=heads,
                vocab=sum(each["word_embeddings.weight"].shape[0] for each in shards),
                seq=positions.shape[0],
                ffn=up.shape[0] * self._tp,
            )
        except ConfigError as error:
            raise error.within(file=where) from None

    def _expected_shapes(self) -> Iterator[tuple[str, list[int]]]:
        """Yield the name and the expected shape of each tensor in the checkpoint of one tensor-parallel rank."""
        for ours, theirs in _name_pairs(self.model.layers):
            shape, split = self.parameter_shapes[ours]
            sizes = [size // self._tp if dim == split else size for dim, size in enumerate(shape)]
            yield theirs, [math.prod(sizes[:2]), *sizes[2:]] if _is_qkv(ours) else sizes

    def _join_ranks(self, ours: str, theirs: str) -> SplitTensor:
        """Return the parameter `ours` of this suite's GPT from the tensors `theirs` of all tensor-parallel ranks."""
        parts, split = [shard[theirs] for shard in self._shards], self.parameter_shapes[ours].split
        if split is None:
            return SplitTensor((parts[0],))
        return SplitTensor(tuple(self._split_heads(part) if _is_qkv(ours) else part for part in parts), split)

    def _split_heads(self, part: Tensor) -> Tensor:
        """Return a view [3, heads / tp, width, ...] of the query, key and value rows of a tensor-parallel rank."""
        heads, width, rest = self.model.heads // self._tp, self.model.head_width, part.shape[1:]
        if self._version == 0:
            return part.view(3, heads, width, *rest)
        if self._version == 1:
            return part.view(heads, width, 3, *rest).movedim(2, 0)
        return part.view(heads, 3, width, *rest).movedim(1, 0)


def _name_pairs(layers: int) -> Iterator[tuple[str, str]]:
    """Yield the name of every parameter in this suite's GPT, and its name in Megatron-LM."""
    yield from _OUTER_NAMES.items()
    for i in range(layers):
        for ours, theirs in _LAYER_NAMES.items():
            yield f"blocks.{i}.{ours}", f"layers.{i}.{theirs}.weight"
            yield f"blocks.{i}.{ours}_bias", f"layers.{i}.{theirs}.bias"


def _is_qkv(ours: str) -> bool:
    return ours.endswith((".qkv", ".qkv_bias"))


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the weight file of every rank, by (tensor-parallel rank, pipeline stage)."""
    found = {}
    for path in sorted(folder.iterdir()):
        match = _RANK_FOLDER.fullmatch(path.name)
        file = next((path / name for name in RANK_FILES if (path / name).is_file()), None)
        if match and file is not None:
            found[int(match[1]), int(match[2] or 0)] = file
    if (0, 0) not in found:
        right = f"in mp_rank_00/{RANK_FILES[0]}; distributed checkpoints of Megatron-core are not supported"
        raise ConfigError("weights", expected=right, file=str(folder))
    return found


def _read_checkpoint(path: Path) -> dict[str, Any]:
    content = read_torch_file(path)
    if not isinstance(content, dict) or not {"model", "model0"} & content.keys():
        says = "is missing; checkpoints of Megatron-LM contain this key"
        raise ConfigError("model", says=says, file=str(path))
    return content


def _checkpoint_version(content: Mapping[str, Any], folder: Path) -> float:
    version = content.get("checkpoint_version", 0) or 0
    if version not in _QKV_ORDERS:
        known = ", ".join(f"{number:g} {order}" for number, order in _QKV_ORDERS.items())
        raise ConfigError("checkpoint_version", version, f"one of {known}", file=str(folder))
    return float(version)


def _check_arguments(arguments: Mapping[str, Any], folder: Path) -> None:
    """Raise `ConfigError` if a checkpoint's arguments describe a model that this suite's GPT cannot represent."""
    fused = arguments.get("bias_gelu_fusion", True)
    is_tanh = fused or arguments.get("openai_gelu") or arguments.get("onnx_safe")
    tanh = "true, or openai_gelu = true (GELU by the tanh approximation)"
    unsupported = {"bias_gelu_fusion": (not is_tanh, tanh)}
    for key in ("swiglu", "apply_residual_connection_post_layernorm", "untie_embeddings_and_output_weights"):
        unsupported[key] = (bool(arguments.get(key)), "false")
    for key in ("layernorm_epsilon", "norm_epsilon"):
        unsupported[key] = (arguments.get(key, 1e-5) != 1e-5, "1e-5")
    for key, (is_unsupported, right) in unsupported.items():
        if is_unsupported:
            says = f"must be {right}; this suite's GPT supports no other value"
            raise ConfigError(f"args.{key}", arguments.get(key), says=says, file=str(folder))


def _tensors_by_name(state: Any, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a nested state dictionary by the tensor names of Megatron-LM of 2021."""
    if not isinstance(state, Mapping):
        raise ConfigError("model", says="must be a dictionary of tensors", file=str(folder))
    found = {}
    for name, tensor in _flatten(state):
        name = _PREFIX.sub("", name)
        for old, new in _RENAMED_TO_2021:
            name = name.replace(old, new)
        if not name.endswith("._extra_state"):
            found[_HEAD if name == "output_layer.weight" else name] = tensor
    return found


def _flatten(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
