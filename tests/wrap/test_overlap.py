"""Test that stage 3 communicates during the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pool import RankPool
from tests.wrap.edge_models import WIDTH, layout_of, loss_fn, parallelize_sgd


class Stack(nn.Module):
    """A model of an input layer and four blocks, with or without activation checkpointing."""

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


def backward_events(reentrant: bool | None) -> list[str]:
    """Return the collectives and gradient accumulations of the second step's backward pass, in order."""
    module, optimizer = parallelize_sgd(Stack(reentrant), layout_of(3))
    events: list[str] = []
    for i, block in enumerate(module.blocks):
        block.weight.register_post_accumulate_grad_hook(lambda p, i=i: events.append(f"block {i}"))
    module.into.weight.register_post_accumulate_grad_hook(lambda p: events.append("into"))
    group = module.repro.sharding.group
    group.ledger.observers.append(lambda sequence, op, name, purpose: events.append(purpose))
    for _ in range(2):
        loss = loss_fn(module, torch.ones(1, WIDTH))
        events.clear()
        loss.backward()
        events_of_step = list(events)
        optimizer.step()
    return events_of_step


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_stage_3_overlaps_collectives_with_the_backward_pass(two: RankPool, reentrant: bool | None) -> None:
    """After the backward pass of block i, its gradients are reduced and the parameters of block i - 2 gathered."""
    last = ["parameters"] if reentrant else []  # the first run, under no_grad, releases the last block
    for events_of_step in two.run(backward_events, reentrant):
        assert [event for event in events_of_step if event != "block 3"][: len(last)] == last
        assert events_of_step[len(last) :] == [
            "parameters",
            "block 3",
            *("gradients", "parameters", "block 2"),
            *("gradients", "parameters", "block 1"),
            *("gradients", "block 0"),
            *("gradients", "into"),
            "gradients",
        ]
