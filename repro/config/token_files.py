"""Readers of training data: a text file, whose bytes are the token ids, or a `.bin` file of token ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.config.errors import ConfigError, require

LLM_C_MAGIC = 20240520
"""First 4 bytes of llm.c's `.bin` files, which begin with a header and are rejected."""


@dataclass(frozen=True)
class Corpus:
    """Token ids of one training data file, in order."""

    name: str
    """Value of `Training.data`."""
    tokens: npt.NDArray[Any]
    """Token ids as an array [tokens] of uint8, uint16 or uint32; mapped from the file into memory."""
    largest: int
    """Upper bound of the token ids: the largest id, or the maximum of the data type if the ids have not been read."""


def open_tokens(data: str, vocab: int) -> Corpus:
    """Return the token ids of a `.txt` (bytes) or `.bin` file at the path `data`.

    A `.bin` file is flat, without a header, little-endian: ids of 4 bytes if its name ends in `.u32.bin`,
    else of 2 bytes, as nanoGPT writes them.  Text is read byte by byte, so its encoding does not matter.

    Raises:
        ConfigError: The file is missing, has a partial id, or has ids outside `vocab`.
    """
    path = Path(data).expanduser()
    if path.suffix not in (".txt", ".bin"):
        raise ConfigError(
            "data", data, "synthetic, shakespeare, shakespeare-gpt2, or the path of a .txt or .bin file"
        )
    return open_text(data, path, vocab) if path.suffix == ".txt" else _binary(data, path)


def count_windows(corpus: Corpus, seq: int) -> int:
    """Return the number of training samples of `seq + 1` tokens in a data file.

    Raises:
        ConfigError: The corpus is too short for one sample.
    """
    windows = (len(corpus.tokens) - 1) // seq
    if windows < 1:
        right = f"data of at least seq + 1 = {seq + 1} tokens; the file has {len(corpus.tokens)}"
        raise ConfigError("data", corpus.name, right)
    return windows


def open_text(name: str, path: Path, vocab: int) -> Corpus:
    """Return the bytes of the text file at `path` as token ids."""
    tokens = _mapped(name, path, np.dtype(np.uint8))
    if vocab > 255:
        return Corpus(name, tokens, 255)
    largest = int(tokens.max()) if len(tokens) else 0
    require(largest < vocab, "data", name, f"bytes under vocab = {vocab}; the file has byte {largest}")
    return Corpus(name, tokens, largest)


def _binary(name: str, path: Path) -> Corpus:
    wide = path.name.endswith(".u32.bin")
    tokens = _mapped(name, path, np.dtype("<u4" if wide else "<u2"))
    if not wide:
        start = np.asarray(tokens[:4096])
        if len(start) >= 2 and start[:2].tobytes() == LLM_C_MAGIC.to_bytes(4, "little"):
            raise ConfigError(
                "data", name, "token ids without a header; this llm.c file has a header of 1024 bytes"
            )
        # In small 4-byte ids that are read as 2-byte ids, every second id is 0; tokenised text is not.
        if len(start) >= 64 and not start[1::2].any() and start[::2].any():
            right = "2-byte ids; these are probably 4-byte ids, whose file name must end in .u32.bin"
            raise ConfigError("data", name, right)
    return Corpus(name, tokens, int(np.iinfo(tokens.dtype).max))


def _mapped(name: str, path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a data file as a memory-mapped array of token ids [tokens]."""
    try:
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise ConfigError("data", name, f"ids of {dtype.itemsize} bytes each; the file has {size} bytes")
        return np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype)
    except OSError as error:
        raise ConfigError("data", name, f"a readable file; {error.strerror}") from None
