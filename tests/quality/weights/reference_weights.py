"""Small GPT-2 models of transformers, and their weights in checkpoints of Megatron-LM's ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYERS, HIDDEN, HEADS, VOCAB, SEQ = 4, 24, 4, 90, 12
WIDTH = HIDDEN // HEADS


def gpt2(**config: Any) -> Any:
    """Return a `GPT2LMHeadModel` with random parameters, including biases and norms."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": SEQ}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**{**sizes, **config})).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = ".ln_" in name and name.endswith(".weight")
            scale = 0.1 if name.endswith(".bias") else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + norm)
    return model


def tokens(count: int = 3, seq: int = SEQ, seed: int = 3) -> Tensor:
    """Return random ids, [count, seq]."""
    return torch.randint(VOCAB, (count, seq), generator=torch.Generator().manual_seed(seed))


def megatron_ranks(
    model: Any, tp: int, pp: int, version: float, chunks: int = 1
) -> dict[tuple[int, int], Any]:
    """Return the states of ranks (t, p) of Megatron-LM for a `GPT2LMHeadModel`, split over tp, stages and chunks."""
    state = {name.removeprefix("transformer."): value for name, value in model.state_dict().items()}
    per = LAYERS // (pp * chunks)
    ranks = {}
    for t in range(tp):
        for p in range(pp):
            states = []
            for c in range(chunks):
                part = c * pp + p
                layers = range(part * per, (part + 1) * per)
                states.append(_state(state, t, tp, layers, version, part == 0, part == pp * chunks - 1))
            named = (
                {"model": states[0]} if chunks == 1 else {f"model{c}": part for c, part in enumerate(states)}
            )
            ranks[t, p] = named
    return ranks


def _state(
    state: dict[str, Tensor], t: int, tp: int, layers: range, version: float, first: bool, last: bool
) -> dict[str, Any]:
    rows = slice(t * VOCAB // tp, (t + 1) * VOCAB // tp)
    transformer: dict[str, Tensor] = {}
    for local, i in enumerate(layers):
        name, source = f"layers.{local}", f"h.{i}"
        transformer[f"{name}.input_layernorm.weight"] = state[f"{source}.ln_1.weight"]
        transformer[f"{name}.input_layernorm.bias"] = state[f"{source}.ln_1.bias"]
        weight, bias = state[f"{source}.attn.c_attn.weight"], state[f"{source}.attn.c_attn.bias"]
        attention = f"{name}.attention"
        transformer[f"{attention}.query_key_value.weight"] = qkv(weight.T, t, tp, version)
        transformer[f"{attention}.query_key_value.bias"] = qkv(bias, t, tp, version)
        inner = slice(t * HIDDEN // tp, (t + 1) * HIDDEN // tp)
        transformer[f"{attention}.dense.weight"] = state[f"{source}.attn.c_proj.weight"].T[:, inner]
        transformer[f"{attention}.dense.bias"] = state[f"{source}.attn.c_proj.bias"]
        transformer[f"{name}.post_attention_layernorm.weight"] = state[f"{source}.ln_2.weight"]
        transformer[f"{name}.post_attention_layernorm.bias"] = state[f"{source}.ln_2.bias"]
        ffn = slice(t * 4 * HIDDEN // tp, (t + 1) * 4 * HIDDEN // tp)
        transformer[f"{name}.mlp.dense_h_to_4h.weight"] = state[f"{source}.mlp.c_fc.weight"].T[ffn]
        transformer[f"{name}.mlp.dense_h_to_4h.bias"] = state[f"{source}.mlp.c_fc.bias"][ffn]
        transformer[f"{name}.mlp.dense_4h_to_h.weight"] = state[f"{source}.mlp.c_proj.weight"].T[:, ffn]
        transformer[f"{name}.mlp.dense_4h_to_h.bias"] = state[f"{source}.mlp.c_proj.bias"]
    language: dict[str, Any] = {}
    if first:
        language["embedding"] = {
            "word_embeddings": {"weight": state["wte.weight"][rows]},
            "position_embeddings": {"weight": state["wpe.weight"]},
        }
    if last:
        transformer["final_layernorm.weight"] = state["ln_f.weight"]
        transformer["final_layernorm.bias"] = state["ln_f.bias"]
    language["transformer"] = transformer
    found: dict[str, Any] = {"language_model": language}
    if last and not first:
        found["word_embeddings_for_head"] = {"weight": state["wte.weight"][rows]}
    return found


def qkv(full: Tensor, t: int, tp: int, version: float) -> Tensor:
    """Return a rank's rows of query, key and value, [3 inner, ...], in the order of the checkpoint version."""
    heads = range(t * HEADS // tp, (t + 1) * HEADS // tp)
    if version == 0:
        order = [(k, h, w) for k in range(3) for h in heads for w in range(WIDTH)]
    elif version == 1:
        order = [(k, h, w) for h in heads for w in range(WIDTH) for k in range(3)]
    else:
        order = [(k, h, w) for h in heads for k in range(3) for w in range(WIDTH)]
    return full[[k * HIDDEN + h * WIDTH + w for k, h, w in order]]


def save_megatron(folder: Path, ranks: dict[tuple[int, int], Any], version: float, **extra: Any) -> Path:
    """Write a checkpoint of these ranks with the arguments of the training; return its folder."""
    pp = 1 + max(p for _, p in ranks)
    for (t, p), state in ranks.items():
        name = f"mp_rank_{t:02d}_{p:03d}" if pp > 1 else f"mp_rank_{t:02d}"
        path = folder / "iter_0000100" / name / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        content = {"iteration": 100, **clone_tensors(state), **extra}
        if version:
            content["checkpoint_version"] = version
        content.setdefault("args", argparse.Namespace(num_attention_heads=HEADS, layernorm_epsilon=1e-5))
        torch.save(content, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def clone_tensors(state: Any) -> Any:
    """Return copies of all tensors, because torch.save writes the full storage of a view."""
    if isinstance(state, Tensor):
        return state.clone()
    return {key: clone_tensors(value) for key, value in state.items()}
