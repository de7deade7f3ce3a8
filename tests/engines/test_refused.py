"""Tests of experiments that engines refuse: settings without a counterpart, and missing libraries."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest

from repro.config import Layout
from repro.config.errors import ConfigError
from repro.engines import missing_library
from tests.training import tiny

INTERLEAVED = {"pp": 2, "schedule": "interleaved", "chunks": 2, "global_batch": 2}
SHARDED = "layout.zero = 1: must be ZeRO stage 0, 2 or 3 with tp or pp"
OFFLOAD = {"dp": 2, "zero": 1, "offload_optimizer": True}
BF16 = {"precision": "bf16"}
FALSE = "true: must be false"
OFFLOADED = f"layout.offload_optimizer = {FALSE}"
SCALE = "training.loss_scale"
REFUSED: list[tuple[Any, ...]] = [
    # engine, keys of the layout, error, keys of the training
    ("native", OFFLOAD, OFFLOADED),
    ("torch", OFFLOAD, OFFLOADED),
    ("torch", {"cuda_graphs": True}, "layout.cuda_graphs = true: must be false"),
    ("torch", {"dp": 2, "cb": False}, "layout.cb = false: must be true"),
    ("torch", {"dp": 2, "overlap": False}, "layout.overlap = false: must be true"),
    ("torch", {"kernels": "unfused"}, "layout.kernels = 'unfused': must be fused"),
    ("torch", {"tp": 2, "recompute": True, "pa": True}, "layout.pa = true: must be false"),
    ("torch", {"dp": 2, "tp": 2, "zero": 1}, SHARDED),
    ("torch", {"dp": 2, "pp": 2, "zero": 1, "global_batch": 4}, SHARDED),
    (
        "torch",
        {"dp": 2, **BF16, "gradient_as_bucket_view": False},
        "layout.gradient_as_bucket_view = false: must be true in 16-bit training and with tp or pp",
    ),
    ("torch", {"pp": 2}, "layout.global_batch = 1: must be at least as many micro-batches as stages"),
    ("torch", {"precision": "fp16"}, "training.loss_scale_hysteresis = 2: must be 1 in fp16"),
    ("deepspeed", {"pp": 2}, "layout.pp = 2: must be 1"),
    ("deepspeed", {"tp": 2, "sp": True}, "layout.sp = true: must be false"),
    ("deepspeed", {"dp": 2, "cb": False}, "layout.cb = false: must be true"),
    ("deepspeed", {"cuda_graphs": True}, "layout.cuda_graphs = true: must be false"),
    ("deepspeed", {"recompute": True, "md": True}, f"layout.md = {FALSE} (true requires pa = true)"),
    ("deepspeed", {"dp": 2, "offload_optimizer": True}, f"{OFFLOADED} (true requires zero = 1, 2 or 3)"),
    ("deepspeed", {**BF16, "grad_dtype": "fp32"}, "layout.grad_dtype = 'fp32': must be precision"),
    ("deepspeed", {"precision": "fp16"}, f"{SCALE} = 1000.0: must be a power of 2", {"loss_scale": 1000.0}),
    ("megatron", OFFLOAD, OFFLOADED),
    ("megatron", {"cuda_graphs": True}, "layout.cuda_graphs = true: must be false"),
    ("megatron", {"dp": 2, "zero": 2}, "layout.zero = 2: must be 0 or 1"),
    ("megatron", {"pp": 2, "schedule": "gpipe"}, "layout.schedule = 'gpipe': must be 1f1b or interleaved"),
    ("megatron", {"kernels": "unfused"}, "layout.kernels = 'unfused': must be fused"),
    ("megatron", {"tp": 2, "tp_overlap": False}, "layout.tp_overlap = false: must be true"),
    (
        "megatron",
        {**INTERLEAVED, "overlap": False},
        "layout.overlap = false: must be true (overlapped communication) if pp = 2 and schedule = interleaved",
    ),
    ("megatron", {}, "training.dropout = 0.1: must be 0", {"dropout": 0.1}),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]}-{case[2]}")
def test_unsupported_setting_is_refused_in_one_line(case: tuple[Any, ...]) -> None:
    engine, keys, line, *training = case
    with pytest.raises(ConfigError) as caught:
        tiny(Layout(**keys), engine=engine, **dict(*training))
    assert str(caught.value) == f"{line} with engine {engine}"


@pytest.mark.parametrize(
    ("engine", "layout"),
    [
        ("torch", Layout(zero=1, tp=2)),  # no dp to shard over
        ("torch", Layout(pp=2, schedule="gpipe")),
        ("torch", Layout(dp=2, tp=2, pp=2, zero=2, micro_batch=1, global_batch=4)),
        ("deepspeed", Layout(**OFFLOAD)),
        ("native", Layout(cuda_graphs=True)),
    ],
)
def test_similar_supported_layouts_are_accepted(engine: str, layout: Layout) -> None:
    tiny(layout, engine=engine)


def test_engine_torch_needs_torch_2_10(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned torch suffices. Otherwise, all tests of engine torch would be skipped unnoticed."""
    pins = (Path(__file__).parents[2] / "constraints-cpu.txt").read_text()
    (pinned,) = re.findall(r"^torch==(\S+)", pins, re.MULTILINE)
    old = ["2.6.0", "2.9.1+cu126"]
    for version in (*old, "2.10.0a0+git1234", "2.13.0+cpu", "main", pinned):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, version=version: version)
        expected = f"torch 2.10 or later: torch {version} is installed." if version in old else ""
        assert missing_library("torch").startswith(expected)
        assert bool(missing_library("torch")) is bool(expected)
        assert not missing_library("native")
