"""Tests of dynamic loss scaling: its rules for any overflows, and training that overflows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repro.config import Layout
from repro.parallel.zero.optimizer import LossScaler
from tests.pool import RankPool
from tests.training import tiny, train


class ReferenceScaler:
    """Loss scaler of the software of 2019 to 2021, in plain Python numbers."""

    def __init__(self, scale: float, window: int, hysteresis: int):
        self.scale, self.window, self.hysteresis = scale, window, hysteresis
        self.good_steps, self.tolerance = 0, hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self.good_steps = 0
            self.tolerance -= 1
            if self.tolerance <= 0:
                self.scale = max(self.scale / 2, 1.0)
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.good_steps, self.tolerance, self.scale = 0, self.hysteresis, self.scale * 2


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 6), st.integers(1, 3))
def test_scaler_equals_the_reference(overflows: list[bool], window: int, hysteresis: int) -> None:
    scaler = LossScaler(2.0**16, window, hysteresis, torch.device("cpu"))
    reference = ReferenceScaler(2.0**16, window, hysteresis)
    for overflow in overflows:
        scaler.update(torch.tensor(float(overflow)))
        reference.update(overflow)
        assert float(scaler.scale) == reference.scale


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=0), Layout(dp=2, zero=3), Layout(tp=2)], ids=str)
def test_all_ranks_skip_the_same_overflowing_steps(two: RankPool, layout: Layout) -> None:
    """The first steps overflow. All ranks skip them, halve the scale from the second overflow on, and then learn."""
    settings = {"micro_batch": 8 // layout.dp, "global_batch": 8, "precision": "fp16"}
    found = two.run(
        train, tiny(Layout(dp=layout.dp, tp=layout.tp, zero=layout.zero, **settings), loss_scale=2.0**24)
    )
    for trained in found:
        assert trained.skipped == found[0].skipped
        assert trained.scale == found[0].scale
        assert trained.skipped[:2] == [0, 1], "2^24 must overflow"
        first = next(step for step in range(21) if step not in trained.skipped)
        assert len(trained.skipped) < 15
        # With hysteresis 2, the first overflow does not change the scale, and every later overflow halves it.
        assert trained.scale[: first + 1] == [2.0**24 / 2 ** max(0, step - 1) for step in range(first + 1)]
        # Skipped steps do not change the model, so the loss is that of the untrained model.
        assert all(loss == pytest.approx(trained.loss[0], rel=0.1) for loss in trained.loss[: first + 1])
        assert trained.loss[-1] < trained.loss[0]
