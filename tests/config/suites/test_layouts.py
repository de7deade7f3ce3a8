"""Tests of named layouts of a suite."""

from __future__ import annotations

from pathlib import Path

from repro.config import Layout, suites
from tests.launch.runs import MODEL

TEXT = """
[suite]
name = "s"

[defaults]
model = "tiny.toml"
layout = { precision = "bf16", micro_batch = 2, zero = 0 }

[layouts.C1]
zero = 1
tp = 2

[layouts.C4]
zero = 2
tp = 2
pa = true
recompute = true
"""


def layouts(folder: Path, text: str, head: str = TEXT) -> list[Layout]:
    (folder / "tiny.toml").write_text(MODEL)
    (folder / "s.toml").write_text(head + text)
    return [entry.experiment.layout for entry in suites.load_suite(folder / "s.toml").entries]


def test_named_layout_overrides_defaults_and_keys_override_it(tmp_path: Path) -> None:
    found = layouts(
        tmp_path,
        """
        [[experiment]]
        name = "plain"
        [[experiment]]
        name = "C1"
        layout = "C1"
        [[experiment]]
        name = "C4 on four"
        layout = { use = "C4", dp = 2, zero = 1 }
        """,
    )
    assert found == [
        Layout(precision="bf16", micro_batch=2),
        Layout(precision="bf16", micro_batch=2, zero=1, tp=2),
        Layout(precision="bf16", micro_batch=2, zero=1, tp=2, pa=True, recompute=True, dp=2),
    ]


def test_defaults_can_use_a_named_layout(tmp_path: Path) -> None:
    head = TEXT.replace("zero = 0", 'use = "C4"')
    found = layouts(
        tmp_path,
        """
        [[experiment]]
        name = "as in defaults"
        [[experiment]]
        name = "another"
        layout = "C1"
        """,
        head,
    )
    assert found[0] == Layout(precision="bf16", micro_batch=2, zero=2, tp=2, pa=True, recompute=True)
    assert found[1] == Layout(precision="bf16", micro_batch=2, zero=1, tp=2)


def test_given_world_size_is_checked_with_a_pipeline(tmp_path: Path) -> None:
    (layout,) = layouts(tmp_path, '[[experiment]]\nname = "a"\nlayout = { use = "C1", pp = 2, world = 4 }')
    assert layout.world == 4
