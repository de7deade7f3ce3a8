"""A wrapped module under `torch.compile`, which traces hooks too, trains as it does alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from repro.config import Layout
from tests.pool import RankPool
from tests.wrap.edge_models import STAGES, Plain, alone, assert_same, layout_of, train


class Compiled(Plain):
    """The whole module is compiled, without code for the machine."""

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
def test_the_whole_module_compiled(two: RankPool, zero: int) -> None:
    assert_same(two.run(train_compiled, layout_of(zero)), alone(Plain))
