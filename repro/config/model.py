"""Architecture and sizes of a transformer, as read from a TOML file in `repro/config/models`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from repro.config import sizes
from repro.config.errors import require
from repro.config.sizes import at_most

ARCHITECTURES = ("gpt", "bert", "t5")
VARIANTS = {
    "norm": ("layer", "rms"),
    "positions": ("learned", "rotary", "alibi"),
    "mlp": ("gelu", "gelu-erf", "swiglu"),
    "biases": ("all", "qkv", "none"),
    "blocks": ("sequential", "parallel", "parallel-one-norm"),
}
"""Valid values of the model keys that select a variant of the transformer layer; the value of GPT-2 is the first."""
DEPARTURES = (
    *VARIANTS,
    *("norm_eps", "embedding_norm", "rotary_base", "rotary_fraction", "kv_heads", "tied"),
)
"""Keys of a model in which an architecture can differ from GPT-2, such as the norm or the position encoding."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Architecture and sizes of a transformer; only `gpt` can be trained, of others only parameters are counted."""

    name: str
    """Name of the model, for example `gpt2-1.5b`; by default the name of its file."""
    layers: int
    """Number of transformer blocks; for `t5`, blocks of the encoder."""
    hidden: int
    """Width h of the residual stream."""
    heads: int
    """Number of attention heads a, a divisor of `hidden` unless `head_dim` is given."""
    vocab: int
    """Vocabulary size V: number of rows of the token embedding, padding included."""
    seq: int
    """Sequence length s: number of tokens of a training sample. With learned positions, the maximum number."""
    ffn: int = 0
    """Width of the MLP's hidden layer; 0 means 4h."""
    architecture: str = "gpt"
    """Architecture: `gpt` (decoder-only, pre-norm), or `bert` or `t5`, whose parameters are only counted. The keys from
    `norm` to `blocks` change the layer of `gpt`, which is GPT-2's by default."""
    head_dim: int = 0
    """Width of one attention head if it is not hidden/heads (T5-11B); 0 means hidden/heads."""
    norm: str = "layer"
    """Norm: `layer` (mean and variance, weight and bias) or `rms` (root mean square, weight alone; 1910.07467)."""
    norm_eps: float = 1e-5
    """Constant that a norm adds to the variance (`layer`) or the mean square (`rms`)."""
    embedding_norm: bool = False
    """Whether a norm follows the token embedding (BLOOM)."""
    positions: str = "learned"
    """Position encoding: `learned`, `rotary` (2104.09864; pairs halves of a head) or `alibi` (2108.12409)."""
    rotary_base: float = 10000.0
    """Base of the wavelengths of rotary position embeddings, `rope_theta`."""
    rotary_fraction: float = 1.0
    """Fraction of a head's elements that rotary positions rotate (GPT-NeoX 20B: 0.25)."""
    mlp: str = "gelu"
    """Activation of the MLP: `gelu` (tanh approximation), `gelu-erf` (exact) or `swiglu` (with a gate; 2002.05202)."""
    kv_heads: int = 0
    """Number of key and value heads, each shared by heads/kv_heads query heads (2305.13245); 0: as many as `heads`."""
    biases: str = "all"
    """Linear layers with a bias: `all`, `qkv` (only query, key and value: Qwen2) or `none`."""
    tied: bool = True
    """Whether the token embedding is also the output matrix that computes the logits."""
    blocks: str = "sequential"
    """Order of attention and MLP in a layer: `sequential`, `parallel` with two norms (GPT-NeoX), or `parallel-one-norm`
    (Falcon 7B). In parallel, attention and MLP have the same input and share one all-reduce over tp."""
    decoder_layers: int = 0
    """Number of transformer blocks of the decoder (`t5` only)."""
    published_name: str = ""
    """Model size as the source prints it, for example `1.38B`; the true parameter count may differ."""
    published_params: float = 0.0
    """Published model size as a parameter count; 0 if the source prints none."""
    source: str = ""
    """Publication of the model's sizes: key of a source in the ledger of claims, with table or section."""
    note: str = ""
    """Remark on the model in `repro models`, for example that the published size differs from the true count."""

    def __post_init__(self) -> None:
        sizes.check_name("name", self.name)
        sizes.at_least(self, ("layers", "hidden", "heads", "vocab", "seq"), 1, sizes.POSITIVE_COUNT)
        sizes.at_least(self, ("ffn", "head_dim", "decoder_layers", "published_params"), 0, "0 or more")
        for key, known in (("architecture", ARCHITECTURES), *VARIANTS.items()):
            require(getattr(self, key) in known, key, getattr(self, key), f"one of {', '.join(known)}")
        right = f"a divisor of hidden = {self.hidden} (or give head_dim)"
        require(bool(self.head_dim) or self.hidden % self.heads == 0, "heads", self.heads, right)
        self._check_variants()
        self._check_sizes()

    def _check_variants(self) -> None:
        for key, value in self.departures().items():
            right = f"omitted with architecture = {self.architecture}; the key changes the layer of gpt only"
            require(self.architecture == "gpt", key, value, right)
        heads = self.heads
        divides = 0 <= self.kv_heads <= heads and heads % self.key_heads == 0
        right = f"a divisor of heads = {heads}, or 0 for one key head per attention head"
        require(divides, "kv_heads", self.kv_heads, right)
        require(self.norm_eps > 0, "norm_eps", self.norm_eps, "more than 0")
        rotary = self.positions == "rotary"
        for key, most in (("rotary_base", float("inf")), ("rotary_fraction", 1.0)):
            value = getattr(self, key)
            right = "omitted unless positions = rotary"
            require(rotary or key not in self.departures(), key, value, right)
            require(0 < value <= most, key, value, "more than 0" + (" and at most 1" if most == 1 else ""))
        right = f"a fraction of the head's {self.head_width} elements that gives an even number of at least 2"
        even = self.rotary_width >= 2 and self.rotary_width % 2 == 0
        require(not rotary or even, "rotary_fraction", self.rotary_fraction, right)

    def _check_sizes(self) -> None:
        for keys, limit in (
            (("layers", "decoder_layers"), sizes.LAYERS),
            (("hidden", "heads", "head_dim", "ffn"), sizes.WIDTH),
            (("vocab",), sizes.VOCAB),
            (("seq",), sizes.SEQ),
        ):
            for key in keys:
                at_most(key, getattr(self, key), limit)
        matrices = 2 * (self.heads + self.key_heads) * self.head_width + self.mlp_matrices * self.ffn_width
        blocks = (self.layers + self.decoder_layers) * matrices
        at_most("parameters", (blocks + self.vocab + self.seq) * self.hidden, sizes.PARAMETERS)

    @property
    def ffn_width(self) -> int:
        """Return the width of the MLP's hidden layer."""
        return self.ffn or 4 * self.hidden

    @property
    def head_width(self) -> int:
        """Return the width of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def key_heads(self) -> int:
        """Return the number of key heads, which is also the number of value heads."""
        return self.kv_heads or self.heads

    @property
    def mlp_matrices(self) -> int:
        """Return the number of matrices [hidden, ffn] of an MLP: up, down, and the gate of SwiGLU."""
        return 3 if self.mlp == "swiglu" else 2

    @property
    def rotary_width(self) -> int:
        """Return the number of elements of an attention head that rotary position embeddings rotate."""
        return int(self.head_width * self.rotary_fraction)

    def check_sequence(self, seq: int) -> None:
        """Raise `ConfigError` if samples of `seq` tokens exceed the model's learned positions or the maximum length."""
        learned = self.positions == "learned"
        require(
            seq <= self.seq or not learned, "seq", seq, f"at most the model's {self.seq} learned positions"
        )
        at_most("seq", seq, sizes.SEQ)

    def longer_sequence_note(self, seq: int) -> str:
        """Return a warning if samples of `seq` tokens are longer than those of the model's training, otherwise ''."""
        if seq <= self.seq:
            return ""
        rule = {
            "rotary": f"the base {self.rotary_base:g} of the rotary wavelengths is not adapted to longer samples",
            "alibi": "the slopes of ALiBi are not adapted to longer samples",
        }
        return f"Samples of {seq} tokens exceed the model's sequence length of {self.seq}; {rule[self.positions]}."

    def departures(self) -> dict[str, Any]:
        """Return the settings of layers, positions and output matrix that differ from GPT-2's, by key."""
        own = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.name in DEPARTURES}
        return {key: value for key, (value, default) in own.items() if value != default}
