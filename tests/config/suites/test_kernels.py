"""Tests of the suite that compares operators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests import committed

FOLDER = Path(__file__).parents[3] / "suites"


def test_compared_layouts_differ_only_in_their_operators() -> None:
    suite = committed.suite(FOLDER / "kernels.toml")
    assert len(suite.comparisons) == 7
    for comparison in suite.comparisons:
        members = [suite.entry(name).experiment for name in (comparison.baseline, *comparison.subjects)]
        assert len({e.layout.kernels for e in members}) == len(members) == 3
        assert len({replace(e.layout, kernels="fused") for e in members}) == 1
