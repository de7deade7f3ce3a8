"""Small GPT-2 models of transformers, and their weights in checkpoints of Megatron-LM's ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from repro.quality.weights.source import WeightSource

LAYERS, HIDDEN, HEADS, VOCAB, SEQ = 4, 24, 4, 90, 12
WIDTH = HIDDEN // HEADS


def gpt2(**config: Any) -> Any:
    """Return a `GPT2LMHeadModel` with random parameters, including biases and norms."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "vocab_size": VOCAB, "n_positions": SEQ}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    return randomise(GPT2LMHeadModel(GPT2Config(**{**sizes, **config})))


def randomise(model: Any) -> Any:
    """Give a model of transformers random parameters, in which the weights of norms are about 1."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            vector = parameter.dim() == 1
            noise = torch.randn(parameter.shape, generator=generator) * (0.1 if vector else 0.3)
            parameter.copy_(noise + (vector and name.endswith("weight")))
    return model.eval()


def read_all(source: WeightSource) -> dict[str, Tensor]:
    """Return all parameters under native names."""
    sizes = {name: torch.Size(place.shape) for name, place in source.parameter_shapes.items()}
    return {name: source.elements(name, 0, size.numel()).view(size) for name, size in sizes.items()}


def compare_ranges(source: WeightSource, expected: dict[str, Tensor], ranks: int) -> None:
    """Assert that each tp rank reads any range of its shard. Padding of the vocabulary to two more rows is zero.

    A rank reads full keys if tp exceeds the number of key heads.
    """
    names = list(source.parameter_shapes)
    for rank in range(ranks):
        values = source.values(names, rank, ranks, source.model.vocab + 2)
        for i, name in enumerate(names):
            value, split = expected[name], source.parameter_shapes[name].split
            if name in ("embed.tokens", "head.output"):
                value = torch.cat([value, torch.zeros(2, value.shape[1])])
            if split is not None and not (".kv" in name and ranks > source.model.key_heads):
                value = value.chunk(ranks, split)[rank]
            flat = value.reshape(-1)
            third = flat.numel() // 3
            for start, stop in ((0, flat.numel()), (third, 2 * third), (third - 1, 2 * third + 1), (5, 6)):
                assert torch.equal(values(i, start, stop), flat[start:stop]), (name, rank, ranks, start)


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
            ranks[t, p] = {f"model{c if chunks > 1 else ''}": part for c, part in enumerate(states)}
    return ranks


def _state(
    state: dict[str, Tensor], t: int, tp: int, layers: range, version: float, first: bool, last: bool
) -> dict[str, Any]:
    rows, inner, ffn = (slice(t * size // tp, (t + 1) * size // tp) for size in (VOCAB, HIDDEN, 4 * HIDDEN))
    transformer: dict[str, Tensor] = {}
    for local, i in enumerate(layers):
        theirs = {
            name.removeprefix(f"h.{i}."): value for name, value in state.items() if name.startswith(f"h.{i}.")
        }
        ours = {
            "attention.query_key_value.weight": qkv(theirs["attn.c_attn.weight"].T, t, tp, version),
            "attention.query_key_value.bias": qkv(theirs["attn.c_attn.bias"], t, tp, version),
            "attention.dense.weight": theirs["attn.c_proj.weight"].T[:, inner],
            "attention.dense.bias": theirs["attn.c_proj.bias"],
            "mlp.dense_h_to_4h.weight": theirs["mlp.c_fc.weight"].T[ffn],
            "mlp.dense_h_to_4h.bias": theirs["mlp.c_fc.bias"][ffn],
            "mlp.dense_4h_to_h.weight": theirs["mlp.c_proj.weight"].T[:, ffn],
            "mlp.dense_4h_to_h.bias": theirs["mlp.c_proj.bias"],
        }
        for kind in ("weight", "bias"):
            ours[f"input_layernorm.{kind}"] = theirs[f"ln_1.{kind}"]
            ours[f"post_attention_layernorm.{kind}"] = theirs[f"ln_2.{kind}"]
        transformer |= {f"layers.{local}.{name}": value for name, value in ours.items()}
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
