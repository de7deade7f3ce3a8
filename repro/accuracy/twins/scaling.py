"""Similarity rules: degrees, model sizes and link rates of a scaled-down twin (derivation in docs/windtunnel.md).

Symbols: h width, l layers, s tokens of a sample, b samples of a replica, V vocabulary, t and d the tensor- and
data-parallel degree, F FLOP/s of a device, W bytes/s of a group's ring, e bytes of an element; with a prime, of the
twin. With h' = k h and b' s' = k b s, one factor for every link, W' = W (F'/F) (e'/e) / k, preserves both

    compute / tensor-parallel communication    8 h W / ((t - 1) e F)
    compute / data-parallel communication      4 b s W / ((d - 1)/d e F)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from repro.config import Layout, Model
from repro.config.errors import require
from repro.config.layout import ELEMENT_BYTES
from repro.config.system import System


@dataclass(frozen=True)
class TwinShape:
    """Number of nodes, ranks per node, and degrees of a scaled-down twin; `nodes * per_node = tp * pp * dp`."""

    nodes: int
    per_node: int
    tp: int
    pp: int
    dp: int

    def layout(self, original: Layout) -> Layout:
        """Return the layout of the scaled-down twin: its degrees, the replica batch of `original`, and fp32."""
        return replace(
            original,
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            global_batch=original.replica_batch * self.dp,
            stage_layers=(),
            precision="fp32",
            grad_dtype="precision",
            sp=original.sp and self.tp > 1,
            pa=original.pa and self.tp > 1,
            scatter_gather=original.scatter_gather and self.tp > 1 and self.pp > 1,
            cb=original.cb or self.dp == 1,
        )


def shape_of(layout: Layout, system: System, ranks: int, *, tp: int = 0) -> TwinShape:
    """Return nodes, ranks per node and degrees of the twin of `layout` on `system`, with at most `ranks` ranks.

    If `ranks` suffice, the shape is the original's. Otherwise the twin has the same nodes with fewer ranks each. Tensor
    parallelism stays inside a node, with the largest possible degree or `tp`. The twin has the same number of pipeline
    stages if ranks suffice, and the remaining ranks are replicas.

    Raises:
        ConfigError: The degrees do not divide the ranks.
    """
    devices = int(system.devices_per_node.known("devices_per_node", system=system.name))
    nodes = -(-layout.world // devices)
    devices = min(devices, layout.world)
    if layout.world <= ranks and tp in (0, layout.tp):
        return TwinShape(nodes, layout.world // nodes, layout.tp, layout.pp, layout.dp)
    if tp and layout.tp == devices:
        # Each tp group fills one node in the original experiment, and also in the scaled-down experiment.
        nodes = ranks // tp
    require(ranks % nodes == 0, "--ranks", ranks, f"a multiple of the {nodes} nodes of {system.name}")
    per_node = ranks // nodes
    inside = layout.tp <= devices
    degree = tp or (min(layout.tp, per_node) if inside else layout.tp * per_node // devices)
    require(degree >= 1 and ranks % degree == 0, "--tp", degree, f"a divisor of the number of ranks, {ranks}")
    stages = min(layout.pp, ranks // degree)
    require(ranks % (degree * stages) == 0, "--ranks", ranks, f"a multiple of tp {degree} x pp {stages}")
    return TwinShape(nodes, per_node, degree, stages, ranks // (degree * stages))


@dataclass(frozen=True)
class Scale:
    """Ratios of a twin's sizes and compute rate to those of the published experiment."""

    width: float
    """Ratio of model widths of scaled-down twin and original, k = h'/h."""
    tokens: float
    """Ratio of tokens per sample of scaled-down twin and original, s'/s; as near to k as integers allow."""
    element: float
    """Ratio of bytes per element of scaled-down twin and original, e'/e."""
    rate: float = 1.0
    """Ratio of compute FLOP/s of scaled-down twin and original, F'/F, as the mean of all layouts of the comparison."""

    def tp_link(self, before: Layout, after: Layout) -> float:
        """Return W'/W, the tensor-parallel ring rate of the twin over the original's; 0 without such a ring."""
        if after.tp == 1:
            return 0.0
        return self.rate * self.element / self.width * (after.tp - 1) / (before.tp - 1)

    def dp_link(self, before: Layout, after: Layout) -> float:
        """Return W'/W, the data-parallel ring rate of the twin over the original's; 0 without such a ring."""
        if after.dp == 1:
            return 0.0
        hops = (1 - 1 / after.dp) / (1 - 1 / before.dp)
        gradients = self.element * ELEMENT_BYTES[before.precision] / before.grad_bytes
        return self.rate * gradients / self.tokens * hops

    def pp_link(self, before: Layout, after: Layout, layers: tuple[int, int]) -> float:
        """Return link rate between pipeline stages, twin over original, for their `layers`; 0 without stages."""
        if after.pp == 1:
            return 0.0
        stage = (layers[0] / before.pp) / (layers[1] / after.pp)
        slice_ = after.tp / before.tp * _sliced(before) / _sliced(after)
        return self.rate * self.element / self.width * stage * slice_


def _sliced(layout: Layout) -> int:
    """Return the number of parts into which tp ranks split the tensor between pipeline stages; each rank sends one."""
    return layout.tp if layout.scatter_gather or layout.sp else 1


def scaled_model(original: Model, seq: int, *, name: str, width: int, layers: int, tp: int) -> Model:
    """Return a model of `width` and `layers` whose attention and vocabulary have the original's share of all FLOP.

    `seq` is the number of tokens of the original's samples. Tokens and heads scale with h'/h, in multiples of `tp`.

    Raises:
        ConfigError: The original's layer is not GPT-2's, or `tp` does not divide the width.
    """
    other = next(iter(original.departures()), "")
    right = f"a model with GPT-2's layer, which twins must have; {original.name} has a different {other}"
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
    """Return a model width near the original's width divided by `part`, as a multiple of 4 `tp`."""
    return max(1, round(original.hidden / part / (4 * tp))) * 4 * tp
