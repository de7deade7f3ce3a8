"""Program of the step `plain-module`: GPT-2 1.5B as a user would write it, with every block under `torch.compile`.

    python -m repro.launch.gpu_day.plain_module MEASUREMENTS [--tiny]

The module has no master weights in pure bf16, and fp32 weights under autocast. Without a C compiler, which
`torch.compile` needs, the module runs eagerly.
"""

from __future__ import annotations

import gc
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repro.launch.gpu_day.result_files import append_measurement

TIMED_STEPS, UNTIMED_STEPS = 5, 3


@dataclass(frozen=True)
class PlainSizes:
    """Sizes of the module and its batch."""

    layers: int = 48
    hidden: int = 1600
    heads: int = 25
    vocab: int = 50304
    seq: int = 1024


class BaselineBlock(nn.Module):
    """A pre-norm transformer block of GPT-2 from torch's own modules."""

    def __init__(self, sizes: PlainSizes):
        super().__init__()
        width = sizes.hidden
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for `x` of shape [batch, seq, hidden]."""
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class BaselineGPT(nn.Module):
    """A GPT-2 with tied embeddings that returns its loss."""

    def __init__(self, sizes: PlainSizes):
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(sizes.vocab, sizes.hidden),
            nn.Embedding(sizes.seq, sizes.hidden),
        )
        self.blocks = nn.ModuleList(BaselineBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of `labels` given `tokens`, both of shape [batch, seq]."""
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def measure_plain_step(
    sizes: PlainSizes, micro_batch: int, accumulation: int, *, pure: bool, compiled: bool
) -> dict[str, Any]:
    """Return median step time in seconds, peak memory in bytes, and the last loss.

    `pure`: bf16 weights without master weights; else autocast on fp32 weights.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device:
        model = BaselineGPT(sizes)
    if pure:
        model.bfloat16()
    if compiled:
        torch.compiler.reset()  # no variant gets the dynamic shapes of another one
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = torch.randint(sizes.vocab, (accumulation, micro_batch, sizes.seq + 1), device=device)

    def step() -> float:
        for part in data:
            with torch.autocast(device.type, torch.bfloat16, enabled=not pure):
                loss = model(part[:, :-1], part[:, 1:])
            (loss / accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for the device

    began = time.perf_counter()
    for _ in range(UNTIMED_STEPS):
        step()
    untimed_s = time.perf_counter() - began
    times = []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"step_s": statistics.median(times), "untimed_s": untimed_s, "peak_bytes": peak, "loss": loss}


def main(measurements: Path, *, tiny: bool) -> int:
    """Measure every variant, append each result at once, and return the number of failures."""
    failures = 0
    sizes = PlainSizes(layers=2, hidden=64, heads=4, vocab=256, seq=32) if tiny else PlainSizes()
    can_compile = not tiny and any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    for micro_batch, accumulation in ((8, 2), (1, 1)):
        for pure in (True, False):
            try:
                found = measure_plain_step(sizes, micro_batch, accumulation, pure=pure, compiled=can_compile)
            except Exception as error:  # the other variants are measured all the same
                found = {"error": f"{type(error).__name__}: {error}"[:1000]}
                failures += 1
            how = f"{'pure-bf16' if pure else 'autocast'}-{'compiled' if can_compile else 'eager'}"
            name = f"plain/micro-batch-{micro_batch}/{how}"
            append_measurement(measurements, name, **found)
            print(name, found, flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    return failures


if __name__ == "__main__":
    sys.exit(1 if main(Path(sys.argv[1]), tiny="--tiny" in sys.argv) else 0)
