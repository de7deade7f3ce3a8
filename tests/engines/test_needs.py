"""Tests of the check for the library of an engine before any process starts."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from repro.engines import missing_library


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [
        ("2.6.0", True),
        ("2.9.1+cu126", True),
        ("2.10.0a0+git1234", False),
        ("2.13.0+cpu", False),
        ("main", False),
    ],
)
def test_engine_torch_needs_torch_2_10(
    version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert missing_library("torch").startswith(f"torch 2.10 or later: {version} is installed.") is is_refused
    assert is_refused or not missing_library("torch")
    assert not missing_library("native")


def test_pinned_torch_suffices_for_engine_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, all tests of engine torch would be skipped unnoticed."""
    pins = (Path(__file__).parents[2] / "constraints-cpu.txt").read_text()
    (pinned,) = re.findall(r"^torch==(\S+)", pins, re.MULTILINE)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: pinned)
    assert not missing_library("torch")
