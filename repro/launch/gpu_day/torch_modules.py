"""Programs of two steps of `repro gpu-day`: torch modules in plain torch and under `repro.parallelize`.

    python -m repro.launch.gpu_day.torch_modules plain MEASUREMENTS [--tiny]
    python -m repro.launch.gpu_day.torch_modules parallelize MEASUREMENTS [--tiny]

`plain` measures GPT-2 1.5B as a plain torch module, in pure bf16 without master weights and under autocast with fp32
weights. `torch.compile` compiles every block if a C compiler exists. `parallelize` trains randomly initialised models
of `transformers` on one rank, under ZeRO stages 0 to 3 and in plain torch.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import repro
from repro.launch.gpu_day.result_files import append_measurement

TIMED_STEPS, UNTIMED_STEPS = 5, 3
CLIP = 1.0
STAGES = (None, 0, 1, 2, 3)
"""ZeRO stages of `repro.parallelize`; None stands for plain torch."""


@dataclass(frozen=True)
class PlainSizes:
    """Sizes of the GPT-2 baseline in plain torch, and the number of tokens of its samples."""

    layers: int = 48
    hidden: int = 1600
    heads: int = 25
    vocab: int = 50304
    seq: int = 1024


class BaselineBlock(nn.Module):
    """A pre-norm transformer block of GPT-2 built from `torch.nn` modules."""

    def __init__(self, sizes: PlainSizes):
        super().__init__()
        width = sizes.hidden
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformer block's output for the hidden states `x` of shape [batch, seq, hidden]."""
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class BaselineGPT(nn.Module):
    """A GPT-2 built from `torch.nn` modules, with tied embeddings. Its forward pass returns the loss."""

    def __init__(self, sizes: PlainSizes):
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = nn.Embedding(sizes.seq, sizes.hidden)
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
    """Train a plain GPT-2 and return its median step time in seconds, peak memory in bytes and last loss.

    With `pure`, weights are bf16 without master weights. Otherwise weights are fp32, and the forward pass is autocast.
    """
    device = _fresh_device()
    with device:
        model = BaselineGPT(sizes)
    if pure:
        model.bfloat16()
    if compiled:
        # Without `reset`, torch.compile would compile the second batch size with dynamic shapes.
        torch.compiler.reset()
        for block in model.blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = torch.randint(sizes.vocab, (accumulation, micro_batch, sizes.seq + 1), device=device)

    def step() -> float:
        for part in data:
            with torch.autocast(device.type, torch.bfloat16, enabled=not pure):
                loss = model(part[:, :-1], part[:, 1:])
            (loss / accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # `item` waits for the device, so the training step has ended.

    times = []
    for _ in range(UNTIMED_STEPS + TIMED_STEPS):
        began = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - began)
    seconds = {"step_s": statistics.median(times[UNTIMED_STEPS:]), "untimed_s": sum(times[:UNTIMED_STEPS])}
    return {**seconds, "peak_bytes": _peak_bytes(device), "loss": loss}


