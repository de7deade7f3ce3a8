"""Stage 3 communicates while the backward pass runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pool import RankPool
from tests.wrap.edge_models import WIDTH, layout_of, once, parallelize_sgd


class Stack(nn.Module):
    """An embedding and blocks, checkpointed or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = torch.tanh(block(x))
            else:
                x = torch.tanh(checkpoint(block, x, use_reentrant=self.reentrant))
        return x


def order_of_backward(reentrant: bool | None) -> list[str]:
    """Collectives of the second step's backward pass, and when each block's gradient comes."""
    module, optimizer = parallelize_sgd(Stack(reentrant), layout_of(3))
    seen: list[str] = []
    for i, block in enumerate(module.blocks):
        block.weight.register_post_accumulate_grad_hook(lambda p, i=i: seen.append(f"block {i}"))
    module.into.weight.register_post_accumulate_grad_hook(lambda p: seen.append("into"))
    group = module.repro.sharding.group
    group.ledger.observers.append(lambda sequence, op, name, purpose: seen.append(purpose))
    for _ in range(2):
        loss = once(module, torch.ones(1, WIDTH))
        seen.clear()
        loss.backward()
        found = list(seen)
        optimizer.step()
    return found


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_stage_3_reduces_and_gathers_while_the_backward_pass_runs(
    two: RankPool, reentrant: bool | None
) -> None:
    """As soon as a block has its gradients they are reduced, and what comes after the next is gathered."""
    last = ["parameters"] if reentrant else []  # under no_grad the last block cannot know that it stays
    for found in two.run(order_of_backward, reentrant):
        assert [what for what in found if what != "block 3"][: len(last)] == last
        assert found[len(last) :] == [
            "parameters",
            "block 3",
            *("gradients", "parameters", "block 2"),
            *("gradients", "parameters", "block 1"),
            *("gradients", "block 0"),
            *("gradients", "into"),
            "gradients",
        ]
