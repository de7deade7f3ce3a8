"""Tests that a wrapped module under `torch.compile`, which also traces hooks, trains like the stock module."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import STAGES, Plain, assert_same, layout_of, reference, train


class Compiled(Plain):
    """A compiled `Plain` without code generation (backend eager)."""

    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


def train_compiled(layout: Layout) -> dict[str, Tensor]:
    torch._dynamo.reset()
    kind: type[nn.Module] = Compiled
    return train(kind, layout)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@STAGES
def test_compiled_module_trains_like_one_process(two: RankPool, zero: int) -> None:
    assert_same(two.run(train_compiled, layout_of(zero)), reference(Plain))
