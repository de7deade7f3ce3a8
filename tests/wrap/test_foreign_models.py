"""Tests of models of transformers and peft with random weights: each trains and generates like a single process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import repro
from tests.pool import RankPool

if find_spec("peft") is None:
    pytest.skip("not installed: pip install -e '.[test]'", allow_module_level=True)

os.environ["HF_HUB_OFFLINE"] = "1"  # no downloads
import transformers

RANKS, ROWS, WORDS, VOCABULARY, STEPS = 2, 8, 6, 32, 4
WIDTHS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Batch = dict[str, Tensor]


def gpt2() -> nn.Module:
    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": VOCABULARY}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, **ends))


def llama() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **WIDTHS))


def mixtral() -> nn.Module:
    """Return a mixture of experts, for which the data of each rank select different experts."""
    sizes = {"vocab_size": VOCABULARY, "num_key_value_heads": 1}
    experts = {"num_local_experts": 3, "num_experts_per_tok": 1}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts, **WIDTHS))


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    config = transformers.T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(vocab_size=VOCABULARY, **WIDTHS, **NO_DROPOUT)
    model = transformers.BertForSequenceClassification(config)
    model.bert.embeddings.requires_grad_(False)
    return model


def vit() -> nn.Module:
    sizes = {"image_size": 16, "patch_size": 8, "num_labels": 5}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, **WIDTHS, **NO_DROPOUT))


def resnet() -> nn.Module:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=5, **sizes))


def lora() -> nn.Module:
    """Return a frozen Llama with adapters; its checkpoints need an input that requires a gradient."""
    from peft import LoraConfig, get_peft_model  # takes seconds, which the collection of tests saves

    base = llama()
    base.enable_input_require_grads()
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))


def text(random: torch.Generator) -> Batch:
    """Return tokens that are also the labels, [ROWS, WORDS]."""
    tokens = torch.randint(1, VOCABULARY, (ROWS, WORDS), generator=random)
    return {"input_ids": tokens, "labels": tokens}


def text_pairs(random: torch.Generator) -> Batch:
    """Return tokens and independent labels, both [ROWS, WORDS]."""
    return {name: text(random)["labels"] for name in ("input_ids", "labels")}


def classes(random: torch.Generator) -> Batch:
    """Return tokens, padded in every other row, and a class per row."""
    mask = torch.ones(ROWS, WORDS, dtype=torch.int64)
    mask[::2, -2:] = 0
    labels = torch.randint(2, (ROWS,), generator=random)
    return {"input_ids": text(random)["labels"], "attention_mask": mask, "labels": labels}


def images(random: torch.Generator) -> Batch:
    labels = torch.randint(5, (ROWS,), generator=random)
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=random), "labels": labels}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices only, and an `eps` that damps rounding errors of zero gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decay = {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1}
    no_decay = {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}
    return torch.optim.AdamW([decay, no_decay], 0.01, eps=1e-4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, 0.05, momentum=0.9, nesterov=True)


def warmup(optimizer: torch.optim.Optimizer) -> Any:
    return transformers.get_linear_schedule_with_warmup(optimizer, 2, STEPS + 1)


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    """Return a schedule that also changes the momentum."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)


