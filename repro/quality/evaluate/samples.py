"""Tokenized samples of an evaluation text by a published protocol: windows of WikiText, last words of LAMBADA.

`files/protocols.toml` describes the protocols, each with its source and the rules that the source omits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from repro.config import ConfigError, require
from repro.config.files import build_dataclass, read_toml
from repro.model.data import gpt2
from repro.util.files import sha256_digest

WIKITEXT, LAMBADA = "wikitext103", "lambada"
MEGATRON, GPT2 = "megatron", "gpt2"
"""Names of the evaluation protocols that split a text by special rules."""
PROTOCOLS_FILE = Path(__file__).parent / "files" / "protocols.toml"
BYTES = "bytes"
"""Name of the tokenizer that makes each byte a token, for models that were trained on bytes."""
STOP_WORDS_FILE = Path(__file__).parent / "files" / "stop_words.txt"
"""File with 127 English stop words, which LAMBADA's filtered accuracy excludes."""
MEGATRON_STRIDE_TOKENS = 32
"""Number of tokens between the starts of text windows in Megatron-LM's evaluation (`--overlapping-eval`)."""
_SEPARATORS = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."))
"""WikiText's separators inside words and numbers, and the characters that they replace."""
_BRACKETS = tuple(
    (re.compile(rf"{re.escape(a)}\s*([^{re.escape(b)}]*?)\s*{re.escape(b)}"), rf"{a}\1{b}")
    for a, b in ("()", "[]", "{}", '""', "''")
)
_HEADINGS = (("= = = =", "===="), ("= = =", "==="), ("= =", "=="))


@dataclass(frozen=True, kw_only=True)
class EvaluationProtocol:
    """Published procedure that scores a language model on a task (WikiText-103 or LAMBADA)."""

    task: str
    name: str
    source: str
    """Publication or code that defines the evaluation protocol."""
    rules: list[str]
    left_open: list[str] = field(default_factory=list)
    """Rules of the protocol that its source does not specify, and the rules that this suite uses instead."""
    published: list[str] = field(default_factory=list)
    """Published scores of models by this evaluation protocol."""


@cache
def _read_protocols() -> tuple[list[EvaluationProtocol], dict[str, str]]:
    """Return all evaluation protocols, and for each task a message with the download address of its text."""
    tables = read_toml(PROTOCOLS_FILE)
    found = [build_dataclass(EvaluationProtocol, entry) for entry in tables["protocol"]]
    return found, tables["download_advice"]


def find_protocol(task: str, name: str = "") -> EvaluationProtocol:
    """Return the evaluation protocol `name` of a task, or the task's first one. Raises `ConfigError` if unknown."""
    protocols, advice = _read_protocols()
    require(task in advice, "--task", task, f"one of {', '.join(advice)}")
    known = {protocol.name: protocol for protocol in protocols if protocol.task == task}
    require(not name or name in known, "--protocol", name, f"one of {', '.join(known)}")
    return known[name] if name else next(iter(known.values()))


class ByteTokenizer:
    """Tokenizer with one token per byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def word_tokens(self, words: frozenset[str]) -> list[int]:
        """Return no token ids: the token of a word contains a space and the word, but tokens here are single bytes."""
        return []

    def describe(self) -> Mapping[str, str]:
        """Return the description of this tokenizer for the record of an evaluation."""
        return {"name": BYTES}


class Gpt2Tokenizer:
    """Tokenizer with GPT-2's byte-pair encoding, from the files `vocab.json` and `merges.txt`."""

    def __init__(self, folder: Path):
        self._files = gpt2.files(folder)
        self._inner = gpt2.tokenizer(folder)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, in which `<|endoftext|>` becomes one id."""
        return list(self._inner.encode(text).ids)

    def word_tokens(self, words: frozenset[str]) -> list[int]:
        """Return the ids of tokens that consist of a space and one of `words`, in upper or lower case."""
        texts = ((i, self._inner.decode([i])) for i in range(self._inner.get_vocab_size()))
        return [i for i, text in texts if text.startswith(" ") and text[1:].lower() in words]

    def describe(self) -> Mapping[str, str]:
        """Return the description of a tokenizer for the record of an evaluation: its name and digests of its files."""
        digests = {path.name: f"sha256 {sha256_digest(path)}" for path in self._files}
        return {"name": "GPT-2 byte pairs", **digests}


Tokenizer = ByteTokenizer | Gpt2Tokenizer


def open_tokenizer(name: str, weights: Path) -> Tokenizer:
    """Return the tokenizer of single bytes if `name` is `bytes`, else GPT-2's tokenizer from the folder `name`.

    The files are `vocab.json` and `merges.txt`. An empty name selects the folder of the weights if it contains these
    files, else GPT-2's files. Raises `ConfigError` if the files, or the Python package that reads them, are missing.
    """
    if name == BYTES:
        return ByteTokenizer()
    if name:
        return Gpt2Tokenizer(Path(name))
    return Gpt2Tokenizer(weights if gpt2.has_files(weights) else gpt2.packaged())


def read_stop_words(path: Path | None) -> frozenset[str]:
    """Return the stop words of a text file (default: `STOP_WORDS_FILE`), in lower case."""
    try:
        return frozenset((path or STOP_WORDS_FILE).read_text(encoding="utf-8").lower().split())
    except (OSError, UnicodeDecodeError):
        raise ConfigError("--stop-words", str(path), "a readable UTF-8 text file with stop words") from None


def check_vocabulary(ids: Iterable[int], vocab: int) -> None:
    """Raise `ConfigError` if a token id is outside the model's vocabulary."""
    largest = max(ids, default=0)
    if largest >= vocab:
        right = f"the tokenizer of the model with {vocab} tokens; the selected tokenizer gives id {largest}"
        raise ConfigError("--tokenizer", expected=right)


