"""For every sequence of every suite whose scores are written there is a softmax: none falls back to torch's.

Norms have kernels for rows of any length, others work on any.
"""

from __future__ import annotations

import pytest

from repro.kernels import softmax
from repro.kernels.families import size_classes


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_softmax_holds_every_row_that_is_read_singly(backward: bool) -> None:
    """As where an address is not aligned.  That 16 bytes are read at once where it is, `size_classes` asks itself."""
    rows = [each for each in size_classes() if each.program.source == "softmax"]
    assert rows
    for program, sizes in rows:
        for size in sizes:
            softmax.program(str(dict(program.definitions)["TYPE"]), size, 1, backward)
