"""Where Megatron-LM's fused softmax does not take a rank's samples and heads, softmax is five operators in fp32."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import repro
from repro.config import Layout
from repro.config.engines import has_fused_softmax
from repro.model.operator_sets import _softmax_apart
from repro.simulate.time.device import MATMULS
from repro.simulate.trace.events import Operator, PhaseStart
from repro.simulate.trace.roles import roles, trace
from tests.parallel.test_operator_sets import LONG
from tests.training import tiny


@pytest.mark.parametrize(
    ("samples", "heads", "s", "fused"),
    [
        (1, 4, 2048, True),
        (2, 2, 1024, True),
        (4, 1, 16, True),
        (1, 2, 2048, False),
        (2, 3, 1024, False),
        (4, 4, 4096, False),
        (4, 4, 18, False),
    ],
)
def test_megatrons_softmax_takes_four_squares_at_once(samples: int, heads: int, s: int, fused: bool) -> None:
    assert has_fused_softmax(samples, heads, s) == fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apart_it_is_the_same_function(dtype: torch.dtype) -> None:
    """With its gradient, which the operator takes from weights that were rounded to 16 bits."""
    torch.manual_seed(0)
    scores = torch.randn(1, 3, 24, 24, dtype=torch.float64).to(dtype)
    one, other = (scores.clone().requires_grad_() for _ in range(2))
    expected = repro.kernels.causal_softmax(one, 0.25, plain=True)
    found = _softmax_apart(other, 0.25)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    found.backward(grad)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(other.grad, one.grad, rtol=8 * unit, atol=unit / 8)


@pytest.mark.parametrize(("samples", "fused"), [(1, False), (2, True)])
def test_what_a_softmax_apart_moves(samples: int, fused: bool) -> None:
    """Of 16-bit scores 36 bytes each forward, read and written, not 4: to fp32, scale, mask, softmax and back."""
    layout = Layout(micro_batch=samples, precision="bf16", kernels="softmax")
    experiment = tiny(layout, replace(LONG, layers=1))
    step = trace(experiment, roles(experiment)[0]).step
    phases = [event for event in step if isinstance(event, (PhaseStart, Operator))]
    ends = [i for i, event in enumerate(phases) if isinstance(event, PhaseStart)]
    forward = [event for event in phases[: ends[1]] if isinstance(event, Operator)]
    scores = samples * LONG.heads * LONG.seq**2
    names = Counter(event.name for event in forward)
    assert names["repro.causal_softmax"] == fused
    assert names["aten._softmax"] == (not fused)
    if not fused:
        apart = [
            e for e in forward if e.read >= 2 * scores and e.written >= 2 * scores and e.name not in MATMULS
        ]
        mask = LONG.seq**2
        assert sum(e.read + e.written for e in apart) == 36 * scores + mask
