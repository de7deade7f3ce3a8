"""Program of the step `parallelize`: `repro.parallelize` on three models of transformers, against plain torch.

    python -m repro.launch.gpu_day.wrapped_models MEASUREMENTS [--tiny]

The models have random weights from their configurations. One rank trains each model under stages 0 to 3 over NCCL (gloo
on processors), and once in plain torch. Loss, step time and peak memory go to the measurements.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from repro.launch.gpu_day.result_files import append_measurement

STEPS = 8
UNTIMED_STEPS = 3
CLIP = 1.0
STAGES = (None, 0, 1, 2, 3)
"""ZeRO stages; None is plain torch."""


def model_builders(*, tiny: bool) -> dict[str, Callable[[], nn.Module]]:
    """Return the builders of a GPT-2, a Llama and a T5, without dropout."""
    transformers: Any = import_module("transformers")
    width, layers, heads, vocab = (64, 2, 4, 128) if tiny else (1024, 12, 16, 32_000)
    wide = {"vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers}

    def gpt2() -> nn.Module:
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 512}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=vocab, **sizes, **no_dropout, **ends)
        )

    def llama() -> nn.Module:
        config = transformers.LlamaConfig(
            **wide, intermediate_size=3 * width, num_attention_heads=heads, num_key_value_heads=heads // 4
        )
        return transformers.LlamaForCausalLM(config)

    def t5() -> nn.Module:
        config = transformers.T5Config(
            vocab_size=vocab,
            d_model=width,
            d_kv=width // heads,
            d_ff=4 * width,
            num_layers=layers // 2,
            num_heads=heads,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        return transformers.T5ForConditionalGeneration(config)

    return {"gpt2": gpt2, "llama": llama, "t5": t5}


def train_model(build: Callable[[], nn.Module], stage: int | None, rows: int, seq: int) -> dict[str, Any]:
    """Return losses, median step time in seconds and peak memory in bytes of one training in fp32 parameters."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model: nn.Module = build().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-6)
    if stage is not None:
        model, optimizer = repro.parallelize(model, optimizer, repro.Layout(dp=1, zero=stage), clip=CLIP)
    config: Any = model.config
    random = torch.Generator().manual_seed(0)
    losses, times = [], []
    for _ in range(STEPS):
        tokens: Tensor = torch.randint(1, config.vocab_size, (rows, seq), generator=random).to(device)
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if stage is None:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"losses": losses, "step_s": statistics.median(times[UNTIMED_STEPS:]), "peak_bytes": peak}


def main(measurements: Path, *, tiny: bool) -> int:
    """Train all models in all ways, append each result at once; return the number of failures."""
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
                how = "torch" if stage is None else f"zero-{stage}"
                try:
                    found = train_model(build, stage, rows, seq)
                except Exception as error:  # the other models and stages are measured all the same
                    found = {"error": f"{type(error).__name__}: {error}"[:1000]}
                    failures += 1
                if stage is None:
                    plain = found.get("losses", [])
                elif plain and "losses" in found:
                    pairs = zip(plain, found["losses"], strict=True)
                    found["largest_loss_difference"] = max(abs(a - b) for a, b in pairs)
                append_measurement(measurements, f"parallelize/{name}/{how}", **found)
                print(name, how, found, flush=True)
                gc.collect()
        dist.destroy_process_group()
    return failures


if __name__ == "__main__":
    sys.exit(1 if main(Path(sys.argv[1]), tiny="--tiny" in sys.argv) else 0)
