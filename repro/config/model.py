"""A model: architecture and sizes only, read from a data file in `repro/models/files`."""

from __future__ import annotations

from dataclasses import dataclass

from repro.config import sizes
from repro.config.errors import require
from repro.config.sizes import at_most

ARCHITECTURES = ("gpt", "bert", "t5")


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
    """Longest sequence s, the rows of the learned position embedding."""
    ffn: int = 0
    """Width of the MLP; 0 means 4h."""
    architecture: str = "gpt"
    """`gpt` (decoder-only, pre-LayerNorm, tied embedding), `bert` or `t5` (counted only)."""
    head_dim: int = 0
    """Width of one head where it is not hidden/heads (T5-11B); 0 means hidden/heads."""
    decoder_layers: int = 0
    """Blocks of the decoder (`t5` only)."""
    published_name: str = ""
    """The size as the source prints it, for example `1.38B`; the true count may differ."""
    published_params: float = 0.0
    """That size as a number of parameters; 0 where the source prints none."""
    source: str = ""
    """Where the sizes were published (a source key of the ledger, with table or section)."""
    note: str = ""
    """What a reader should know, for example that the published size is not the true count."""

    def __post_init__(self) -> None:
        sizes.check_name("name", self.name)
        for key in ("layers", "hidden", "heads", "vocab", "seq"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "a whole number of at least 1")
        for key in ("ffn", "head_dim", "decoder_layers", "published_params"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "0 or more")
        require(
            self.architecture in ARCHITECTURES,
            "architecture",
            self.architecture,
            f"one of {', '.join(ARCHITECTURES)}",
        )
        require(
            bool(self.head_dim) or self.hidden % self.heads == 0,
            "heads",
            self.heads,
            f"a divisor of hidden = {self.hidden} (or give head_dim)",
        )
        self._check_sizes()

    def _check_sizes(self) -> None:
        for keys, limit in (
            (("layers", "decoder_layers"), sizes.LAYERS),
            (("hidden", "heads", "head_dim", "ffn"), sizes.WIDTH),
            (("vocab",), sizes.VOCAB),
            (("seq",), sizes.SEQ),
        ):
            for key in keys:
                at_most(key, getattr(self, key), limit)
        matrices = 4 * self.heads * self.head_width + 2 * self.ffn_width
        blocks = (self.layers + self.decoder_layers) * matrices
        at_most("parameters", (blocks + self.vocab + self.seq) * self.hidden, sizes.PARAMETERS)

    @property
    def ffn_width(self) -> int:
        """Width of the MLP's hidden layer."""
        return self.ffn or 4 * self.hidden

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden // self.heads
