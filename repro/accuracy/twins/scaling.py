"""The rules of similarity: sizes of the twin's model, and what its links must bring.

Symbols as in the papers: h width, l layers, s tokens of a sample, b samples of a replica, V vocabulary, t and d the
tensor- and data-parallel degree, e bytes of an element, F FLOP/s of a device while it computes, W bytes/s of a group's
ring.  With h' = k h and b' s' = k b s both

    compute / tensor-parallel communication    8 h W / ((t - 1) e F)
    compute / data-parallel communication      4 b s W / ((d - 1)/d e F)

are kept by one factor for every link, W' = W (F'/F) (e'/e) / k.  docs/windtunnel.md has the derivation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from repro.config import Layout, Model
from repro.config.errors import require


@dataclass(frozen=True)
class Scale:
    """How much smaller the twin is; each is twin over original."""

    width: float
    """k = h'/h."""
    tokens: float
    """Of a sample, s'/s; as near to k as whole tokens allow."""
    element: float
    """e'/e."""
    rate: float = 1.0
    """F'/F, of all layouts of the comparison."""

    def tp_link(self, before: Layout, after: Layout) -> float:
        """W'/W for tensor parallelism; 0 where the twin has none."""
        if after.tp == 1:
            return 0.0
        return self.rate * self.element / self.width * (after.tp - 1) / (before.tp - 1)

    def dp_link(self, before: Layout, after: Layout) -> float:
        """W'/W for data parallelism; 0 where the twin has none."""
        if after.dp == 1:
            return 0.0
        hops = (1 - 1 / after.dp) / (1 - 1 / before.dp)
        return self.rate * self.element / self.tokens * hops

    def pp_link(self, before: Layout, after: Layout, layers: tuple[int, int]) -> float:
        """W'/W for messages between stages, of which each has l/p of `layers` (before, after); 0 without."""
        if after.pp == 1:
            return 0.0
        stage = (layers[0] / before.pp) / (layers[1] / after.pp)
        slice_ = after.tp / before.tp * _sliced(before) / _sliced(after)
        return self.rate * self.element / self.width * stage * slice_


def _sliced(layout: Layout) -> int:
    """Parts of a boundary tensor of which each rank sends one."""
    return layout.tp if layout.scatter_gather or layout.sp else 1


def model_of(original: Model, seq: int, *, name: str, width: int, layers: int, tp: int) -> Model:
    """A model of `width` and `layers` in which attention and vocabulary have the original's share of a layer's FLOP.

    `seq`: tokens of a sample of the original; the twin's are h'/h of that, in a multiple of `tp`.  Heads: as near to
    h'/h of the original's as `tp` and the width allow.  Raises `ConfigError`.
    """
    other = next(iter(original.departures()), "")
    right = f"of GPT-2's layer, of which the rules of similarity are; {original.name} has another {other}"
    require(not other, "model", original.name, right)
    require(width % tp == 0, "--width", width, f"a multiple of tp = {tp}")
    k = width / original.hidden
    tokens = max(tp, tp * round(k * seq / tp))
    vocab = max(8 * tp, tp * round(original.vocab * k * layers / original.layers / tp))
    possible = [n for n in range(tp, width + 1, tp) if width % n == 0]
    heads = min(possible, key=lambda n: abs(math.log(n / (k * original.heads))))
    return replace(
        original,
        name=name,
        hidden=width,
        layers=layers,
        heads=heads,
        vocab=vocab,
        seq=tokens,
        ffn=round(original.ffn * k / tp) * tp,
        head_dim=0,
        published_name="",
        published_params=0.0,
        source="",
        note="",
    )


def width_near(original: Model, part: int, tp: int) -> int:
    """A width of about 1/`part` of the original's, in multiples of 4 a rank."""
    return max(1, round(original.hidden / part / (4 * tp))) * 4 * tp
