"""Streams of numbered training samples: synthetic tokens, packaged text or a user's files.

Sample k depends only on the seed and k.  The step and the global batch determine the numbers of a rank's samples, so
layout and micro-batch do not change the data of a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from repro.config import ConfigError, Model, Training
from repro.config.token_files import Corpus, count_windows, open_text, open_tokens

SHAKESPEARE = Path(__file__).parent / "files" / "shakespeare.txt"
"""Path of the packaged training text: plays by William Shakespeare (public domain), 1.5 MB of ASCII."""
U64 = npt.NDArray[np.uint64]
ROUNDS = 10
"""Number of rounds of the Feistel network that shuffles samples.  Frequencies of the 24 orders of
four samples differ by 6 % with 6 rounds, and by 0.4 % with 10 rounds (enumerated)."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix_bits(x: U64) -> U64:
    """Return the SplitMix64 finaliser of `x`, a bijection of 64-bit words that scrambles all bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_words(*words: int | U64) -> U64:
    """Return a hash of several 64-bit words (broadcast together, at least 1-D), which depends on their order."""
    state = np.zeros(1, dtype=np.uint64)
    for word in words:
        if isinstance(word, int):
            word = np.array([word % 2**64], dtype=np.uint64)
        state = mix_bits((state ^ word) + _GOLDEN)
    return state


def permute(position: U64, n: int, keys: U64) -> U64:
    """Return the image of each `position` (uint64, less than `n`) under a pseudo-random permutation of 0 .. n - 1.

    Each element of `keys`, which has the shape of `position`, selects a permutation.  A Feistel network permutes
    0 .. 4**b - 1, and an image outside 0 .. n - 1 is permuted again (cycle walking; Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002).  Since 4**b < 4n, the mean number of applications is less than 4.
    """
    assert n >= 1
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    rounds = [hash_words(keys, i) for i in range(ROUNDS)]
    out = position.astype(np.uint64, copy=True)
    todo = np.arange(out.size)
    while todo.size:
        left, right = out[todo] >> half, out[todo] & low
        for round_key in rounds:
            left, right = right, left ^ (mix_bits(right + round_key[todo]) & low)
        out[todo] = (left << half) | right
        todo = todo[out[todo] >= n]
    return out


class TokenStream(ABC):
    """Endless sequence of training samples of `seq + 1` tokens: inputs and, shifted by one token, targets."""

    def __init__(self, seq: int, vocab: int, seed: int):
        self.seq, self.vocab, self.seed = seq, vocab, seed

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Return the number of samples per epoch, after which samples repeat in another order; 0 if none repeats."""

    def samples(self, first: int, count: int) -> torch.Tensor:
        """Return samples `first .. first + count - 1` as int64 `[count, seq + 1]` on the CPU.

        Raises `ConfigError` if the data contains a token id outside the model's vocabulary.
        """
        assert min(first, count) >= 0, (first, count)
        numbers = np.arange(first, first + count, dtype=np.uint64)
        return torch.from_numpy(self._tokens(numbers))

    @abstractmethod
    def _tokens(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the tokens of the samples with these `numbers`, as int64 `[len(numbers), seq + 1]`."""


class SyntheticStream(TokenStream):
    """Stream of uniform random tokens, each a hash of (seed, sample, position), for measurements of speed."""

    @property
    def epoch(self) -> int:
        return 0

    def _tokens(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        steps = np.arange(self.seq + 1, dtype=np.uint64) * _GOLDEN
        words = mix_bits(hash_words(self.seed, numbers)[:, None] + steps)
        # Multiply-shift maps 32 random bits to 0 .. vocab - 1 without a division.
        return (((words >> np.uint64(32)) * np.uint64(self.vocab)) >> np.uint64(32)).astype(np.int64)


class WindowStream(TokenStream):
    """Stream of the windows of a finite corpus; each epoch visits every window once, in a new order.

    Window w holds tokens `w * seq .. w * seq + seq`.  Its last token is the first of the next window, so every token
    except the first of the corpus is a target once per epoch.  The tokens after the last full window are unused.
    """

    def __init__(self, corpus: Corpus, seq: int, vocab: int, seed: int):
        super().__init__(seq, vocab, seed)
        self.corpus = corpus
        self.windows = count_windows(corpus, seq)

    @property
    def epoch(self) -> int:
        return self.windows

    def _tokens(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        epochs, positions = np.divmod(numbers, np.uint64(self.windows))
        window = permute(positions, self.windows, hash_words(self.seed, epochs)).astype(np.int64)
        index = window[:, None] * self.seq + np.arange(self.seq + 1)
        tokens = self.corpus.tokens[index].astype(np.int64)
        if self.corpus.largest >= self.vocab and tokens.size and tokens.max() >= self.vocab:
            where = int(index.flat[int(tokens.argmax())])
            raise ConfigError(
                "data",
                self.corpus.name,
                f"token ids less than the model's vocab = {self.vocab}; the id at index {where} is {tokens.max()}",
            )
        return tokens


def open_stream(training: Training, model: Model) -> TokenStream:
    """Return the token stream that `training.data` names, in samples of `training.seq or model.seq` tokens.

    Raises `ConfigError` with key `data` if a file is missing, is too short for one sample, ends within a token, or
    contains an id outside `model.vocab`.  Ids of a `.bin` file are checked when they are read.
    """
    seq = training.seq or model.seq
    if training.data == "synthetic":
        return SyntheticStream(seq, model.vocab, training.seed)
    corpus = _open_corpus(training.data, model.vocab)
    return WindowStream(corpus, seq, model.vocab, training.seed)


def _open_corpus(data: str, vocab: int) -> Corpus:
    """Return the tokens of the packaged text (`shakespeare`: bytes, `shakespeare-gpt2`: BPE) or of a user's file."""
    if data == "shakespeare":
        return open_text(data, SHAKESPEARE, vocab)
    if data == "shakespeare-gpt2":
        from repro.model.data.gpt2 import VOCABULARY, encode

        if vocab < VOCABULARY:
            raise ConfigError(
                "data",
                data,
                says=f"needs a model with GPT-2's vocabulary of {VOCABULARY} tokens; this model has {vocab} tokens",
            )
        return Corpus(data, encode(SHAKESPEARE.read_text(encoding="utf-8")), VOCABULARY - 1)
    return open_tokens(data, vocab)
