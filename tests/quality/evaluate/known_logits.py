"""A tokenizer of 262 tokens, and weights of a GPT-2 whose logits do not depend on the input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from repro.engines.native.checkpoint.files import write_safetensors
from repro.quality.weights.families import GPT2
from tests.training import TINY

MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "m"), ("a", "t"), ("Ġm", "at")]
"""Merges that add six tokens to the 256 bytes; ` the` and ` mat` are tokens."""
VOCAB = 256 + len(MERGES)
CONTEXT = 16


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write `vocab.json` and `merges.txt`; return ids by token."""
    from tokenizers.pre_tokenizers import ByteLevel

    names = [*sorted(ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    vocab = {name: number for number, name in enumerate(names)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES))
    return vocab


def write_weights(folder: Path, logits: dict[int, float], vocab_size: int = VOCAB) -> None:
    """Write weights that give these logits at every position, and 0 for the other tokens.

    The final norm returns its bias, which is 1 in element 0. The embedding has the logits in element 0.
    """
    model = replace(TINY, layers=2, vocab=vocab_size, seq=CONTEXT)
    tensors = {pair.theirs: torch.zeros(pair.shape) for pair in GPT2.counterparts(model)}
    tensors["ln_f.bias"][0] = 1
    for token, logit in logits.items():
        tensors["wte.weight"][token, 0] = logit
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    write_safetensors(folder / "model.safetensors", shapes, lambda name: [tensors[name].reshape(-1)], {})
    (folder / "config.json").write_text(json.dumps(GPT2.document(model, vocab_size)))
