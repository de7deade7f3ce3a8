"""M_D: memory allocated once for tensors of different lifetimes (1910.02054 sec. 6.3).

Checkpoints exist from forward to backward, and gradients of stages 2 and 3 until their reduction, but activations only
briefly. The long-lived tensors would fragment torch's allocator, so they use pieces of a preallocated `Arena`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from repro.config.enums import Category
from repro.parallel import storage


@dataclass(frozen=True)
class Piece:
    """Piece of an arena (preallocated memory), which one tensor uses at a time."""

    tensor: Tensor
    """Flat tensor in this piece of preallocated memory, with the requested number of elements."""
    number: int


class Arena:
    """Preallocated memory against fragmentation: pieces of given sizes (elements) in one flat allocation."""

    def __init__(self, memory: Tensor, sizes: Sequence[int]):
        """Divide `memory`, a flat tensor of sum(`sizes`) elements, into unused pieces of these sizes in elements."""
        assert memory.numel() == sum(sizes)
        self.memory = memory
        self._pieces = list(memory.split(list(sizes)))
        self._free = set(range(len(self._pieces)))

    @property
    def capacity(self) -> int:
        """Return the number of pieces into which the preallocated memory is divided."""
        return len(self._pieces)

    @property
    def used(self) -> int:
        """Return the number of pieces of the preallocated memory that are in use."""
        return len(self._pieces) - len(self._free)

    def fits(self, numel: int) -> bool:
        """Return whether a free piece of the preallocated memory has `numel` elements or more."""
        return any(self._pieces[i].numel() >= numel for i in self._free)

    def take(self, numel: int) -> Piece:
        """Return `numel` elements of the smallest sufficient free piece. Raises `RuntimeError` if no piece fits."""
        found = min(
            (i for i in self._free if self._pieces[i].numel() >= numel),
            key=lambda i: (self._pieces[i].numel(), i),
            default=None,
        )
        if found is None:
            raise RuntimeError(
                f"the preallocated memory has no free piece of {numel} elements: {self.used} of {self.capacity} "
                "pieces are in use"
            )
        self._free.remove(found)
        return Piece(self._pieces[found][:numel], found)

    def give(self, piece: Piece) -> None:
        """Return a memory piece to the arena. Writes by the piece's next user must be ordered after the last reads."""
        assert piece.number not in self._free, "a piece of preallocated memory was returned twice"
        self._free.add(piece.number)

    def grow(self, numel: int) -> None:
        """Add a piece of `numel` elements, in a separate allocation that is not freed, to the preallocated memory."""
        category = storage.category_of(self.memory.untyped_storage()) or Category.OTHER
        self._free.add(len(self._pieces))
        self._pieces.append(storage.empty(numel, self.memory, category))
