"""Tests of GELU, SwiGLU, softmax, rotary embeddings and attention with special values, positions and shapes.

`test_differentiable.py` compares usual values and gradients with fp64.
"""

from __future__ import annotations

import pytest
import torch

from repro.kernels import bias_gelu, causal_attention, causal_softmax, gelu, rope, rotary, softmax, swiglu
from repro.kernels.attention import reference
from repro.kernels.families import size_classes
from repro.measure.memory import MemoryTracker
from repro.model.operator_sets import alibi_bias, alibi_slopes
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
def test_swiglu_of_extreme_values_with_the_gate_in_the_first_half() -> None:
    y = swiglu(torch.tensor([[-1e30, -200.0, 200.0, float("nan"), 1.0, 1.0, 3.0, 1.0]]))
    assert y[0, :3].tolist() == [0, 0, 600]
    assert y[0, 3].isnan()


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


def test_scores_depend_only_on_the_distance() -> None:
    """Property of 2104.09864 sec. 3.1; by hand, pair 0 at position 1 is rotated by one radian."""
    one = torch.randn(1, 1, 8, dtype=torch.float64).expand(1, 12, 8)
    q, k = rotary(one, 1, 8, 8), rotary(one.flip(-1), 1, 8, 8)
    scores = (q @ k.transpose(1, 2))[0]
    for distance in (-3, 0, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    y = rotary(torch.tensor([[[0.0, 0, 0, 0], [1.0, 0, 0, 0]]]), 1, 4, 4)
    torch.testing.assert_close(y[0, 1], torch.tensor([0.5403, 0, 0.8415, 0]), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("implementation")
def test_context_parallel_rows_have_their_global_positions() -> None:
    """A rank of context parallelism has two chunks of a sequence: rows 1, 2 and rows 7, 8, 9 of 10."""
    x, rows, spec = torch.randn(2, 10, 24), torch.tensor([1, 2, 7, 8, 9]), (2, 8, 4, 100.0)
    part = x[:, rows].requires_grad_()
    found = rotary(part, *spec, 1, 2, 4)
    expected = rope.reference(x.double(), *spec)[:, rows]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    (back,) = torch.autograd.grad(found, part, found)
    torch.testing.assert_close(back, part)  # a rotation and its inverse


@pytest.mark.usefixtures("implementation")
def test_values_at_large_positions_and_of_an_empty_batch() -> None:
    """The tolerance is the rounding of angles of up to 20,000 radians, 2^-24 of the angle."""
    x = torch.randn(1, 20_000, 2)
    expected = rope.reference(x.double(), 1, 2, 2, 10000.0)
    torch.testing.assert_close(rotary(x, 1, 2, 2).double(), expected, rtol=0, atol=5e-3)
    assert rotary(x[:0], 1, 2, 2).shape == rope.reference(x[:0], 1, 2, 2, 10000.0).shape == (0, 20_000, 2)


@pytest.mark.parametrize(
    ("b", "heads", "key_heads", "queries", "keys", "biased"),
    [
        (1, 1, 1, 1, 1, False),
        (2, 3, 3, 33, 33, False),
        (2, 6, 1, 9, 9, True),
        (2, 6, 2, 9, 9, False),
        (2, 6, 6, 9, 9, True),
        (2, 6, 2, 3, 9, True),
        (2, 6, 6, 3, 9, False),
        (2, 6, 1, 3, 9, False),
    ],
)
def test_attention_matches_its_definition_and_meta_shapes(
    b: int, heads: int, key_heads: int, queries: int, keys: int, biased: bool
) -> None:
    """Queries are the last positions of the sequence; cases have ALiBi's bias and grouped-query heads."""
    torch.manual_seed(0)
    inputs = [torch.randn(b, n, keys, 4, dtype=torch.float64) for n in (heads, key_heads, key_heads)]
    full_bias = alibi_bias(heads, range(heads), range(keys), inputs[0]) if biased else None
    expected = reference(*inputs, full_bias)[:, :, keys - queries :]
    inputs = [x.requires_grad_() for x in (inputs[0][:, :, keys - queries :].clone(), *inputs[1:])]
    bias = alibi_bias(heads, range(heads), range(keys - queries, keys), inputs[0]) if biased else None
    found = causal_attention(*inputs, bias)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    actual = torch.autograd.grad(found, inputs, upstream)
    for a, e in zip(actual, torch.autograd.grad(reference(*inputs, bias), inputs, upstream), strict=True):
        torch.testing.assert_close(a, e)
    shapes_only = [torch.empty_like(x, device="meta", dtype=torch.float16).requires_grad_() for x in inputs]
    on_meta = causal_attention(*shapes_only, None if bias is None else bias.half().to("meta"))
    assert on_meta.shape == found.shape
    gradients = torch.autograd.grad(on_meta, shapes_only, torch.empty_like(on_meta))
    assert [x.shape for x in gradients] == [x.shape for x in inputs]


def test_alibi_slopes_and_bias_by_hand() -> None:
    """2108.12409 sec. 3: 8 heads have 1/2 to 1/256; 3 heads have the slopes of 2 heads and the first of 4."""
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(3) == [2.0**-4, 2.0**-8, 2.0**-2]
    inf = float("inf")
    bias = alibi_bias(8, range(1, 2), range(3), torch.empty(0, dtype=torch.float16))
    assert bias.tolist() == [[[[0, -inf, -inf], [-0.25, 0, -inf], [-0.5, -0.25, 0]]]]


def test_attention_on_meta_allocates_no_scores() -> None:
    shape = {"size": (2, 3, 512, 8), "dtype": torch.bfloat16, "device": "meta"}
    inputs = [torch.empty(**shape, requires_grad=True) for _ in range(3)]
    tracker = MemoryTracker()
    tracker.phase = "forward"
    with tracker:
        y = causal_attention(*inputs)
        y.backward(torch.empty_like(y))
    assert (y.shape, y.dtype) == (inputs[0].shape, torch.bfloat16)
    assert tracker.peak["total"] < 2 * 3 * 512 * 512 * 2, "bytes of the scores"
