"""Context parallelism: the tokens of each sample are split over the cp group, keys and values are gathered.

Symbols: b samples of s tokens, rank i of cp, and chunks of c = s / 2cp tokens.  The keys of this tp rank have width
h_kv, and an element has e bytes.

A rank has chunks i and 2cp-1-i of every sample, one early and one late, so that causal attention is equal work on all
ranks.  Chunk k attends to k c + c/2 keys on average, and the two together to (2cp-1) c + c = s (2407.21783 sec. 3.3.2;
Megatron-core uses the same split).  Outside attention the model processes a sequence of s/cp tokens without
communication.  Learned and rotary positions, ALiBi and dropout use each token's position in the full sample.

In attention a rank's queries need all preceding keys and values.  There are two methods: a ring that passes keys while
scores are computed (2310.01889), or an all-gather before the scores.  This module uses the all-gather, as Llama 3.
Heads that share keys make the keys small, the step is one collective, and any mask works.  Per micro-batch, each layer
sends

    forward    all-gather of keys and values       2 b s h_kv e (cp-1)/cp
    backward   the same again, then a reduce-scatter of their gradients, as much each

Backward gathers again, because retaining gathered keys and values would need cp times a rank's own in every layer.
A recomputed layer has gathered them in its second forward pass, directly before backward; its two all-gathers are those
of forward and recomputation.

Gradients of parameters are sums over tokens.  They are averaged over dp x cp as one group, which also shards
the model states of ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repro.config.enums import Category
from repro.parallel import storage
from repro.parallel.comm import Group

PURPOSE = "keys and values"
Attention = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Function of queries [b, a, c, d] of this rank's chunk 0 or 1 and of keys and values [b, n, k, d] up to the chunk's
end; returns [b, a, c, d]."""


class Positions(NamedTuple):
    """Positions of a rank's rows: row j is at `first` + j in the sample, plus `jump` from row `split` on."""

    first: int
    split: int = 0
    jump: int = 0

    def rows(self, table: Tensor, count: int) -> Tensor:
        """Return the rows of `table` [s, ...] at the first `count` positions."""
        if not self.jump:
            return table[self.first : self.first + count]
        second = self.first + self.split + self.jump
        return torch.cat(
            [table[self.first : self.first + self.split], table[second : second + count - self.split]]
        )


def chunks(rank: int, size: int, s: int) -> tuple[range, range]:
    """Return the positions of the two chunks of a sample of s tokens that one of `size` ranks has."""
    c, late = s // (2 * size), 2 * size - 1 - rank
    return range(rank * c, (rank + 1) * c), range(late * c, (late + 1) * c)


def positions(cp: Group, count: int, part: int = 0, parts: int = 1) -> Positions:
    """Return the positions of `count` rows: this rank's, or one of the `parts` of sequence parallelism."""
    start = part * count
    if cp.size == 1:
        return Positions(start)
    early, late = chunks(cp.rank, cp.size, cp.size * count * parts)
    c = len(early)
    if start >= c:
        return Positions(late.start + start - c)
    if start + count <= c or early.stop == late.start:
        return Positions(early.start + start)
    return Positions(early.start + start, c - start, late.start - early.stop)


def own_tokens(tokens: Tensor, cp: Group) -> Tensor:
    """Return this rank's [b, s/cp] of [b, s]."""
    if cp.size == 1:
        return tokens
    own = [tokens[:, at.start : at.stop] for at in chunks(cp.rank, cp.size, tokens.shape[1])]
    return storage.mark(torch.cat(own, 1), Category.OTHER)


def _gather(k: Tensor, v: Tensor, cp: Group) -> Tensor:
    """Return keys and values [b, n, s/cp, d] of all ranks in the order of the sample: [2, b, s, n, d]."""
    b, n, s, d = k.shape
    c = s // 2
    packed = storage.empty(2 * k.numel(), k, Category.COMMUNICATION).view(2, 2, b, c, n, d)
    for into, x in zip(packed.unbind(1), (k, v), strict=True):
        into.copy_(x.transpose(1, 2).unflatten(1, (2, c)).transpose(0, 1))
    parts = storage.empty(cp.size * packed.numel(), k, Category.COMMUNICATION)
    cp.all_gather(parts, packed.view(-1), PURPOSE).wait()
    early, late = parts.view(cp.size, 2, 2, b, c, n, d).permute(1, 2, 3, 0, 4, 5, 6).unbind(0)
    gathered = torch.empty(2, b, 2 * cp.size, c, n, d, dtype=k.dtype, device=k.device)
    gathered[:, :, : cp.size].copy_(early)
    gathered[:, :, cp.size :].copy_(late.flip(2))
    return gathered.flatten(2, 3)


