"""What an engine lacks is said before any process starts."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from repro.engines import missing_library


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        ("2.6.0", True),
        ("2.9.1+cu126", True),
        ("2.10.0a0+git1234", False),
        ("2.13.0+cpu", False),
        ("main", False),
    ],
)
def test_torchs_engine_needs_what_torch_has_since_2_10(
    version: str, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert missing_library("torch").startswith(f"torch 2.10 or later: {version} is installed.") is lacks
    assert lacks or not missing_library("torch")
    assert not missing_library("native")


def test_the_pinned_torch_has_all_that_its_engine_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests of engine torch would be left out everywhere, and nobody would see it."""
    pins = (Path(__file__).parents[2] / "constraints-cpu.txt").read_text()
    (pinned,) = re.findall(r"^torch==(\S+)", pins, re.MULTILINE)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: pinned)
    assert not missing_library("torch")
