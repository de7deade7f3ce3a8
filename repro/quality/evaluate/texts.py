"""A text file as samples: WikiText's detokeniser and windows, LAMBADA's last words."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from repro.config import ConfigError
from repro.quality.evaluate.protocols import DATA, GPT2, LAMBADA, MEGATRON, WIKITEXT, Protocol
from repro.quality.evaluate.tokens import Tokenizer

STRIDE = 32
"""Tokens between Megatron-LM's windows (`--overlapping-eval`)."""
_JOINED = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."))
"""WikiText's separators inside words and numbers."""
_BRACKETS = tuple(
    (re.compile(rf"{re.escape(a)}\s*([^{re.escape(b)}]*?)\s*{re.escape(b)}"), rf"{a}\1{b}")
    for a, b in ("()", "[]", "{}", '""', "''")
)
_HEADINGS = (("= = = =", "===="), ("= = =", "==="), ("= =", "=="))


@dataclass(frozen=True)
class Samples:
    """What is scored: stretches of one sequence of tokens, of each the last few tokens."""

    tokens: npt.NDArray[np.int64]
    """[tokens]; stretches may overlap."""
    spans: npt.NDArray[np.int64]
    """[samples, 3]: where a sample begins, how many tokens it has, and how many of its last ones count."""
    words: int = 0
    """Of the original text (WikiText)."""
    truncated: int = 0
    """Samples whose beginning was cut off, since the model's context is shorter."""

    @property
    def longest(self) -> int:
        """Tokens that the longest sample puts into the model."""
        return int(self.spans[:, 1].max()) - 1

    def save(self, path: Path) -> None:
        """Write it where ranks find it."""
        np.savez(path, tokens=self.tokens, spans=self.spans)

    @staticmethod
    def load(path: Path) -> Samples:
        """What `save` wrote, but for the counts, which no rank needs."""
        with np.load(path) as found:
            return Samples(found["tokens"], found["spans"])


def read(path: Path, protocol: Protocol, tokenizer: Tokenizer, context: int, stride: int = 0) -> Samples:
    """The samples of a task's file for a model of `context` tokens.  Raises `ConfigError`.

    `stride`: tokens between windows, 0 for the protocol's own.
    """
    if stride and protocol.task != WIKITEXT:
        raise ConfigError("--stride", stride, says=f"is for windows, which {protocol.task} has none of")
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        advice = DATA[protocol.task].advice
        raise ConfigError("--data", str(path), says=f"{error.strerror}; {advice}") from None
    except UnicodeDecodeError:
        raise ConfigError("--data", str(path), "text in UTF-8") from None
    if protocol.task == LAMBADA:
        return last_words(list(_lines(text, path)), protocol, tokenizer, context)
    own = STRIDE if protocol.name == MEGATRON else context
    if stride > context:
        raise ConfigError(
            "--stride", stride, f"at most {context}, the model's context, or tokens are left out"
        )
    words = len(text.strip().split(" "))
    tokens = tokenizer.encode(detokenize(text))
    if len(tokens) < 2 or words < 2:
        raise ConfigError("--data", str(path), "a text of two words or more")
    spans = list(windows(len(tokens), context, stride or min(own, context)))
    return Samples(np.array(tokens, dtype=np.int64), np.array(spans, dtype=np.int64), words=words)


def detokenize(text: str) -> str:
    """WikiText as people write, by the rules of Megatron-LM's `wikitext_detokenizer`, in their order.

    Its rule for years (`' 90`) has slashes around its pattern, matches nothing, and is left out.
    """
    text = text.replace("s '", "s'")
    for old, new in _JOINED:
        text = text.replace(old, new)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for pattern, new in _BRACKETS:
        text = pattern.sub(new, text)
    for old, new in _HEADINGS:
        text = text.replace(old, new)
    text = text.replace(" ° ", "°").replace(" \n", "\n").replace("\n ", "\n")
    return text.replace(" N ", " 1 ").replace(" 's", "'s")


def windows(tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, tokens, how many of the last count) of windows that score every token but the first once.

    Each has `context` inputs and one target more; all but the first count what the one before did not see.
    """
    for k in range(1 + max(0, math.ceil((tokens - 1 - context) / stride))):
        begin = k * stride
        end = min(begin + context + 1, tokens)
        yield begin, end - begin, end - 1 - (begin - stride + context if k else 0)


def last_words(texts: Sequence[str], protocol: Protocol, tokenizer: Tokenizer, context: int) -> Samples:
    """LAMBADA's samples: the whole last word (`megatron`), or the last token of the text."""
    tokens: list[int] = []
    spans = []
    truncated = 0
    for number, text in enumerate(texts, 1):
        before, last = _parted(text, protocol, tokenizer)
        if not before or not last:
            raise ConfigError("--data", f"sample {number}", "a text with a word before its last one")
        if len(last) > context:
            raise ConfigError("--data", f"sample {number}", f"a last word of at most {context} tokens")
        room = context + 1 - len(last)
        truncated += len(before) > room
        before = before[-room:]
        spans.append((len(tokens), len(before) + len(last), len(last)))
        tokens += before + last
    if not spans:
        raise ConfigError("--data", says="has no samples")
    return Samples(np.array(tokens, dtype=np.int64), np.array(spans, dtype=np.int64), truncated=truncated)


def _parted(text: str, protocol: Protocol, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Tokens before those that are to be predicted, and these."""
    if protocol.name == MEGATRON:
        words = text.split()
        if len(words) < 2:
            return [], []
        begin = text.rfind(words[-1])
        return tokenizer.encode(text[:begin].strip()), tokenizer.encode(f" {words[-1]}")
    if protocol.name == GPT2:
        text = "\n" + text.replace("“", '"').replace("”", '"').strip()
    tokens = tokenizer.encode(text)
    return tokens[:-1], tokens[-1:]


def _lines(text: str, path: Path) -> Iterable[str]:
    """One text a line; in a `.jsonl` file it is the value of `text`."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if not path.name.endswith((".jsonl", ".json")):
            yield line
            continue
        try:
            found = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            found = None
        if not isinstance(found, str):
            raise ConfigError("--data", f"line {number}", 'a JSON object with a "text"', file=str(path))
        yield found
