"""Messages without data that take the memory which the real transport would take."""

from __future__ import annotations

from torch import Tensor

from repro.parallel.comm import NoTransport, Work
from repro.parallel.storage import COMMUNICATION, empty


class GlooShapes(NoTransport):
    """Like :class:`repro.parallel.comm.GlooTransport`: a reduce-scatter receives every part in a buffer."""

    def __init__(self, size: int, rank: int):
        self.size, self.rank = size, rank

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Work:
        received = [empty(input.numel() - output.numel(), input, COMMUNICATION)]

        def finish() -> None:
            if self.size > 2:
                mine = input.chunk(self.size)[self.rank]
                total = mine.float() if output.itemsize < 4 else mine.clone()
                output.copy_(total)
            received.clear()

        return Work(finish=finish)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        return Work()
