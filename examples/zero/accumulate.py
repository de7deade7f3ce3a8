# Gradient accumulation with clipping: four micro-batches to a step, the norm of their sum at most one half.
#
#     torchrun --standalone --nproc-per-node=2 accumulate.py

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import repro

accumulation, max_norm = 4, 0.5

torch.manual_seed(0)
inputs = torch.randn(256, 20)
dataset = TensorDataset(inputs, inputs.cumsum(1))
model = nn.Sequential(nn.Linear(20, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 20))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
layout = repro.Layout(dp=2, zero=2, micro_batch=4, global_batch=8 * accumulation)
model, optimizer = repro.parallelize(model, optimizer, layout)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, shuffle=False))

for i, (x, y) in enumerate(loader):
    loss = nn.functional.mse_loss(model(x), y) / accumulation
    loss.backward()
    if (i + 1) % accumulation == 0:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    print(f"micro-batch {i}: loss {loss.item() * accumulation:.8f}")
