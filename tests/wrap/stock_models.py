"""Stock PyTorch modules with unusual features, and a plain training loop."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import repro

BATCH, STEPS = 8, 8


class Tied(nn.Module):
    """A model whose input and output layers share a matrix; its blocks are in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x.argmax(-1))
        for layer in self.layers:
            y = y + layer(y)
        return self.head(y)


class Unused(nn.Module):
    """A model with an unused layer, one for odd passes, a frozen layer, an empty and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(11, 11) for _ in range(4))
        self.never = nn.Linear(11, 3)
        self.nothing, self.scale = nn.Parameter(torch.empty(0)), nn.Parameter(torch.ones(()))
        self.layers[3].requires_grad_(False)
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        x = torch.relu(self.layers[0](x))
        if self.calls % 2:
            x = self.layers[1](x)
        return {"y": self.layers[3](self.layers[2](x)) * self.scale}


class Encoder(nn.Module):
    """A model with `nn.TransformerEncoder`, whose attention reads parameters of a child without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True)
        self.into = nn.Linear(1, 12)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(12, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.into(x.unsqueeze(-1))).mean(1))


class SharedBlocks(nn.Sequential):
    """A model in which two blocks share a matrix."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(11, 11), nn.Tanh()) for _ in range(3)))
        self[2][0].weight = self[0][0].weight


@dataclass
class Output:
    """A dataclass output, as in many libraries; the tree functions of autograd do not traverse it."""

    y: SimpleNamespace
    hidden: Tensor


class Objects(nn.Module):
    """A model that returns a dataclass; its blocks return a mapping that is no `dict` with an object that is cyclic."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(11, 11)

        def forward(self, x: Tensor) -> UserDict[str, SimpleNamespace]:
            found = SimpleNamespace(y=torch.tanh(self.linear(x)))
            found.itself = found
            return UserDict(y=found)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Objects.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Output:
        for block in self.blocks:
            x = x + block(x)["y"].y
        return Output(SimpleNamespace(y=x), x.detach())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "unused": Unused,
    "encoder": Encoder,
    "shared": SharedBlocks,
    "objects": Objects,
}


def optimizer_of(module: nn.Module, name: str) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    if name == "sgd":
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    decay = {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1}
    no_decay = {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW([decay, no_decay], lr=1e-2, eps=1e-5)


def train_stock(
    model: str, optimizer_name: str, layout: repro.Layout | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Train a stock model, with a layout in parallel; return the losses and the final parameters."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)  # ranks start with different values on purpose: rank 0 must broadcast its own
    module = MODELS[model]()
    optimizer = optimizer_of(module, optimizer_name)
    pieces, mine = 1, slice(0, BATCH)
    if layout is not None:
        module, optimizer = repro.parallelize(module, optimizer, layout)
        pieces = layout.accumulation
        mine = slice(rank * layout.replica_batch, (rank + 1) * layout.replica_batch)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=STEPS)
    losses = []
    data = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 11, generator=data)
        targets = torch.randint(11, (BATCH,), generator=data)
        total = 0.0
        for x, t in zip(inputs[mine].chunk(pieces), targets[mine].chunk(pieces), strict=True):
            out = module(x)
            while not isinstance(out, Tensor):
                out = out["y"] if isinstance(out, dict) else out.y
            loss = F.cross_entropy(out, t) / pieces
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total)
    if layout is None:
        return losses, {n: p.detach().clone() for n, p in module.named_parameters()}
    return losses, module.repro.full_parameters()