@dataclass(frozen=True)
class Samples:
    """Samples of an evaluation: spans of one sequence of tokens. The last tokens of each span are scored."""

    tokens: npt.NDArray[np.int64]
    """Token ids of the evaluated text, shape [tokens]; the spans of several samples may overlap."""
    spans: npt.NDArray[np.int64]
    """First token, number of tokens and number of scored tokens of each sample, [samples, 3]."""
    words: int = 0
    """Number of words in the original text of WikiText; 0 for LAMBADA."""
    truncated: int = 0
    """Number of samples that lost their first tokens because they exceed the model's context."""

    @property
    def longest(self) -> int:
        """Return the maximum number of input tokens of a sample."""
        return int(self.spans[:, 1].max()) - 1

    def save(self, path: Path) -> None:
        """Write all samples, as tokens and a range of tokens per sample, to a file that the rank processes load."""
        np.savez(path, tokens=self.tokens, spans=self.spans)

    @staticmethod
    def load(path: Path) -> Samples:
        """Return the samples of an evaluation from a file that `save` wrote."""
        with np.load(path) as found:
            return Samples(found["tokens"], found["spans"])


def read_samples(
    path: Path, protocol: EvaluationProtocol, tokenizer: Tokenizer, context: int, stride: int = 0
) -> Samples:
    """Return the samples of a task's text for `context` tokens; `stride`: tokens between windows, 0: the protocol's."""
    if stride and protocol.task != WIKITEXT:
        says = f"needs task {WIKITEXT}; the samples of task {protocol.task} are not windows of a text"
        raise ConfigError("--stride", stride, says=says)
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        _, advice = _read_protocols()
        says = f"{error.strerror}; {advice[protocol.task]}"
        raise ConfigError("--data", str(path), says=says) from None
    except UnicodeDecodeError:
        raise ConfigError("--data", str(path), "a text file in UTF-8") from None
    if protocol.task == LAMBADA:
        return last_word_samples(list(_read_lines(text, path)), protocol, tokenizer, context)
    default_stride = MEGATRON_STRIDE_TOKENS if protocol.name == MEGATRON else context
    if stride > context:
        right = f"at most {context} tokens, the model's context, so that text windows include every token"
        raise ConfigError("--stride", stride, right)
    words = len(text.strip().split(" "))
    tokens = tokenizer.encode(detokenize(text))
    require(len(tokens) >= 2 and words >= 2, "--data", str(path), "a text of at least two words")
    spans = list(split_windows(len(tokens), context, stride or min(default_stride, context)))
    return Samples(np.array(tokens, dtype=np.int64), np.array(spans, dtype=np.int64), words=words)


def detokenize(text: str) -> str:
    """Return WikiText as natural text, by the rules of Megatron-LM's `wikitext_detokenizer` in their order.

    Megatron-LM's rule for years (`' 90`) is omitted, because its pattern contains slashes and never matches.
    """
    text = text.replace("s '", "s'")
    for old, new in _SEPARATORS:
        text = text.replace(old, new)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for pattern, new in _BRACKETS:
        text = pattern.sub(new, text)
    for old, new in _HEADINGS:
        text = text.replace(old, new)
    text = text.replace(" ° ", "°").replace(" \n", "\n").replace("\n ", "\n")
    return text.replace(" N ", " 1 ").replace(" 's", "'s")


def split_windows(tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield text windows that together score every token except the first exactly once.

    A window is (number of its first token, number of tokens, number of scored tokens). It has up to `context` + 1
    tokens and scores the tokens after the end of the preceding window.
    """
    for k in range(1 + max(0, math.ceil((tokens - 1 - context) / stride))):
        begin = k * stride
        end = min(begin + context + 1, tokens)
        yield begin, end - begin, end - 1 - (begin - stride + context if k else 0)


def last_word_samples(
    texts: Sequence[str], protocol: EvaluationProtocol, tokenizer: Tokenizer, context: int
) -> Samples:
    """Return LAMBADA samples that score the full last word (protocol `megatron`) or the last token of each text."""
    tokens: list[int] = []
    spans = []
    truncated = 0
    for number, text in enumerate(texts, 1):
        before, last = _split_target(text, protocol, tokenizer)
        require(before and last, "--data", f"sample {number}", "a text of at least two words")
        if len(last) > context:
            raise ConfigError("--data", f"sample {number}", f"a last word of at most {context} tokens")
        available = context + 1 - len(last)
        truncated += len(before) > available
        before = before[-available:]
        spans.append((len(tokens), len(before) + len(last), len(last)))
        tokens += before + last
    require(spans, "--data", says="has no samples")
    return Samples(np.array(tokens, dtype=np.int64), np.array(spans, dtype=np.int64), truncated=truncated)


def _split_target(
    text: str, protocol: EvaluationProtocol, tokenizer: Tokenizer
) -> tuple[list[int], list[int]]:
    """Return the tokens of a LAMBADA text before its target (the last word or token), and the tokens of the target."""
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


def _read_lines(text: str, path: Path) -> Iterator[str]:
    """Yield the non-empty lines of a text; in a `.jsonl` or `.json` file, the value of `text` in each line."""
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
            raise ConfigError("--data", f"line {number}", 'a JSON object with the key "text"', file=str(path))
        yield found
