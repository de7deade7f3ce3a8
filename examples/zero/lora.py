# Low-rank adapters: the base is frozen, and the optimizer has the adapters alone.
#
#     torchrun --standalone --nproc-per-node=2 lora.py

import torch
from torch import nn

import repro


class LoRA(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.T @ self.b.T)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


torch.manual_seed(0)
model = nn.Sequential(*(Block(24) for _ in range(3)))
model.requires_grad_(False)
for block in model:
    block.up, block.down = LoRA(block.up), LoRA(block.down)
adapters = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=1e-2)
model, optimizer = repro.parallelize(model, optimizer, repro.Layout(dp=2, zero=3))
inputs = torch.randn(96, 24)
targets = inputs.flip(1)

for step in range(12):
    picked = torch.randperm(len(inputs))[:16][torch.distributed.get_rank() :: 2]
    loss = nn.functional.mse_loss(model(inputs[picked]), targets[picked])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.8f}")