def _scatter(gradients: tuple[Tensor, Tensor], s: int, cp: Group) -> tuple[Tensor, ...]:
    """Sum gradients [b, n, k, d] of the first k keys and values over all ranks; return the rank's [b, n, s/cp, d]."""
    b, n, _, d = gradients[0].shape
    c = s // (2 * cp.size)
    parts = storage.zeros(2 * b * s * n * d, gradients[0], Category.COMMUNICATION)
    early, late = parts.view(cp.size, 2, 2, b, c, n, d).unbind(1)
    for i, gradient in enumerate(gradients):
        of_chunks = gradient.transpose(1, 2).unflatten(1, (-1, c)).transpose(0, 1)  # [k/c, b, c, n, d]
        early[:, i].copy_(of_chunks[: cp.size])
        late[2 * cp.size - len(of_chunks) :, i].copy_(of_chunks[cp.size :].flip(0))
    own = storage.empty(parts.numel() // cp.size, parts, Category.COMMUNICATION)
    cp.reduce_scatter(own, parts, PURPOSE).wait()
    own = storage.mark(own, Category.OTHER).view(2, 2, b, c, n, d)
    return tuple(x.transpose(0, 1).flatten(1, 2).transpose(1, 2) for x in own.unbind(1))


class _Keys(torch.autograd.Function):
    """Gather keys and values, and return those before the end of each of this rank's chunks: k, v, k, v."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, cp: Group) -> tuple[Tensor, ...]:
        gathered = _gather(k, v, cp)
        ctx.cp, ctx.s = cp, gathered.shape[2]
        ends = (at.stop for at in chunks(cp.rank, cp.size, ctx.s))
        return tuple(x[:, :end].transpose(1, 2) for end in ends for x in gathered.unbind(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        for early, late in zip(gradients[:2], gradients[2:], strict=True):
            late[:, :, : early.shape[2]].add_(early)
        return *_scatter((gradients[2], gradients[3]), ctx.s, ctx.cp), None


class _SavedTensors:
    """Tensors that autograd saves for the attention of two chunks, in less memory than by default.

    A view of the gathered keys and values is saved as its offset in them.  They are gathered again when autograd
    reads the first such view.  A chunk's result is saved as a view of the joined one, which the next layer retains.
    """

    def __init__(self, k: Tensor, v: Tensor, cp: Group, gathered: int):
        """`gathered`: the storage that is gathered again in backward; 0 for none."""
        self._own, self.cp, self._gathered = (k.detach(), v.detach()), cp, gathered
        self._boxes: list[_Box] = []
        self._again: Tensor | None = None
        self._reads = self._views = 0

    def pack(self, x: Tensor) -> _Box:
        """Replace a tensor that autograd saves by a box."""
        box = _Box(x)
        if _address(x) == self._gathered:
            box.tensor, box.geometry = None, (x.shape, x.stride(), x.storage_offset())
            self._views += 1
        self._boxes.append(box)
        return box

    def join(self, results: list[Tensor]) -> Tensor:
        """Join both chunks' results [b, a, c, d] to [b, a, 2c, d], in memory token by token."""
        joined = torch.cat([y.transpose(1, 2) for y in results], 1).transpose(1, 2)
        places = dict(zip(map(_address, results), joined.detach().chunk(2, 2), strict=True))
        for box in self._boxes:
            if box.tensor is not None and box.tensor.shape == results[0].shape:
                box.tensor = places.get(_address(box.tensor), box.tensor)
        self._boxes.clear()
        return joined

    def unpack(self, box: _Box) -> Tensor:
        """Return the saved tensor when autograd needs it."""
        if box.tensor is not None:
            return box.tensor
        if self._again is None:
            self._again = _gather(*self._own, self.cp)
        found = self._again.as_strided(*box.geometry)
        self._reads += 1
        if self._reads == self._views:
            self._again = None
        return found


@dataclass(slots=True, eq=False)
class _Box:
    """One saved tensor: the tensor, or its shape, strides and offset in the gathered keys and values."""

    tensor: Tensor | None
    geometry: Any = None


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def attend_to_gathered(
    q: Tensor, k: Tensor, v: Tensor, cp: Group, attention: Attention, *, again: bool
) -> Tensor:
    """Return causal attention of this rank's queries [b, a, s/cp, d] to the keys and values of all ranks.

    `k` and `v`: this rank's keys and values [b, n, s/cp, d].  `again`: gather again in backward; otherwise the
    gathered tensors are retained for it.  So are copies that attention makes: ALiBi's on shared heads, those of
    dropped weights.
    """
    keys = _Keys.apply(k, v, cp)
    saved = _SavedTensors(k, v, cp, _address(keys[0]) if again else 0)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        pairs = zip(q.chunk(2, 2), keys[::2], keys[1::2], strict=True)
        results = [attention(mine, k, v, chunk) for chunk, (mine, k, v) in enumerate(pairs)]
        return saved.join(results)
