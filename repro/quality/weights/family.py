"""Interface of a family of models in transformers' format, and conversions that several families share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from repro.config import ConfigError, Model
from repro.quality.weights.source import TOKEN_EMBEDDING, Counterpart, RowRange, counterpart

OUR_GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu-erf"}
"""Our names of the tanh approximation and the exact GELU, by the names of Hugging Face."""
HUGGING_FACE_GELUS = {"gelu": "gelu_new", "gelu-erf": "gelu"}
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """Family of models. Names of tensors exclude `prefix`, which old files lack."""

    name: str
    """Name in messages."""
    types: tuple[str, ...]
    """Values of `model_type` that can be read; an export writes the first one."""
    architecture: str
    """Class in transformers."""
    prefix: str
    head: str
    """Name of the output matrix, without prefix; files of tied models may contain it too."""
    keys: Mapping[str, tuple[str, ...]]
    """Keys of our model, and all names that theirs have had; the first one is written."""
    fixed: Config
    """Keys with one value that our GPT supports; it is also the default of the key."""
    norm_eps: tuple[str, float]
    """Their key of `norm_eps` and its default."""
    tokens: str
    """Name of the token embedding."""
    norms: Mapping[str, str]
    """Norms outside layers: their names to ours."""
    sizes: Callable[[Config], dict[str, Any]]
    """Conversion of their configuration to further keys of our model; raises `KeyError` for a missing key."""
    layer: Callable[[Model, int], Iterator[Counterpart]]
    """Tensors of layer i."""
    configuration: Callable[[Model], dict[str, Any]]
    """Conversion of our model to further keys of their configuration."""
    gelu: tuple[str, str] | None = None
    """Their key of the activation of a GELU and its default; None in a family with one activation."""
    tied: bool = True
    """Default of `tie_word_embeddings`."""
    positions: str = ""
    """Name of the position embedding; empty without one."""
    ignored: re.Pattern[str] = re.compile(r"(?!)")
    """Names of tensors that are not weights: masks and wavelengths in old files."""

    def model(self, config: Config, name: str) -> Model:
        """Return our model of a configuration. Raises `ConfigError` for a layer that our GPT lacks."""
        for key, right in self.fixed.items():
            value = config.get(key, right)
            if value != right:
                raise ConfigError(key, value, f"{right}, as our GPT has it")
        try:
            sizes = {ours: first_value(config, *theirs) for ours, theirs in self.keys.items()}
            sizes |= {"vocab": config["vocab_size"], "norm_eps": config.get(*self.norm_eps)}
            sizes |= {"mlp": gelu_name(config, *self.gelu)} if self.gelu else {}
            sizes["tied"] = bool(config.get("tie_word_embeddings", self.tied))
            return Model(name=name, **{**sizes, **self.sizes(config)})
        except KeyError as error:
            says = f"is missing from {self.name}'s configuration"
            raise ConfigError(str(error.args[0]), says=says) from None
        except TypeError as error:
            raise ConfigError("sizes", says=f"must be whole numbers: {error}") from None

    def counterparts(self, model: Model) -> Iterator[Counterpart]:
        """Yield all tensors of a model."""
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
        """Return the content of `config.json` for a model."""
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
            # Ids beyond the vocabulary make transformers warn; not every model has an end of text of its own.
            "bos_token_id": vocab - 1,
            "eos_token_id": vocab - 1,
            "torch_dtype": "float32",
        }


def norm_counterparts(theirs: str, ours: str, model: Model) -> Iterator[Counterpart]:
    """Yield the weight of a norm, and its bias if it has one."""
    yield counterpart(f"{theirs}.weight", ours, model.hidden)
    if model.norm == "layer":
        yield counterpart(f"{theirs}.bias", f"{ours}_bias", model.hidden)


def linear_counterparts(
    theirs: str, inputs: int, *row_ranges: RowRange, biased: bool
) -> Iterator[Counterpart]:
    """Yield a matrix [out, in] with the rows `row_ranges` of our weights, and its bias."""
    rows = sum(part.rows for part in row_ranges)
    yield Counterpart(f"{theirs}.weight", (rows, inputs), row_ranges)
    if biased:
        biases = tuple(part._replace(ours=f"{part.ours}_bias") for part in row_ranges)
        yield Counterpart(f"{theirs}.bias", (rows,), biases)


def fused_qkv_rows(block: str, model: Model) -> Iterator[RowRange]:
    """Yield the rows of a fused matrix that stores queries, key and value of each key head together."""
    width, keys = model.head_width, model.key_heads
    queries = model.heads // keys * width
    for group in range(keys):
        if keys == model.heads:  # one parameter [3, heads, width]
            for k in range(3):
                yield RowRange(f"{block}.qkv", (k * keys + group) * width, width)
        else:  # queries, and [heads, 2, width] of keys and values
            yield RowRange(f"{block}.q", group * queries, queries)
            yield RowRange(f"{block}.kv", group * 2 * width, 2 * width)


def fused_layer(
    model: Model, i: int, *, stem: str, attention: str, norms: tuple[str, ...]
) -> Iterator[Counterpart]:
    """Yield the tensors of layer i where its four matrices have the names of Megatron-LM.

    `norms` are the names of the norms of attention and of the MLP; with one name, the MLP has no norm.
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
    """Return the value of the first key that is not None; raises `KeyError` of the first key."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise KeyError(keys[0])


def rotary_sizes(config: Config) -> dict[str, Any]:
    """Return our keys of rotary positions. Newer versions of transformers store theirs in a table."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        right = "default: wavelengths that are scaled are not in our GPT"
        raise ConfigError("rope_type", kind, right)
    base = rope.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10000.0
    return {"positions": "rotary", "rotary_base": float(base)}


def gelu_name(config: Config, key: str, default: str) -> str:
    """Return our name of their GELU."""
    value = config.get(key, default)
    if value not in OUR_GELUS:
        raise ConfigError(key, value, f"one of {', '.join(OUR_GELUS)}, which our GPT has")
    return OUR_GELUS[value]
