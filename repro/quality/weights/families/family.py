"""What a family of transformers' models says of itself, and what several of them need to say it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from repro.config import ConfigError, Model
from repro.quality.weights.rows import Counterpart, Stretch, same

HEAD = "head.output"
GELUS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu-erf"}
"""Their names of our two: the tanh approximation, and the exact one."""
TO_GELUS = {"gelu": "gelu_new", "gelu-erf": "gelu"}
NEVER = re.compile(r"(?!)")
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """Models of one kind.  Names of tensors are without `prefix`, which old files lack."""

    name: str
    """For a person."""
    types: tuple[str, ...]
    """`model_type` of what is read; the first one is written."""
    architecture: str
    """The class of transformers."""
    prefix: str
    head: str
    """The logits' matrix, which has no prefix and which files may have although it is the embedding."""
    fixed: Config
    """What our GPT has no other value for; left out, a key has this one."""
    sizes: Callable[[Config], dict[str, Any]]
    """Keys of our model from theirs; raises `KeyError` for one that is missing."""
    layer: Callable[[Model, int], Iterator[Counterpart]]
    """The tensors of layer i."""
    ends: Callable[[Model], Iterator[Counterpart]]
    """Those outside layers, but for the head."""
    configuration: Callable[[Model], dict[str, Any]]
    """Keys of theirs from our model, but for the vocabulary and what is `fixed`."""
    passed_over: re.Pattern[str] = NEVER
    """Tensors that are no weights: masks and wavelengths in old files."""

    def model(self, config: Config, name: str) -> Model:
        """Ours of their configuration.  Raises `ConfigError` where our GPT has no such layer."""
        for key, right in self.fixed.items():
            value = config.get(key, right)
            if value != right:
                raise ConfigError(key, value, f"{right}, as our GPT has it")
        try:
            return Model(name=name, **self.sizes(config))
        except KeyError as error:
            says = f"is missing from {self.name}'s configuration"
            raise ConfigError(str(error.args[0]), says=says) from None
        except TypeError as error:
            raise ConfigError("sizes", says=f"must be whole numbers: {error}") from None

    def counterparts(self, model: Model) -> Iterator[Counterpart]:
        """All of a model's tensors."""
        yield from self.ends(model)
        for i in range(model.layers):
            yield from self.layer(model, i)
        if not model.tied:
            yield same(self.head, HEAD, model.vocab, model.hidden)

    def document(self, model: Model, vocab: int) -> dict[str, Any]:
        """`config.json` of a model."""
        return {
            "architectures": [self.architecture],
            "model_type": self.types[0],
            **self.fixed,
            **self.configuration(model),
            "tie_word_embeddings": model.tied,
            "vocab_size": vocab,
            # Ids beyond the vocabulary make transformers warn; not every model has an end of text of its own.
            "bos_token_id": vocab - 1,
            "eos_token_id": vocab - 1,
            "torch_dtype": "float32",
        }


def norm(theirs: str, ours: str, model: Model) -> Iterator[Counterpart]:
    """A norm's weight, and its bias if it has one."""
    yield same(f"{theirs}.weight", ours, model.hidden)
    if model.norm == "layer":
        yield same(f"{theirs}.bias", f"{ours}_bias", model.hidden)


def linear(
    theirs: str, inputs: int, stretches: Callable[[str], tuple[Stretch, ...]], *, biased: bool
) -> Iterator[Counterpart]:
    """A matrix [out, in] and its bias; `stretches` of the ending that biases have in our names, or of none."""
    of_weight = stretches("")
    rows = sum(stretch.rows for stretch in of_weight)
    yield Counterpart(f"{theirs}.weight", (rows, inputs), of_weight)
    if biased:
        yield Counterpart(f"{theirs}.bias", (rows,), stretches("_bias"))


def whole(ours: str, rows: int, first: int = 0) -> Callable[[str], tuple[Stretch, ...]]:
    """One stretch of a parameter, for `linear`."""
    return lambda ending: (Stretch(ours + ending, first, rows),)


def by_group(block: str, model: Model) -> Callable[[str], tuple[Stretch, ...]]:
    """Query, key and value in one matrix: for each head of keys its queries, itself and its value."""
    width, keys = model.head_width, model.key_heads
    queries = model.heads // keys * width

    def stretches(ending: str) -> tuple[Stretch, ...]:
        found = []
        for group in range(keys):
            if keys == model.heads:  # one parameter: all queries, all keys, all values
                ours = f"{block}.qkv{ending}"
                found += [Stretch(ours, (k * keys + group) * width, width) for k in range(3)]
            else:  # two, of which the other one is by heads as well
                found.append(Stretch(f"{block}.q{ending}", group * queries, queries))
                found.append(Stretch(f"{block}.kv{ending}", group * 2 * width, 2 * width))
        return tuple(found)

    return stretches


def projections(theirs: str, i: int, model: Model, attention: str, *, biased: bool) -> Iterator[Counterpart]:
    """Layer i's four matrices where they are called as in Megatron-LM: in `attention`, then in `mlp`, of `theirs`."""
    ours, h, f = f"blocks.{i}", model.hidden, model.ffn_width
    for name, inputs, stretches in (
        (f"{attention}.query_key_value", h, by_group(f"{ours}.attention", model)),
        (f"{attention}.dense", model.heads * model.head_width, whole(f"{ours}.attention.out", h)),
        ("mlp.dense_h_to_4h", h, whole(f"{ours}.mlp.up", f)),
        ("mlp.dense_4h_to_h", f, whole(f"{ours}.mlp.down", h)),
    ):
        yield from linear(f"{theirs}.{name}", inputs, stretches, biased=biased)


def first_of(config: Config, *keys: str) -> Any:
    """The value of the first key that is there and says something; raises `KeyError` of the first."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise KeyError(keys[0])


def rotary(config: Config) -> dict[str, Any]:
    """Their rotary positions as ours; of a later transformers in a table, of an earlier one beside it."""
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = told.get("rope_type", told.get("type", "default"))
    if kind != "default":
        right = "default: wavelengths that are scaled are not in our GPT"
        raise ConfigError("rope_type", kind, right)
    base = told.get("rope_theta") or config.get("rope_theta") or config.get("rotary_emb_base") or 10000.0
    return {"positions": "rotary", "rotary_base": float(base)}


def gelu(config: Config, key: str, default: str) -> str:
    """Our name of their GELU."""
    value = config.get(key, default)
    if value not in GELUS:
        raise ConfigError(key, value, f"one of {', '.join(GELUS)}, which our GPT has")
    return GELUS[value]
