"""Tests that engine torch refuses settings, or combinations of settings, without a counterpart in torch."""

from __future__ import annotations

from typing import Any

import pytest

from repro.config import Layout
from repro.config.errors import ConfigError
from tests.training import tiny

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no constant buffers": ({"dp": 2, "cb": False}, {}, "layout.cb = false: must be true"),
    "no overlap": ({"dp": 2, "overlap": False}, {}, "layout.overlap = false: must be true"),
    "unfused operators": ({"kernels": "unfused"}, {}, "layout.kernels = 'unfused': must be fused"),
    "P_a": ({"tp": 2, "recompute": True, "pa": True}, {}, "layout.pa = true: must be false"),
    "stage 1 and tp": (
        {"dp": 2, "tp": 2, "zero": 1},
        {},
        "layout.zero = 1: must be ZeRO stage 0, 2 or 3 with tp or pp",
    ),
    "stage 1 and pp": (
        {"dp": 2, "pp": 2, "zero": 1, "global_batch": 4},
        {},
        "layout.zero = 1: must be ZeRO stage 0, 2 or 3 with tp or pp",
    ),
    "copies without buckets": (
        {"dp": 2, "precision": "bf16", "gradient_as_bucket_view": False},
        {},
        "layout.gradient_as_bucket_view = false: must be true in 16-bit training and with tp or pp",
    ),
    "fewer micro-batches than stages": (
        {"pp": 2},
        {},
        "layout.global_batch = 1: must be at least as many micro-batches as stages",
    ),
    "hysteresis": ({"precision": "fp16"}, {}, "training.loss_scale_hysteresis = 2: must be 1 in fp16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_setting_is_refused_in_one_line(name: str) -> None:
    layout, training, line = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        tiny(Layout(**layout), engine="torch", **training)
    assert str(caught.value) == f"{line} with engine torch"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(zero=1, tp=2),
        Layout(pp=2, schedule="gpipe"),
        Layout(dp=2, tp=2, pp=2, zero=2, micro_batch=1, global_batch=4),
    ],
    ids=["no dp to shard over", "gpipe", "all axes"],
)
def test_similar_supported_layouts_are_accepted(layout: Layout) -> None:
    tiny(layout, engine="torch")
