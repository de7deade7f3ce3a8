"""Numbered training samples.  Sample k depends on the seed and k alone.

A rank asks for the samples that its share of the global batch contains.  As the numbers follow from the
step and the global batch, no layout, micro-batch or call pattern can change what a run trains on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch

from repro.config import ConfigError, Model, Training
from repro.config.token_files import Corpus, count_windows
from repro.model.data.corpus import open_corpus
from repro.model.data.permutation import key, mix, permute

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class TokenStream(ABC):
    """An endless sequence of samples of `seq + 1` tokens: inputs and, shifted by one, targets."""

    def __init__(self, seq: int, vocab: int, seed: int):
        self.seq, self.vocab, self.seed = seq, vocab, seed

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Samples after which the data repeats in another order; 0 if it never does."""

    def samples(self, first: int, count: int) -> torch.Tensor:
        """Samples `first .. first + count - 1` as int64 `[count, seq + 1]` on the CPU.

        Raises `ConfigError` if a file holds an id that the model's vocabulary has not.
        """
        assert min(first, count) >= 0, (first, count)
        numbers = np.arange(first, first + count, dtype=np.uint64)
        return torch.from_numpy(self._tokens(numbers))

    @abstractmethod
    def _tokens(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """int64 `[len(numbers), seq + 1]`."""


class SyntheticStream(TokenStream):
    """Uniform random tokens, a hash of (seed, sample, position): for speed, nothing can be learnt."""

    @property
    def epoch(self) -> int:
        return 0

    def _tokens(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        steps = np.arange(self.seq + 1, dtype=np.uint64) * _GOLDEN
        words = mix(key(self.seed, numbers)[:, None] + steps)
        # Multiply-shift maps 32 random bits to 0 .. vocab - 1 without a division.
        return (((words >> np.uint64(32)) * np.uint64(self.vocab)) >> np.uint64(32)).astype(np.int64)


class WindowStream(TokenStream):
    """Windows of a finite corpus; each epoch visits every window once, in an order of its own.

    Window w holds tokens `w * seq .. w * seq + seq`: its last token is the next window's first, so every
    token but the corpus's first is a target once an epoch.  Tokens that fill no window are left out.
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
        window = permute(positions, self.windows, key(self.seed, epochs)).astype(np.int64)
        index = window[:, None] * self.seq + np.arange(self.seq + 1)
        tokens = self.corpus.tokens[index].astype(np.int64)
        if self.corpus.largest >= self.vocab and tokens.size and tokens.max() >= self.vocab:
            where = int(index.flat[int(tokens.argmax())])
            raise ConfigError(
                "data",
                self.corpus.name,
                f"token ids under the model's vocab = {self.vocab}; token {where} is {tokens.max()}",
            )
        return tokens


def open_stream(training: Training, model: Model) -> TokenStream:
    """The stream that `training.data` names, in samples of `training.seq or model.seq` tokens.

    Raises `ConfigError` with key `data` if a file is missing, holds too little for one sample, is not
    of whole tokens, or holds ids that `model.vocab` has not (`.bin` files: when such an id is read).
    """
    seq = training.seq or model.seq
    if training.data == "synthetic":
        return SyntheticStream(seq, model.vocab, training.seed)
    corpus = open_corpus(training.data, model.vocab)
    return WindowStream(corpus, seq, model.vocab, training.seed)