@dataclass(frozen=True)
class Case:
    """A model, its data and the options of its training script."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    schedule: Callable[[torch.optim.Optimizer], Any] = warmup
    clip_norm: float = 0.0
    clip_value: float = 0.0
    accumulation: int = 1
    no_sync: bool = False
    """Whether all passes of a step except the last one run inside `model.no_sync()`."""
    checkpointing: bool | None = None
    """`use_reentrant` of `gradient_checkpointing_enable`; None disables checkpointing."""
    evaluates: bool = False
    generates: bool = False
    by_rank: bool = False
    """Whether the single process runs the rows of each rank separately, because of batch norm."""


CASES = {
    "gpt2": Case(gpt2, text, clip_norm=0.5, checkpointing=False, generates=True),
    "llama": Case(llama, text, clip_norm=0.5, accumulation=2, no_sync=True, evaluates=True, generates=True),
    "mixtral": Case(mixtral, text, clip_value=0.01, accumulation=2, evaluates=True),
    "t5": Case(t5, text_pairs, clip_norm=1.0, evaluates=True, accumulation=2),
    "t5-generates": Case(t5, text_pairs, generates=True),
    "bert": Case(bert, classes, sgd, one_cycle, clip_value=0.02, evaluates=True),
    "vit": Case(vit, images, clip_norm=0.2, checkpointing=True, evaluates=True),
    "resnet": Case(resnet, images, sgd, one_cycle, accumulation=2, no_sync=True, by_rank=True),
    "lora": Case(lora, text, clip_norm=0.1, checkpointing=False, generates=True),
}
Trained = tuple[list[float], list[Tensor], Batch]
"""Losses over this process's rows with gradient norms, generated tokens after each step, and final weights."""


def train(name: str, zero: int | None) -> Trained:
    """Train a case on this rank. With zero = None, a single process trains on the rows of all ranks."""
    case = CASES[name]
    torch.manual_seed(1)
    model = case.make()
    optimizer = case.optimizer(model)
    if case.checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": case.checkpointing})
    rank = None
    if zero is not None:
        rank = dist.get_rank()
        layout = repro.Layout(dp=RANKS, zero=zero, bucket_bytes=4000)
        model, optimizer = repro.parallelize(model, optimizer, layout)
    schedule = case.schedule(optimizer)
    random = torch.Generator().manual_seed(7)
    losses, tokens = [], []
    for _ in range(STEPS):
        model.train()
        full = case.batch(random)
        for i, piece in enumerate(cut(full, case.accumulation)):
            shares = cut(piece, RANKS)
            passes = shares if case.by_rank else [piece]
            if rank is not None:
                passes = [shares[rank]]
            last = i == case.accumulation - 1 or not case.no_sync or rank is None
            with contextlib.nullcontext() if last else model.no_sync():
                loss = sum(model(**each).loss for each in passes) / len(passes)
                (loss / case.accumulation).backward()
            losses.append(loss.item())
        if case.clip_norm:
            losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)))
        if case.clip_value:
            nn.utils.clip_grad_value_(model.parameters(), case.clip_value)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        model.eval()
        mine = full if rank is None else cut(full, RANKS)[rank]
        with torch.no_grad():
            if case.evaluates:
                losses.append(model(**mine).loss.item())
            if case.generates:
                tokens.append(generate(model, mine["input_ids"]))
    if rank is not None:
        return losses, tokens, model.repro.full_parameters()
    return losses, tokens, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def generate(model: nn.Module, words: Tensor) -> Tensor:
    """Generate the same number of tokens for every row, so that all ranks run the same number of passes."""
    length = {"min_new_tokens": 3, "max_new_tokens": 3, "do_sample": False}
    return model.generate(input_ids=words, attention_mask=torch.ones_like(words), **length)


def cut(batch: Batch, parts: int) -> list[Batch]:
    return [{name: rows.chunk(parts)[i] for name, rows in batch.items()} for i in range(parts)]


@cache
def reference(name: str) -> Trained:
    torch.set_num_threads(1)
    return train(name, None)


@pytest.mark.parametrize(("name", "zero"), [*product(CASES, (0, 3)), ("t5", 1), ("t5", 2)])
def test_library_model_trains_like_one_process(two: RankPool, name: str, zero: int) -> None:
    expected_losses, expected_tokens, expected = reference(name)
    losses, tokens, weights = zip(*two.run(train, name, zero), strict=True)
    means = [sum(both) / len(both) for both in zip(*losses, strict=True)]
    assert means == pytest.approx(expected_losses, rel=1e-6)
    for mine, full in zip(zip(*tokens, strict=True), expected_tokens, strict=True):
        assert torch.equal(torch.cat(mine), full)
    for each in weights:
        for key, value in expected.items():
            torch.testing.assert_close(each[key], value, rtol=1e-5, atol=1e-6, msg=key)
