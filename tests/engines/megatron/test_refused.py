"""Test that engine megatron refuses settings without a counterpart, even if the library is not installed."""

from __future__ import annotations

from typing import Any

import pytest

from repro.config import Layout
from repro.config.errors import ConfigError
from tests.training import tiny

INTERLEAVED = {"pp": 2, "schedule": "interleaved", "chunks": 2, "global_batch": 2}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "stages 2 and 3": ({"dp": 2, "zero": 2}, {}, "layout.zero = 2: must be 0 or 1"),
    "gpipe": ({"pp": 2, "schedule": "gpipe"}, {}, "layout.schedule = 'gpipe': must be 1f1b or interleaved"),
    "unfused operators": ({"kernels": "unfused"}, {}, "layout.kernels = 'unfused': must be fused"),
    "no tp overlap": (
        {"tp": 2, "tp_overlap": False},
        {},
        "layout.tp_overlap = false: must be true",
    ),
    "dropout": ({}, {"dropout": 0.1}, "training.dropout = 0.1: must be 0"),
    "no overlap of two interleaved stages": (
        INTERLEAVED | {"overlap": False},
        {},
        "layout.overlap = false: must be true (overlapped communication) if pp = 2 and schedule = interleaved",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_setting_is_refused_in_one_line(name: str) -> None:
    layout, training, line = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        tiny(Layout(**layout), engine="megatron", **training)
    assert str(caught.value).startswith(f"{line} with engine megatron")
