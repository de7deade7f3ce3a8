"""Tests that the CUDA softmax supports the sequence lengths of all suites, without a fallback to torch.

All other operators have kernels for rows of any length.
"""

from __future__ import annotations

import pytest

from repro.kernels import softmax
from repro.kernels.families import size_classes


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_softmax_supports_every_row_length_without_vector_loads(backward: bool) -> None:
    """Rows at unaligned addresses are read one element at a time; `size_classes` itself checks aligned rows."""
    rows = [each for each in size_classes() if each.program.source == "softmax"]
    assert rows
    for program, sizes in rows:
        for size in sizes:
            softmax.program(str(dict(program.definitions)["TYPE"]), size, 1, backward)