def model_builders(*, tiny: bool) -> dict[str, Callable[[], nn.Module]]:
    """Return functions that build a GPT-2, a Llama and a T5 of the library `transformers` without dropout, by name."""
    transformers: Any = import_module("transformers")
    width, layers, heads, vocab = (64, 2, 4, 128) if tiny else (1024, 12, 16, 32_000)
    wide = {"vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers}

    def gpt2() -> nn.Module:
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 512}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(vocab_size=vocab, **sizes, **no_dropout, **ends)
        return transformers.GPT2LMHeadModel(config)

    def llama() -> nn.Module:
        own = {"num_attention_heads": heads, "num_key_value_heads": heads // 4}
        config = transformers.LlamaConfig(**wide, **own, intermediate_size=3 * width)
        return transformers.LlamaForCausalLM(config)

    def t5() -> nn.Module:
        sizes = {"d_model": width, "d_kv": width // heads, "d_ff": 4 * width, "num_heads": heads}
        fixed = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
        config = transformers.T5Config(vocab_size=vocab, num_layers=layers // 2, **sizes, **fixed)
        return transformers.T5ForConditionalGeneration(config)

    return {"gpt2": gpt2, "llama": llama, "t5": t5}


def train_model(build: Callable[[], nn.Module], stage: int | None, rows: int, seq: int) -> dict[str, Any]:
    """Train a model with fp32 parameters; return losses, median step time in seconds and peak memory in bytes.

    `stage` is the ZeRO stage of `repro.parallelize`; None trains in plain torch. A batch is `rows` times `seq` tokens.
    """
    device = _fresh_device()
    model: nn.Module = build().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6)
    if stage is not None:
        model, optimizer = repro.parallelize(model, optimizer, repro.Layout(dp=1, zero=stage), clip=CLIP)
    config: Any = model.config
    random = torch.Generator().manual_seed(0)
    losses, times = [], []
    for _ in range(UNTIMED_STEPS + TIMED_STEPS):
        tokens: Tensor = torch.randint(1, config.vocab_size, (rows, seq), generator=random).to(device)
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if stage is None:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # `item` waits for the device, so the training step has ended.
        times.append(time.perf_counter() - began)
    step_s = statistics.median(times[UNTIMED_STEPS:])
    return {"losses": losses, "step_s": step_s, "peak_bytes": _peak_bytes(device)}


def _fresh_device() -> torch.device:
    """Empty the CUDA memory cache, seed torch's random numbers, and return the device: the GPU, or the CPU if none."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def _try(measure: Callable[..., dict[str, Any]], *arguments: Any, **options: Any) -> dict[str, Any]:
    """Return the result of `measure`, or a result with the key `error`, so that a failure ends one measurement only."""
    try:
        return measure(*arguments, **options)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:1000]}


def _write(measurements: Path, name: str, found: dict[str, Any]) -> int:
    """Append one measurement to the file `measurements`; return 1 if the measurement failed, else 0."""
    append_measurement(measurements, name, **found)
    print(name, found, flush=True)
    return int("error" in found)


def measure_plain(measurements: Path, *, tiny: bool) -> int:
    """Measure GPT-2 in plain torch with all batch sizes and precisions; return the number of failed measurements."""
    failures = 0
    sizes = PlainSizes(layers=2, hidden=64, heads=4, vocab=256, seq=32) if tiny else PlainSizes()
    compiled = not tiny and any(shutil.which(name) for name in ("cc", "gcc", "clang"))
    for batch in ((8, 2), (1, 1)):
        for pure in (True, False):
            found = _try(measure_plain_step, sizes, *batch, pure=pure, compiled=compiled)
            how = f"{'pure-bf16' if pure else 'autocast'}-{'compiled' if compiled else 'eager'}"
            failures += _write(measurements, f"plain/micro-batch-{batch[0]}/{how}", found)
    return failures


def measure_parallelize(measurements: Path, *, tiny: bool) -> int:
    """Train models of `transformers` in plain torch and under each ZeRO stage; return the number of failures."""
    rows, seq = (2, 16) if tiny else (8, 512)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    else:
        torch.cuda.set_device(0)
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        for name, build in model_builders(tiny=tiny).items():
            plain: list[float] = []
            for stage in STAGES:
                found = _try(train_model, build, stage, rows, seq)
                if stage is None:
                    plain = found.get("losses", [])
                elif plain and "losses" in found:
                    pairs = zip(plain, found["losses"], strict=True)
                    found["largest_loss_difference"] = max(abs(a - b) for a, b in pairs)
                how = "torch" if stage is None else f"zero-{stage}"
                failures += _write(measurements, f"parallelize/{name}/{how}", found)
        dist.destroy_process_group()
    return failures


if __name__ == "__main__":
    _measure = {"plain": measure_plain, "parallelize": measure_parallelize}[sys.argv[1]]
    sys.exit(1 if _measure(Path(sys.argv[2]), tiny="--tiny" in sys.argv) else 0)
