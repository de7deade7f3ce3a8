"""A tokenizer of 262 tokens, and a GPT-2 whose every prediction is known by hand: logits that depend on nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from repro.engines.native.checkpoint.files import write_safetensors
from repro.quality.weights.families import GPT2
from tests.training import TINY

MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "m"), ("a", "t"), ("Ġm", "at")]
"""Six beyond the bytes; ` the` and ` mat` are tokens."""
SIZE = 256 + len(MERGES)
CONTEXT = 16


def write_tokenizer(folder: Path) -> dict[str, int]:
    """`vocab.json` and `merges.txt`; ids by token."""
    from tokenizers.pre_tokenizers import ByteLevel

    names = [*sorted(ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    vocab = {name: number for number, name in enumerate(names)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in MERGES))
    return vocab


def write_weights(folder: Path, logits: dict[int, float], size: int = SIZE) -> None:
    """Weights with which the logits are these everywhere, and 0 for the other tokens.

    The last norm gives its bias, which is 1 in the first place; there the embedding has the logits.
    """
    model = replace(TINY, layers=2, vocab=size, seq=CONTEXT)
    tensors = {pair.theirs: torch.zeros(pair.shape) for pair in GPT2.counterparts(model)}
    tensors["ln_f.bias"][0] = 1
    for token, logit in logits.items():
        tensors["wte.weight"][token, 0] = logit
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    write_safetensors(folder / "model.safetensors", shapes, lambda name: [tensors[name].reshape(-1)], {})
    (folder / "config.json").write_text(json.dumps(GPT2.document(model, size)))
