"""What a plan takes for granted where it traces few stages, and how a fit comes nearer, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from repro.config import Layout
from repro.simulate.plan.closed_form import suggested_width
from repro.simulate.plan.extrapolation.linear import _aligned
from repro.simulate.plan.extrapolation.step_time import _MeanStageEdges
from repro.simulate.plan.fit import FitTrial, _next_index
from repro.simulate.trace.events import Operator


class EightStages:
    """On two nodes of four: a message takes 1 s within a node, 5 s to the other one, 9 s from end to end."""

    layout = Layout(pp=8, global_batch=8)
    system = SimpleNamespace(devices_per_node=SimpleNamespace(value=4))

    def send_seconds(self, payload: int, *, from_stage: int, to_stage: int) -> float:
        if {from_stage, to_stage} == {0, 7}:
            return 9.0 + (from_stage == 7)
        assert abs(from_stage - to_stage) == 1
        return 1.0 if from_stage // 4 == to_stage // 4 else 5.0


def test_a_message_between_three_stages_is_the_mean_of_one_between_eight() -> None:
    edges = _MeanStageEdges(EightStages(), 3)  # type: ignore[arg-type]
    assert edges.send_seconds(1, from_stage=0, to_stage=1) == (1 + 1 + 1 + 5) / 4
    assert edges.send_seconds(1, from_stage=2, to_stage=1) == (1 + 1 + 1 + 5) / 4
    assert edges.send_seconds(1, from_stage=0, to_stage=2) == 9, "from the first to the last"
    assert edges.send_seconds(1, from_stage=2, to_stage=0) == 10, "and back"


def trial(value: int, needed: int | None) -> FitTrial:
    return FitTrial(value=value, outcome="ok", needed=needed)


@pytest.mark.parametrize(
    ("found", "low", "high", "index"),
    [
        ({}, -1, 100, 0),  # nothing known: the smallest
        ({}, 0, 100, 1),  # it fits: on in strides that double
        ({}, 7, 100, 15),
        ({}, 60, 100, 99),
        ({}, 10, 21, 15),  # between what fits and what does not, which say nothing: the middle
        # 10 bytes for 0 and 30 for 20: 24 bytes are enough for 14.
        ({0: trial(0, 10), 20: trial(20, 30)}, 0, 20, 14),
        ({0: trial(0, 10), 20: trial(20, 30)}, 14, 20, 17),
    ],
)
def test_where_a_fit_looks_next(found: dict[int, FitTrial], low: int, high: int, index: int) -> None:
    assert _next_index(range(100), found, 24, low, high) == index


@pytest.mark.parametrize(
    ("width", "suggested"),
    [
        (500, 512),
        (511, 512),
        (512, 512),
        (600, 512),
        (3071, 3072),
        (3072, 3072),
        (3300, 3072),
        (4700, 5120),
        (9000, 8192),
    ],
)
def test_a_width_is_rounded_to_what_divides_into_heads(width: int, suggested: int) -> None:
    """16 bytes for each of 12 h^3 / 64 parameters; 64 up to 512, then 256, 1024, 2048."""
    assert suggested_width(16 * 12 * width**3 // 64 + 1, 1, Layout()) == suggested


def operators(names: str) -> list[Operator]:
    return [Operator(name, 0, 0, 0, (), 2) for name in names]


@pytest.mark.parametrize(
    ("narrow", "wide", "aligned"),
    [
        ("abc", "abc", ["a", "b", "c"]),
        ("abc", "ac", ["a", "", "c"]),
        ("abc", "axbyyc", ["ax", "byy", "c"]),
        ("abc", "xabc", ["xa", "b", "c"]),
        ("ab", "", ["", ""]),
    ],
)
def test_operators_of_two_traces_are_told_apart_by_their_names(
    narrow: str, wide: str, aligned: list[str]
) -> None:
    found = _aligned(operators(narrow), operators(wide))
    assert [
        "".join(event.name for event in events if isinstance(event, Operator)) for events in found
    ] == aligned
