"""Tests of a module in fp64: parameters, gradient norms and optimizer states stay in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import repro
from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import STAGES, Plain, assert_script_trains_like_one, layout_of
from tests.wrap.test_gradients import clip_by_norm


def fp64_module() -> nn.Module:
    return Plain().double()


@STAGES
def test_fp64_module_trains_like_one_process(two: RankPool, zero: int) -> None:
    assert_script_trains_like_one(two, clip_by_norm, layout_of(zero), fp64_module, rtol=1e-13, atol=1e-13)


def test_bf16_precision_refuses_fp64_parameters() -> None:
    module = fp64_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"is float64, .* Call module\.float\(\)"):
        repro.parallelize(module, optimizer, Layout(precision="bf16"))
