"""Stage 3: whoever reads a parameter whose values no rank has gets an error that says what to do."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.pool import RankPool
from tests.wrap.edge_models import WIDTH, Plain, gather_late, layout_of, message_of, once, parallelize_sgd

HABITS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda w: w.norm(),
    "print": str,
    "format": lambda w: f"{w}",
    "numpy": lambda w: w.detach().numpy(),
    "item": lambda w: w[0, 0].item(),
    "bool": lambda w: bool((w > 0).any()),
    "save": lambda w: torch.save(w, io.BytesIO()),
    "pickle": pickle.dumps,
    "copy": copy.deepcopy,
    "ema": lambda w: torch.zeros(WIDTH, WIDTH).lerp_(w.data, 0.1),
    "ema of lists": lambda w: torch._foreach_lerp_([torch.zeros(WIDTH, WIDTH)], [w], 0.1),
    "clamp": lambda w: w.data.clamp_(-1, 1),
    "write": lambda w: nn.init.zeros_(w),
    "item assignment": lambda w: w.detach().__setitem__(0, 0.0),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
    "penalty": lambda w: w.square().sum().backward(),
    "linear": lambda w: nn.functional.linear(torch.ones(WIDTH), w),
    "cast": lambda w: w.to(torch.float64),
    "alias": lambda w: w.view(-1),
    "address": lambda w: w.data_ptr(),
    "storage": lambda w: w.untyped_storage(),
}
"""What scripts do with a weight."""


def messages(habits: list[str]) -> list[list[str]]:
    """What each habit raises before training, between forward and backward, and after a step."""
    module, optimizer = parallelize_sgd(Plain(), layout_of(3))
    weight = module.blocks[0][0].weight
    found = []

    def look() -> None:
        for habit in habits:
            try:
                HABITS[habit](weight)
                found.append([habit, ""])
            except RuntimeError as error:
                found.append([habit, str(error)])

    look()
    loss = once(module, torch.ones(1, WIDTH))
    look()
    loss.backward()
    optimizer.step()
    look()
    return found


@pytest.mark.parametrize("habit", HABITS)
def test_a_released_parameter_refuses_to_be_read(two: RankPool, habit: str) -> None:
    for found in two.run(messages, [habit]):
        assert len(found) == 3
        for _, message in found:
            assert "Call module.repro.full_parameters() on all ranks" in message


def what_remains() -> list[Any]:
    """What may be asked of a released parameter."""
    module, _ = parallelize_sgd(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), layout_of(3))
    weight = module[0].weight
    seen = []
    weight.register_hook(lambda gradient: seen.append(gradient.shape))
    module.register_forward_hook(lambda *_: seen.append(isinstance(weight, nn.Parameter)))
    module[0].register_forward_pre_hook(lambda block, inputs: seen.append(float(block.weight.norm()) > 0))
    once(module, torch.ones(1, WIDTH)).backward()
    zeros = torch.zeros_like(weight)
    return [
        *seen,
        (weight.shape, weight.numel(), weight.dtype, weight.device.type, weight.dim(), len(weight)),
        (zeros.shape, type(zeros)),
        sum(p.numel() for p in module.parameters() if p.requires_grad),
        weight in {weight},
    ]


def test_a_released_parameter_has_its_shape(two: RankPool) -> None:
    square = torch.Size((WIDTH, WIDTH))
    for found in two.run(what_remains):
        assert found == [
            *(True, True, square),
            (square, WIDTH**2, torch.float32, "cpu", 2, WIDTH),
            (square, Tensor),
            2 * WIDTH * (WIDTH + 1),
            True,
        ]


class Translator(nn.Module):
    """An encoder and a decoder that share an embedding; text is made outside its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.encoder = nn.ModuleDict(
            {
                "embed": self.embedding,
                "blocks": nn.ModuleList([nn.Linear(WIDTH, WIDTH)]),
                "norm": nn.LayerNorm(WIDTH),
            }
        )
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def encode(self, x: Tensor) -> Tensor:
        x = self.encoder["embed"](x)
        for block in self.encoder["blocks"]:
            x = torch.tanh(block(x))
        return self.encoder["norm"](x)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = self.encode(x) if memory is None else memory
        y = self.embedding(x) + memory
        for block in self.blocks:
            y = block(y)
        return self.head(y)

    @torch.no_grad()
    def generate(self, x: Tensor) -> Tensor:
        memory = self.encode(x)
        for _ in range(3):
            x = self(x, memory).argmax(-1)
        return self.head(memory) + self.blocks[1].linear1(memory).sum() + self(x)


def texts(late: bool) -> list[tuple[Tensor, Tensor]]:
    """What is generated after each step, and what the parameters say; `late`: rank 1 takes its time."""
    torch.manual_seed(0)
    module, optimizer = parallelize_sgd(Translator(), layout_of(3))
    if late and dist.get_rank():
        for bucket in module.repro.buckets:
            vars(bucket)["gather"] = partial(gather_late, bucket)
    alone, x, found = Translator(), torch.arange(10).view(5, 2), []
    for _ in range(3):
        once(module, x).backward()
        optimizer.step()
        alone.load_state_dict(module.repro.full_parameters(), strict=False)  # it has the embedding twice
        found.append((module.generate(x), alone.generate(x)))
    return found


@pytest.mark.parametrize("late", [False, True])
def test_parts_of_a_module_are_used_by_themselves_to_look_at_what_they_make(
    two: RankPool, late: bool
) -> None:
    for mine in two.run(texts, late):
        for found, expected in mine:
            torch.testing.assert_close(found, expected)


def a_part_in_training() -> None:
    module, _ = parallelize_sgd(Translator(), layout_of(3))
    module.encode(torch.arange(10)).sum().backward()


def test_parts_of_a_module_are_not_trained_by_themselves(two: RankPool) -> None:
    for message in two.run(message_of, a_part_in_training):
        assert "Call module.repro.full_parameters() on all ranks" in message
