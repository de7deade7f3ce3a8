"""Tests of the shapes that Megatron-LM's fused softmax supports, and of its replacement by five operators in fp32."""

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
def test_fused_softmax_needs_multiples_of_4_matrices(samples: int, heads: int, s: int, fused: bool) -> None:
    assert has_fused_softmax(samples, heads, s) == fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unfused_softmax_equals_the_fused_softmax(dtype: torch.dtype) -> None:
    """The fused operator computes the gradient from weights that were rounded to 16 bits."""
    torch.manual_seed(0)
    scores = torch.randn(1, 3, 24, 24, dtype=torch.float64).to(dtype)
    fused, unfused = (scores.clone().requires_grad_() for _ in range(2))
    expected = repro.kernels.causal_softmax(fused, 0.25, plain=True)
    found = _softmax_apart(unfused, 0.25)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    found.backward(grad)
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(unfused.grad, fused.grad, rtol=8 * unit, atol=unit / 8)


@pytest.mark.parametrize(("samples", "fused"), [(1, False), (2, True)])
def test_unfused_softmax_moves_36_bytes_per_score(samples: int, fused: bool) -> None:
    """The fused operator moves 4 bytes. The operators convert to fp32, scale, mask, run softmax, and convert back."""
    layout = Layout(micro_batch=samples, precision="bf16", kernels="softmax")
    experiment = tiny(layout, replace(LONG, layers=1))
    step = trace(experiment, roles(experiment)[0]).step
    events = [event for event in step if isinstance(event, (PhaseStart, Operator))]
    starts = [i for i, event in enumerate(events) if isinstance(event, PhaseStart)]
    forward = [event for event in events[: starts[1]] if isinstance(event, Operator)]
    scores = samples * LONG.heads * LONG.seq**2
    names = Counter(event.name for event in forward)
    assert names["repro.causal_softmax"] == fused
    assert names["aten._softmax"] == (not fused)
    if not fused:
        unfused = [
            e for e in forward if e.read >= 2 * scores and e.written >= 2 * scores and e.name not in MATMULS
        ]
        mask = LONG.seq**2
        assert sum(e.read + e.written for e in unfused) == 36 * scores + mask
