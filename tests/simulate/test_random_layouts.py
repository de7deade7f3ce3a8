"""Tests of random layouts: the simulated peak memory of a rank and its categories equal those of gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from repro.config import ConfigError, Layout
from repro.config.suites import load_suite, write_template
from tests.simulate.test_three_ways import MODEL, assert_agreement
from tests.training import tiny


@st.composite
def layouts(draw: st.DrawFn, world: int) -> Layout:
    """Draw layouts of `world` ranks without context parallelism, whose attention on a CPU has a mask tensor."""
    pp = draw(st.sampled_from([n for n in (1, 2, 4) if n <= world]))
    tp = draw(st.sampled_from([n for n in (1, 2) if n * pp <= world]))
    dp = world // pp // tp
    micro_batch = draw(st.integers(1, 2))
    kernels = draw(st.sampled_from(("fused", "unfused")))
    chunks = draw(st.sampled_from((1, 2 if pp == 2 else 1)))
    options: dict[str, Any] = {
        "schedule": "interleaved" if chunks > 1 else draw(st.sampled_from(("1f1b", "gpipe"))),
        "zero": draw(st.integers(0, 3 if pp == 1 else 2)),
        "global_batch": dp * micro_batch * draw(st.integers(1, 9)),
        "overlap": draw(st.booleans()),
        "precision": draw(st.sampled_from(("fp32", "bf16", "fp16"))),
        "kernels": kernels,
        "recompute": draw(
            st.sampled_from((False, True) if kernels == "fused" else (False, True, "selective"))
        ),
        "bucket_bytes": draw(st.sampled_from((30_000, 25_000_000))),
        "sp": tp > 1 and draw(st.booleans()),
        "md": draw(st.booleans()),
    }
    try:
        return Layout(dp=dp, tp=tp, pp=pp, chunks=chunks, micro_batch=micro_batch, **options)
    except ConfigError:
        reject()


@settings(max_examples=10)
@given(layout=layouts(2))
def test_peak_memory_of_two_ranks_is_exact(request: pytest.FixtureRequest, layout: Layout) -> None:
    assert_agreement(request, tiny(layout, MODEL, steps=2, untimed_steps=1))


@pytest.mark.slow
@settings(max_examples=16)
@given(layout=layouts(2) | layouts(4))
def test_peak_memory_of_many_layouts_is_exact(request: pytest.FixtureRequest, layout: Layout) -> None:
    assert_agreement(request, tiny(layout, MODEL, steps=2, untimed_steps=1))


def test_peak_memory_of_the_template_suite_is_exact(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    write_template(suite := tmp_path / "mine.toml")
    for entry in load_suite(suite).entries:
        assert_agreement(request, entry.experiment)
