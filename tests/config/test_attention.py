"""Tests of the note about attention heads for which torch has no fused attention kernel on a V100."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repro import cli
from repro.config import Layout, models
from repro.config.engines import unfused_attention_note


@pytest.mark.parametrize(
    ("heads", "keys", "capability", "message"),
    [
        (16, {}, "7.0", True),  # head width 100
        (25, {}, "7.0", False),  # head width 64
        (16, {}, "8.0", False),
        (16, {}, "", False),
        (16, {"precision": "fp32"}, "7.0", False),
        (16, {"kernels": "unfused"}, "7.0", False),
    ],
)
def test_note_on_heads_of_width_100(heads: int, keys: dict[str, str], capability: str, message: bool) -> None:
    layout = Layout(**{"precision": "fp16", **keys})
    model = replace(models.load_model("gpt2-1.5b"), heads=heads)
    assert bool(unfused_attention_note(model, layout, capability)) is message


@pytest.mark.parametrize(("heads", "message"), [("16", True), ("25", False)])
def test_fit_prints_the_attention_note(heads: str, message: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Heads of width 64, as in `suites/one_gpu.toml`, have no note."""
    command = ["fit", "--system", "dgx2", "--gpus", "1", "--hidden", "1600", "--heads", heads]
    assert cli.main([*command, "--precision", "fp16", "--micro-batch", "1", "--recompute"]) == 0
    assert (
        "Attention heads of width 100 are not a multiple of 8" in " ".join(capsys.readouterr().out.split())
    ) is message
