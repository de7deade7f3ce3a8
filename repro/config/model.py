"""A model: architecture and sizes only, read from a data file in `repro/config/models`."""

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
"""Values of a layer's keys, GPT-2's first."""
DEPARTURES = (
    *VARIANTS,
    *("norm_eps", "embedding_norm", "rotary_base", "rotary_fraction", "kv_heads", "tied"),
)
"""Keys whose values can differ from GPT-2's."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Sizes of one transformer.  Only `gpt` can be trained; `bert` and `t5` are counted."""

    name: str
    """The file's name without its ending, for example `gpt2-1.5b`."""
    layers: int
    """Transformer blocks (the encoder's, for `t5`)."""
    hidden: int
    """Width h of the residual stream."""
    heads: int
    """Attention heads; `hidden` must divide by it unless `head_dim` is given."""
    vocab: int
    """Rows of the token embedding V, padding included."""
    seq: int
    """Sequence s of the model's training. Learned positions have an embedding of so many rows, its maximum."""
    ffn: int = 0
    """Width of the MLP; 0 means 4h."""
    architecture: str = "gpt"
    """`gpt` (decoder-only, norms first; by default GPT-2's layer, which the keys from `norm` on change), or `bert` or
    `t5`, which are only counted."""
    head_dim: int = 0
    """Width of one head if it is not hidden/heads (T5-11B); 0 means hidden/heads."""
    norm: str = "layer"
    """`layer` (mean and variance, weight and bias) or `rms` (root mean square, weight alone; 1910.07467)."""
    norm_eps: float = 1e-5
    """Constant that is added to the variance or to the mean square."""
    embedding_norm: bool = False
    """Whether a norm follows the token embedding (BLOOM)."""
    positions: str = "learned"
    """`learned` (an embedding), `rotary` (2104.09864; halves of a head are paired) or `alibi` (2108.12409)."""
    rotary_base: float = 10000.0
    """Base of the rotary wavelengths, rope theta."""
    rotary_fraction: float = 1.0
    """Fraction of a head's elements that rotary positions rotate (GPT-NeoX 20B: 0.25)."""
    mlp: str = "gelu"
    """`gelu` (tanh approximation), `gelu-erf` (exact) or `swiglu` (gate and up, two matrices of `ffn`; 2002.05202)."""
    kv_heads: int = 0
    """Heads of keys and values, each shared by heads/kv_heads queries (2305.13245); 0: as many as heads."""
    biases: str = "all"
    """Linear layers with a bias: `all`, `qkv` (only query, key and value: Qwen2) or `none`."""
    tied: bool = True
    """Whether the logits' matrix is the token embedding."""
    blocks: str = "sequential"
    """Order of attention and MLP in a layer: `sequential`, or on the same input with one sum over tp, `parallel` with
    two norms (GPT-NeoX) or `parallel-one-norm` (Falcon 7B)."""
    decoder_layers: int = 0
    """Blocks of the decoder (`t5` only)."""
    published_name: str = ""
    """Size as the source prints it, for example `1.38B`; the true count may differ."""
    published_params: float = 0.0
    """Published size as a number of parameters; 0 if the source prints none."""
    source: str = ""
    """Publication of the sizes: a source key of the ledger, with table or section."""
    note: str = ""
    """Remark for readers, for example that the published size is not the true count."""

    def __post_init__(self) -> None:
        sizes.check_name("name", self.name)
        sizes.at_least(self, ("layers", "hidden", "heads", "vocab", "seq"), 1, sizes.POSITIVE_COUNT)
        sizes.at_least(self, ("ffn", "head_dim", "decoder_layers", "published_params"), 0, "0 or more")
        for key, known in (("architecture", ARCHITECTURES), *VARIANTS.items()):
            require(getattr(self, key) in known, key, getattr(self, key), f"one of {', '.join(known)}")
        require(
            bool(self.head_dim) or self.hidden % self.heads == 0,
            "heads",
            self.heads,
            f"a divisor of hidden = {self.hidden} (or give head_dim)",
        )
        self._check_variants()
        self._check_sizes()

    def _check_variants(self) -> None:
        for key, value in self.departures().items():
            right = f"left out: a {self.architecture} is only counted, as published"
            require(self.architecture == "gpt", key, value, right)
        heads = self.heads
        whole = 0 <= self.kv_heads <= heads and heads % self.key_heads == 0
        require(whole, "kv_heads", self.kv_heads, f"a divisor of heads = {heads}, or 0 for as many")
        require(self.norm_eps > 0, "norm_eps", self.norm_eps, "more than 0")
        rotary = self.positions == "rotary"
        for key, most in (("rotary_base", float("inf")), ("rotary_fraction", 1.0)):
            value = getattr(self, key)
            right = "left out unless positions = rotary"
            require(rotary or key not in self.departures(), key, value, right)
            require(0 < value <= most, key, value, "more than 0" + (" and at most 1" if most == 1 else ""))
        right = f"a part of the head's {self.head_width} elements that is an even number of at least 2"
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
        """Return the number of heads of keys and of values."""
        return self.kv_heads or self.heads

    @property
    def mlp_matrices(self) -> int:
        """Return the number of hidden x ffn matrices of an MLP: up and down, and the gate."""
        return 3 if self.mlp == "swiglu" else 2

    @property
    def rotary_width(self) -> int:
        """Return the elements of a head that rotary positions rotate."""
        return int(self.head_width * self.rotary_fraction)

    def check_sequence(self, seq: int) -> None:
        """Raise `ConfigError` if samples of `seq` tokens are longer than the embedding of learned positions."""
        learned = self.positions == "learned"
        require(
            seq <= self.seq or not learned, "seq", seq, f"at most the model's {self.seq} learned positions"
        )
        at_most("seq", seq, sizes.SEQ)

    def longer_sequence_note(self, seq: int) -> str:
        """Return one sentence if samples of `seq` tokens are longer than those of the model's training."""
        if seq <= self.seq:
            return ""
        rule = {
            "rotary": f"rotary wavelengths keep base {self.rotary_base:g}",
            "alibi": "ALiBi's slopes remain",
        }
        return f"Samples of {seq} tokens are longer than the model's {self.seq}: {rule[self.positions]}."

    def departures(self) -> dict[str, Any]:
        """Return the values of a layer, of positions and of the head that differ from GPT-2's, by key."""
        own = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.name in DEPARTURES}
        return {key: value for key, (value, default) in own.items() if value != default}
