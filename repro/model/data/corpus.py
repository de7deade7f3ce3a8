"""Finite corpora: the packaged text, as bytes or in GPT-2's encoding, and a person's own files."""

from __future__ import annotations

from pathlib import Path

from repro.config import ConfigError
from repro.config.token_files import Corpus, open_text, open_tokens

SHAKESPEARE = Path(__file__).parent / "files" / "shakespeare.txt"
"""Plays by William Shakespeare (public domain), 1.5 MB of ASCII."""


def open_corpus(data: str, vocab: int) -> Corpus:
    """`shakespeare` (bytes), `shakespeare-gpt2` (BPE), or the tokens of the `.txt` or `.bin` file at that path."""
    if data == "shakespeare":
        return open_text(data, SHAKESPEARE, vocab)
    if data == "shakespeare-gpt2":
        from repro.model.data.gpt2 import VOCABULARY, encode

        if vocab < VOCABULARY:
            raise ConfigError(
                "data",
                data,
                says=f"needs a model with GPT-2's vocabulary of {VOCABULARY}; this one has {vocab}",
            )
        return Corpus(data, encode(SHAKESPEARE.read_text(encoding="utf-8")), VOCABULARY - 1)
    return open_tokens(data, vocab)
