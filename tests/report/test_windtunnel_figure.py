"""Tests of the figure of scaled twins: measured ratios at their originals' link bandwidth, and predicted curves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import synthetic

from repro.config import EmulatedNetwork, Layout, TwinOf
from repro.config.experiment import TWIN_RATIO
from repro.report.figures import comparisons
from repro.report.figures.style import figure_style
from repro.results.measured import comparison_record, experiment_record

NETWORK = EmulatedNetwork(nodes=2, ranks_per_node=1, between=1e7)
RATES = {1.2: 2.0, 4.8: 3.0, 19.2: 2.5}


def twins(suite: str, link: str, rate: float, ratio: float) -> tuple[list[Any], Any]:
    """Return a pair of twins for `rate` GB/s, whose subject is `ratio` times as fast, and their comparison."""
    common = {"suite": suite, "provenance": synthetic.PROVENANCE}
    sides = {"between": 4.8e9, "within": 6e9, link: rate * 1e9}
    numbers = [{}, {TWIN_RATIO: (ratio + 0.1, ratio + 0.2)}]
    pair = [
        replace(
            synthetic.experiment(f"{name}-{link}{rate}"),
            layout=Layout(dp=2, zero=zero),
            network=replace(
                NETWORK, between=1e7 * rate, within=1e7 if suite == comparisons.LARGER_TWIN_SUITE else 0.0
            ),
            twin=TwinOf(original=name, part=0.2, numbers=predicted, **sides),
        )
        for (name, zero), predicted in zip((("megatron", 0), ("deepspeed", 1)), numbers, strict=True)
    ]
    results = [synthetic.results(e, seconds) for e, seconds in zip(pair, (ratio, 1.0), strict=True)]
    ran = [experiment_record(e, found, wall_s=1.0, **common) for e, found in zip(pair, results, strict=True)]
    return ran, comparison_record(pair[0], pair[1], (results[0], results[1]), **common)


def drawn(*pairs: tuple[list[Any], Any]) -> Any:
    with figure_style():
        return comparisons.draw_bandwidth_sweeps(
            [r for ran, _ in pairs for r in ran], [c for _, c in pairs], published=3.75
        )


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line.get_xydata() for line in axes.lines}


def test_points_are_at_the_link_bandwidth_of_their_originals() -> None:
    pairs = [twins("windtunnel_between", "between", rate, ratio) for rate, ratio in RATES.items()]
    drawing = drawn(*reversed(pairs), twins(comparisons.LARGER_TWIN_SUITE, "between", 4.8, 3.2))
    (axes,) = drawing.figure.axes
    found = lines(axes)
    assert found["measured, twins"][:, 0] == pytest.approx(list(RATES))
    assert found["measured, twins"][:, 1] == pytest.approx(list(RATES.values()), rel=0.05)
    assert found["predicted, originals"][:, 1] == pytest.approx([2.1, 3.1, 2.6])
    assert found["predicted, twins"][:, 1] == pytest.approx([2.2, 3.2, 2.7])
    assert found["a larger twin"][0] == pytest.approx([4.8, 3.2], rel=0.05)
    assert found["published"].tolist() == [[4.8, 3.75]]
    assert "windtunnel_within" in drawing.missing
    assert len(drawing.records) == 4


def test_each_sweep_of_several_points_has_a_panel() -> None:
    outside = [twins("windtunnel_between", "between", rate, ratio) for rate, ratio in RATES.items()]
    inside = [twins("windtunnel_within", "within", rate, ratio) for rate, ratio in RATES.items()]
    drawing = drawn(*outside, *inside, twins(comparisons.LARGER_TWIN_SUITE, "between", 4.8, 3.2))
    assert len(drawing.figure.axes) == 2
    assert drawing.missing == ""
    assert "published" not in lines(drawing.figure.axes[1]), "no published value at this link"
    single = drawn(outside[0])
    assert single.figure is None
    assert single.missing == comparisons.BANDWIDTHS.missing
