"""What an engine lacks is said before any process starts."""

from __future__ import annotations

import importlib.metadata

import pytest

from repro.engines import missing


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
    assert missing("torch").startswith(f"torch 2.10: this one, {version},") is lacks
    assert lacks or not missing("torch")
    assert not missing("native")
