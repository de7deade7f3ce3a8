"""M_D: memory set aside once for what comes and goes (1910.02054 sec. 6.3).

Checkpoints live from forward to backward, the activations between them for a moment only; gradients of
stages 2 and 3 live until they are reduced.  Taken from the same heap, the long-lived ones leave it full of
holes.  Here they are copied to, or made in, pieces of one allocation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from repro.config.enums import Category
from repro.parallel import storage


@dataclass(frozen=True)
class Piece:
    """Memory that was taken from an arena."""

    tensor: Tensor
    """Flat, as many elements as were asked for."""
    number: int


class Arena:
    """Pieces of given sizes (elements), end to end in one flat allocation."""

    def __init__(self, memory: Tensor, sizes: Sequence[int]):
        """`memory`: flat [sum of `sizes`]."""
        assert memory.numel() == sum(sizes)
        self.memory = memory
        self._pieces = list(memory.split(list(sizes)))
        self._free = set(range(len(self._pieces)))

    @property
    def capacity(self) -> int:
        """Pieces that there are."""
        return len(self._pieces)

    @property
    def used(self) -> int:
        """Pieces that are taken."""
        return len(self._pieces) - len(self._free)

    def fits(self, numel: int) -> bool:
        """Whether a free piece has `numel` elements."""
        return any(self._pieces[i].numel() >= numel for i in self._free)

    def take(self, numel: int) -> Piece:
        """The first `numel` elements of the smallest free piece that has them, contents undefined.

        Raises `RuntimeError` if there is none: the plan of what is alive at once was wrong.
        """
        found = min(
            (i for i in self._free if self._pieces[i].numel() >= numel),
            key=lambda i: (self._pieces[i].numel(), i),
            default=None,
        )
        if found is None:
            raise RuntimeError(
                f"no room for {numel} elements in an arena of {self.capacity} pieces, {self.used} of them taken"
            )
        self._free.remove(found)
        return Piece(self._pieces[found][:numel], found)

    def give(self, piece: Piece) -> None:
        """Return a piece; the next taker's writes must be ordered after the last reads."""
        assert piece.number not in self._free, "a piece was returned twice"
        self._free.add(piece.number)

    def grow(self, numel: int) -> None:
        """Add a piece of `numel` elements in an allocation of its own, for good."""
        category = storage.category_of(self.memory.untyped_storage()) or Category.OTHER
        self._free.add(len(self._pieces))
        self._pieces.append(storage.empty(numel, self.memory, category))
