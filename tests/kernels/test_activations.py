"""Tests of GELU, SwiGLU and causal softmax with special values; `test_differentiable.py` has usual values."""

from __future__ import annotations

import pytest
import torch

from repro.kernels import bias_gelu, causal_softmax, gelu, softmax, swiglu
from repro.kernels.families import size_classes
from tests.kernels.gradients import with_gradients


@pytest.mark.usefixtures("implementation")
def test_gelu_of_extreme_and_non_finite_values() -> None:
    x = torch.tensor([[-1e20, -100.0, -6.0, -0.0, 6.0, 100.0, 1e12, float("nan"), float("inf")]])
    y, slope, _ = with_gradients(bias_gelu, torch.ones_like(x), x, torch.zeros(9))
    expected = gelu.reference(x.double(), torch.zeros(9)).float()
    torch.testing.assert_close(y[0, 1:7], expected[0, 1:7], atol=1e-6, rtol=1e-6)
    assert (y[0, 0], y[0, 8]) == (0, float("inf"))
    assert y[0, 7].isnan()
    assert slope[0, [1, 5, 6]].tolist() == [0, 1, 1]


@pytest.mark.usefixtures("implementation")
def test_swiglu_of_extreme_values() -> None:
    y = swiglu(torch.tensor([[-1e30, -200.0, 200.0, float("nan"), 1.0, 1.0, 1.0, 1.0]]))
    assert y[0, :3].tolist() == [0, 0, 200]
    assert y[0, 3].isnan()


def test_the_gate_is_the_first_half() -> None:
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(swiglu(torch.cat([gate, up], -1)), torch.nn.functional.silu(gate) * up)


@pytest.mark.usefixtures("implementation")
def test_softmax_ignores_the_future_and_propagates_non_finite_values() -> None:
    scores, future = torch.randn(2, 19, 19), torch.ones(19, 19).triu(1).bool()
    expected = softmax.reference(scores, 2.0)
    scores[0, future], scores[1, future] = float("nan"), float("inf")
    y, slope = with_gradients(lambda x: causal_softmax(x, 2.0), torch.randn(2, 19, 19), scores)
    torch.testing.assert_close(y, expected)
    assert (y[:, future] == 0).all()
    assert (slope[:, future] == 0).all()
    scores[0, 5, 3], scores[0, 9, 4], scores[0, 11, 2] = float("-inf"), float("nan"), float("inf")
    y = causal_softmax(scores, 2.0)
    assert y[0].isnan().any(1).nonzero().flatten().tolist() == [9, 11]
    assert y[0, 9, :10].isnan().all()
    assert y[0, 5, 3] == 0


@pytest.mark.usefixtures("implementation")
def test_large_softmax_scores_do_not_overflow() -> None:
    y = causal_softmax(torch.full((1, 24, 24), 6e4).half(), 10.0)
    torch.testing.assert_close(y[0, 3, :4], torch.full((4,), 0.25).half())


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_softmax_supports_every_row_length_of_the_suites_without_vector_loads(backward: bool) -> None:
    """`size_classes` itself checks aligned rows, and all other operators have kernels for rows of any length."""
    rows = [each for each in size_classes() if each.program.source == "softmax"]
    assert rows
    for program, sizes in rows:
        for size in sizes:
            softmax.program(str(dict(program.definitions)["TYPE"]), size, 1, backward)
