"""Description of a model family in the format of Hugging Face transformers, and helpers that several families use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from repro.config import ConfigError, Model, require
from repro.quality.weights.source import TOKEN_EMBEDDING, Counterpart, RowRange, counterpart

OUR_GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu-erf"}
"""Names of this suite for the two GELU variants (tanh approximation, exact), by the names of Hugging Face."""
HUGGING_FACE_GELUS = {"gelu": "gelu_new", "gelu-erf": "gelu"}
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """Tensor names without `prefix`, configuration keys and conversions of one transformers model family."""

    name: str
    """Name of the model family in messages, such as `GPT-NeoX`."""
    types: tuple[str, ...]
    """Values of the configuration key `model_type` that select this family; an export writes the first value."""
    architecture: str
    """Name of the model class in Hugging Face transformers."""
    prefix: str
    head: str
    """Tensor name of the output matrix; files of models with tied embeddings may contain this matrix, too."""
    keys: Mapping[str, tuple[str, ...]]
    """Names of configuration keys in all versions of transformers, by field of `Model`; an export writes the first."""
    fixed: Config
    """Required values of configuration keys, since this suite's GPT supports no other; they are also the defaults."""
    norm_eps: tuple[str, float]
    """Configuration key of the epsilon in the norms, and the default of this key."""
    tokens: str
    """Tensor name of the token embedding."""
    norms: Mapping[str, str]
    """Names of norms outside of layers: name in this suite's GPT, by name in transformers."""
    sizes: Callable[[Config], dict[str, Any]]
    """Function that returns further fields of `Model` for a configuration; raises `KeyError` for a missing key."""
    layer: Callable[[Model, int], Iterator[Counterpart]]
    """Function that yields the tensors of a layer for a model and the layer's index."""
    configuration: Callable[[Model], dict[str, Any]]
    """Function that returns a model's keys of `config.json` in addition to the keys that all families have."""
    gelu: tuple[str, str] | None = None
    """Configuration key of the GELU variant, and the default of this key; None if the family has one activation."""
    tied: bool = True
    """Default of the configuration key `tie_word_embeddings`."""
    positions: str = ""
    """Tensor name of the position embedding; empty without one."""
    ignored: re.Pattern[str] = re.compile(r"(?!)")
    """Pattern of names of tensors that are not weights, such as masks in old files."""

    def model(self, config: Config, name: str) -> Model:
        """Return the model of a configuration; raise `ConfigError` if this suite's GPT cannot represent the model."""
        for key, right in self.fixed.items():
            value = config.get(key, right)
            require(value == right, key, value, f"{right}, the only value that this suite's GPT supports")
        try:
            sizes = {ours: first_value(config, *theirs) for ours, theirs in self.keys.items()}
            sizes |= {"vocab": config["vocab_size"], "norm_eps": config.get(*self.norm_eps)}
            sizes |= {"mlp": gelu_name(config, *self.gelu)} if self.gelu else {}
            sizes["tied"] = bool(config.get("tie_word_embeddings", self.tied))
            return Model(name=name, **{**sizes, **self.sizes(config)})
        except KeyError as error:
            says = f"is missing; configurations of the model family {self.name} need this key"
            raise ConfigError(str(error.args[0]), says=says) from None
        except TypeError as error:
            raise ConfigError("sizes", says=f"must be integers in the model configuration: {error}") from None

    def counterparts(self, model: Model) -> Iterator[Counterpart]:
        """Yield all tensors of a model in transformers' format, with their rows in this suite's parameters."""
        yield counterpart(self.tokens, TOKEN_EMBEDDING, model.vocab, model.hidden)
        if self.positions:
            yield counterpart(self.positions, "embed.positions", model.seq, model.hidden)
        for theirs, ours in self.norms.items():
            yield from norm_counterparts(theirs, ours, model)
        for i in range(model.layers):
            yield from self.layer(model, i)
        if not model.tied:
            yield counterpart(self.head, "head.output", model.vocab, model.hidden)

    def document(self, model: Model, vocab: int) -> dict[str, Any]:
        """Return the content of `config.json` for a model with `vocab` tokens."""
        sizes = {
            theirs[0]: getattr(model, "ffn_width" if k == "ffn" else k) for k, theirs in self.keys.items()
        }
        return {
            "architectures": [self.architecture],
            "model_type": self.types[0],
            **self.fixed,
            **sizes,
            self.norm_eps[0]: model.norm_eps,
            **({self.gelu[0]: HUGGING_FACE_GELUS.get(model.mlp)} if self.gelu else {}),
            **self.configuration(model),
            "tie_word_embeddings": model.tied,
            "vocab_size": vocab,
            # transformers warns about ids outside the vocabulary, so the last token stands for missing special tokens.
            "bos_token_id": vocab - 1,
            "eos_token_id": vocab - 1,
            "torch_dtype": "float32",
        }


