"""What turns text into a model's tokens: GPT-2's byte-pair encoding from files, or the bytes themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from repro.config import ConfigError
from repro.model.data import gpt2
from repro.util.files import sha256_digest

BYTES = "bytes"
"""Name of the tokenizer of models that were trained on bytes."""
STOP_WORDS = Path(__file__).parent / "files" / "stop_words.txt"
"""English words of grammar, 127 of them, as lists of stop words begin with."""


class Tokenizer(Protocol):
    """Text to tokens."""

    size: int
    """Of its vocabulary; every id is below."""

    def encode(self, text: str) -> list[int]: ...
    def leading(self, words: frozenset[str]) -> list[int]:
        """Ids of tokens that are a space and one of `words`, in any case."""

    def about(self) -> Mapping[str, str]:
        """What a record says of it."""


class Bytes:
    """A token for every byte."""

    size = 256

    def encode(self, text: str) -> list[int]:
        """The bytes of the text in UTF-8."""
        return list(text.encode())

    def leading(self, words: frozenset[str]) -> list[int]:
        """None: a byte is no word."""
        return []

    def about(self) -> Mapping[str, str]:
        """Its name."""
        return {"name": BYTES}


class BytePairs:
    """GPT-2's encoding."""

    def __init__(self, folder: Path):
        self._files = gpt2.files(folder)
        self._inner = gpt2.tokenizer(folder)
        self.size = self._inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids; the end of text's name in it becomes its id."""
        return list(self._inner.encode(text).ids)

    def leading(self, words: frozenset[str]) -> list[int]:
        """By the text that each id stands for."""
        texts = ((i, self._inner.decode([i])) for i in range(self.size))
        return [i for i, text in texts if text.startswith(" ") and text[1:].lower() in words]

    def about(self) -> Mapping[str, str]:
        """Its files and what is in them."""
        return {
            "name": "GPT-2 byte pairs",
            **{path.name: f"sha256 {sha256_digest(path)}" for path in self._files},
        }


def open_tokenizer(name: str, weights: Path) -> Tokenizer:
    """`bytes`, or a folder with `vocab.json` and `merges.txt`; empty: the weights' folder, or what comes with GPT-2.

    Raises `ConfigError` where the files, or a package that reads them, are missing.
    """
    if name == BYTES:
        return Bytes()
    if name:
        return BytePairs(Path(name))
    return BytePairs(weights if gpt2.has_files(weights) else gpt2.packaged())


def stop_words(path: Path | None) -> frozenset[str]:
    """The words of a file, between white space.  Raises `ConfigError`."""
    try:
        return frozenset((path or STOP_WORDS).read_text(encoding="utf-8").lower().split())
    except (OSError, UnicodeDecodeError):
        raise ConfigError("--stop-words", str(path), "a text file of words") from None


def check_vocabulary(ids: Iterable[int], vocab: int) -> None:
    """Raise `ConfigError` if the model has no such token."""
    largest = max(ids, default=0)
    if largest >= vocab:
        right = f"the tokenizer that the model was trained with: it has {vocab} tokens, and this one gives id {largest}"
        raise ConfigError("--tokenizer", expected=right)
