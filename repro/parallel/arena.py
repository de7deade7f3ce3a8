"""M_D: memory set aside once for what comes and goes (1910.02054 sec. 6.3).

Checkpoints live from forward to backward, the activations between them for a moment only; gradients of
stages 2 and 3 live until they are reduced.  Taken from the same heap, the long-lived ones leave it full of
holes.  Here they are copied to, or made in, pieces of one allocation.
"""

from __future__ import annotations

from torch import Tensor


class Arena:
    """``capacity`` pieces of equal size in one flat allocation, in the order in which they come free."""

    def __init__(self, memory: Tensor, capacity: int):
        """``memory``: flat [capacity * size]."""
        assert memory.numel() % capacity == 0
        self.memory, self.capacity = memory, capacity
        self.size = memory.numel() // capacity
        """Elements of one piece."""
        self._free = list(range(capacity))[::-1]

    @property
    def used(self) -> int:
        """Pieces that are taken."""
        return self.capacity - len(self._free)

    def take(self, numel: int) -> Tensor:
        """A piece's first ``numel`` elements, flat, contents undefined.

        Raises ``RuntimeError`` if all pieces are taken or smaller: the plan of what is alive at once was wrong.
        """
        if numel > self.size:
            raise RuntimeError(f"{numel} elements wanted of an arena whose pieces have {self.size}")
        if not self._free:
            raise RuntimeError(f"all {self.capacity} pieces of an arena are taken")
        start = self._free.pop() * self.size
        return self.memory[start : start + numel]

    def give(self, piece: Tensor) -> None:
        """Return what :meth:`take` gave; the next taker's writes must be ordered after the last reads."""
        number = int(piece.storage_offset()) // self.size
        assert number not in self._free, "not a piece that was taken"
        self._free.append(number)