def norm_counterparts(theirs: str, ours: str, model: Model) -> Iterator[Counterpart]:
    """Yield a norm's weight and, for a LayerNorm, its bias. `theirs`, `ours`: its names in transformers and here."""
    yield counterpart(f"{theirs}.weight", ours, model.hidden)
    if model.norm == "layer":
        yield counterpart(f"{theirs}.bias", f"{ours}_bias", model.hidden)


def linear_counterparts(
    theirs: str, inputs: int, *row_ranges: RowRange, biased: bool
) -> Iterator[Counterpart]:
    """Yield a weight matrix [out, in] that consists of rows of this suite's parameters, and its bias if `biased`."""
    rows = sum(part.rows for part in row_ranges)
    yield Counterpart(f"{theirs}.weight", (rows, inputs), row_ranges)
    if biased:
        biases = tuple(part._replace(ours=f"{part.ours}_bias") for part in row_ranges)
        yield Counterpart(f"{theirs}.bias", (rows,), biases)


def fused_qkv_rows(block: str, model: Model) -> Iterator[RowRange]:
    """Yield the row ranges of a fused matrix that stores queries, key and value of each key head together."""
    width, keys = model.head_width, model.key_heads
    queries = model.heads // keys * width
    for group in range(keys):
        if keys == model.heads:  # this program's parameter `qkv` is [3, heads, width]
            for k in range(3):
                yield RowRange(f"{block}.qkv", (k * keys + group) * width, width)
        else:  # this program's parameter `kv` is [key heads, 2, width], separate from the queries `q`
            yield RowRange(f"{block}.q", group * queries, queries)
            yield RowRange(f"{block}.kv", group * 2 * width, 2 * width)


def fused_layer(
    model: Model, i: int, *, stem: str, attention: str, norms: tuple[str, ...]
) -> Iterator[Counterpart]:
    """Yield the tensors of layer `i` in a model family that names the four matrices of a layer as Megatron-LM does.

    `norms`: names of the norms of attention and of the MLP; with one name, the MLP has no norm.
    """
    theirs, ours, h, f = f"{stem}.{i}", f"blocks.{i}", model.hidden, model.ffn_width
    for name, part in zip(norms, ("attention", "mlp"), strict=False):
        yield from norm_counterparts(f"{theirs}.{name}", f"{ours}.{part}.norm", model)
    for name, inputs, row_ranges in (
        (f"{attention}.query_key_value", h, fused_qkv_rows(f"{ours}.attention", model)),
        (f"{attention}.dense", model.heads * model.head_width, [RowRange(f"{ours}.attention.out", 0, h)]),
        ("mlp.dense_h_to_4h", h, [RowRange(f"{ours}.mlp.up", 0, f)]),
        ("mlp.dense_4h_to_h", f, [RowRange(f"{ours}.mlp.down", 0, h)]),
    ):
        yield from linear_counterparts(f"{theirs}.{name}", inputs, *row_ranges, biased=model.biases == "all")


def first_value(config: Config, *keys: str) -> Any:
    """Return the first configuration value, in the order of `keys`, that is not None; raise `KeyError` without one."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise KeyError(keys[0])


def rotary_sizes(config: Config) -> dict[str, Any]:
    """Return the fields of `Model` for the rotary embedding of a configuration, which may be in a nested dictionary."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        right = "default, since this suite's GPT does not support scaled rotary embeddings"
        raise ConfigError("rope_type", kind, right)
    base = rope.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10000.0
    return {"positions": "rotary", "rotary_base": float(base)}


def gelu_name(config: Config, key: str, default: str) -> str:
    """Return this suite's name of the GELU variant that a configuration names in `key`."""
    value = config.get(key, default)
    require(value in OUR_GELUS, key, value, f"one of {', '.join(OUR_GELUS)}")
    return OUR_GELUS[value]
