"""Context parallelism: a rank has s/cp of a sample's s tokens, and attention all-gathers keys and values.

Rank i has chunks i and 2cp-1-i of the sample's 2cp chunks, so that causal attention is equal work on all ranks
(2407.21783 sec. 3.3.2, as in Megatron-core).  For a micro-batch of b samples, keys of width h_kv on a tp rank and
elements of e bytes, a rank sends in each layer

    forward    all-gather of keys and values                    2 b s h_kv e (cp-1)/cp bytes
    backward   the same all-gather                              as many bytes
               reduce-scatter of keys' and values' gradients    as many bytes

Backward repeats the all-gather to save memory: gathered keys and values are cp times as large as those of one rank. If
a layer is recomputed, the all-gather of its second forward pass serves backward too. Gradients of parameters are
averaged over dp x cp as one group, which also shards the model states of ZeRO.
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
"""Function that returns the attention [b, a, c, d] of one chunk of queries, from q, k, v and the chunk's index (0 or 1)
on this rank. q [b, a, c, d]: c tokens of a heads of width d. k, v [b, n, k, d]: keys and values of the sample's first k
tokens, up to the chunk's end, for n key heads."""


class Positions(NamedTuple):
    """Positions of a rank's tokens in the sample: token j is at `first` + j, plus `jump` if j >= `split`."""

    first: int
    split: int = 0
    jump: int = 0

    def rows(self, table: Tensor, count: int) -> Tensor:
        """Return the rows of the rank's first `count` tokens from `table` [s, ...], which has one row per position."""
        if not self.jump:
            return table[self.first : self.first + count]
        second = self.first + self.split + self.jump
        return torch.cat(
            [table[self.first : self.first + self.split], table[second : second + count - self.split]]
        )


def chunks(rank: int, size: int, s: int) -> tuple[range, range]:
    """Return the position ranges of the two chunks of a sample of s tokens that belong to `rank` of `size` cp ranks."""
    c, late = s // (2 * size), 2 * size - 1 - rank
    return range(rank * c, (rank + 1) * c), range(late * c, (late + 1) * c)


def positions(cp: Group, count: int, part: int = 0, parts: int = 1) -> Positions:
    """Return the positions of this rank's `count` tokens; with sequence parallelism, of tp rank `part` of `parts`."""
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
    """Return the tokens [b, s/cp] of this context-parallel rank, selected from the tokens [b, s] of full samples."""
    if cp.size == 1:
        return tokens
    own = [tokens[:, at.start : at.stop] for at in chunks(cp.rank, cp.size, tokens.shape[1])]
    return storage.mark(torch.cat(own, 1), Category.OTHER)


def _gather(k: Tensor, v: Tensor, cp: Group) -> Tensor:
    """All-gather keys k and values v [b, n, s/cp, d] over the cp ranks to [2, b, s, n, d], in token order."""
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
    """Reduce-scatter gradients [b, n, k, d] of keys and values over the cp ranks to [b, n, s/cp, d] per rank."""
    b, n, _, d = gradients[0].shape
    c = s // (2 * cp.size)
    parts = storage.zeros(2 * b * s * n * d, gradients[0], Category.COMMUNICATION)
    early, late = parts.view(cp.size, 2, 2, b, c, n, d).unbind(1)
    for i, gradient in enumerate(gradients):
        # [k/c, b, c, n, d]: k keys in chunks of c tokens, b samples, n heads of d elements
        of_chunks = gradient.transpose(1, 2).unflatten(1, (-1, c)).transpose(0, 1)
        early[:, i].copy_(of_chunks[: cp.size])
        late[2 * cp.size - len(of_chunks) :, i].copy_(of_chunks[cp.size :].flip(0))
    own = storage.empty(parts.numel() // cp.size, parts, Category.COMMUNICATION)
    cp.reduce_scatter(own, parts, PURPOSE).wait()
    own = storage.mark(own, Category.OTHER).view(2, 2, b, c, n, d)
    return tuple(x.transpose(0, 1).flatten(1, 2).transpose(1, 2) for x in own.unbind(1))


class _Keys(torch.autograd.Function):
    """Gather keys and values over cp; return those up to the end of the rank's first chunk, and of its second chunk."""

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
    """Saved-tensor hooks of autograd that reduce the memory of attention with gathered keys and values.

    Views of gathered keys and values are saved as offsets, and backward gathers them again. The attention output of a
    chunk is saved as a view of the joined output of both chunks, which the next layer retains in any case.
    """

    def __init__(self, k: Tensor, v: Tensor, cp: Group, gathered: int):
        """Create the hooks. `gathered`: address of keys and values that backward gathers again; 0 to retain them."""
        self._own, self.cp, self._gathered = (k.detach(), v.detach()), cp, gathered
        self._boxes: list[_Box] = []
        self._again: Tensor | None = None
        self._reads = self._views = 0

    def pack(self, x: Tensor) -> _Box:
        """Return the object that autograd saves for backward instead of tensor `x`."""
        box = _Box(x)
        if _address(x) == self._gathered:
            box.tensor, box.geometry = None, (x.shape, x.stride(), x.storage_offset())
            self._views += 1
        self._boxes.append(box)
        return box

    def join(self, results: list[Tensor]) -> Tensor:
        """Concatenate both chunks' attention outputs [b, a, c, d] to [b, a, 2c, d] in memory order [b, 2c, a, d]."""
        joined = torch.cat([y.transpose(1, 2) for y in results], 1).transpose(1, 2)
        places = dict(zip(map(_address, results), joined.detach().chunk(2, 2), strict=True))
        for box in self._boxes:
            if box.tensor is not None and box.tensor.shape == results[0].shape:
                box.tensor = places.get(_address(box.tensor), box.tensor)
        self._boxes.clear()
        return joined

    def unpack(self, box: _Box) -> Tensor:
        """Return the tensor that backward needs, from the object that forward saved in place of the tensor (`pack`)."""
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
    """Tensor saved for backward: the tensor, or shape, strides and offset of a view of the gathered keys and values."""

    tensor: Tensor | None
    geometry: Any = None


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def attend_to_gathered(
    q: Tensor, k: Tensor, v: Tensor, cp: Group, attention: Attention, *, again: bool
) -> Tensor:
    """Return causal attention of this rank's queries [b, a, s/cp, d] to the keys and values of all ranks.

    `k` and `v`: this rank's keys and values [b, n, s/cp, d]. `again`: gather keys and values again in backward, instead
    of retaining them. Copies of keys and values (for ALiBi on shared key heads, or attention dropout) are retained.
    """
    keys = _Keys.apply(k, v, cp)
    saved = _SavedTensors(k, v, cp, _address(keys[0]) if again else 0)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
        pairs = zip(q.chunk(2, 2), keys[::2], keys[1::2], strict=True)
        results = [attention(mine, k, v, chunk) for chunk, (mine, k, v) in enumerate(pairs)]
        return saved.join(results)
