"""Tests of ties: layouts whose order uncertain inputs leave undecided, by hand, in a plan and in its text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from repro.config import Layout, Model, systems
from repro.config.system import System
from repro.config.systems.unknowns import unknowns, with_values
from repro.report.text.fit_and_plan import print_layouts
from repro.results.interval import Sensitivity, StepInterval
from repro.simulate.plan.candidates import PlanRequest
from repro.simulate.plan.plan import Plan, search_layouts
from repro.simulate.plan.rows import FULL, OK, PlanRow, Tie, find_ties, plan_entry, rank_rows, rank_systems
from repro.simulate.time.calibration import UNCALIBRATED
from repro.util.processes import Workers
from repro.util.units import gb
from tests.simulate.time.networks import use_exact_kernels

MODEL = Model(name="small", layers=4, hidden=1024, heads=8, vocab=8192, seq=512)
RINGS = "links.inter-node.rings"


def move(key: str, low_s: float, high_s: float) -> Sensitivity:
    return Sensitivity(key=key, low=1.0, best=2.0, high=3.0, low_s=low_s, high_s=high_s)


def row(step_s: float, draws: list[float], *moves: Sensitivity) -> PlanRow:
    found = PlanRow(Layout(precision="fp16"), OK, FULL, {"reserved_bytes": 10**9})
    found.interval = StepInterval(draws=draws, moves=list(moves))
    keys = ("flops_per_device", "samples_per_s", "exposed_s", "bubble_s")
    found.time = {"step_s": step_s, "mfu": None, "rests_on": UNCALIBRATED, **dict.fromkeys(keys, 1.0)}
    found.time["interval"] = found.interval.summary(step_s)
    return found


def ties_of(*rows: PlanRow) -> list[list[Tie]]:
    return find_ties([(row.time["step_s"], row.interval) for row in rows])


def test_step_times_are_compared_draw_by_draw() -> None:
    """Draws that slow both layouts alike do not change their order. One faster draw in 20 is no tie, and two are."""
    draws = [1.0 + i for i in range(20)]
    first = row(2.0, draws)
    never = row(2.2, [1.1 * seconds for seconds in draws])
    once = row(2.3, [0.9, *(1.2 * seconds for seconds in draws[1:])])
    twice = row(2.4, [0.9, 1.9, *(1.3 * seconds for seconds in draws[2:])])
    assert ties_of(first, never) == [[], []]
    assert ties_of(first, once, twice) == [[], [], [Tie(1, 0.1, ())]]


def test_a_tie_names_the_unknowns_that_reverse_the_order() -> None:
    draws = [2.0, 2.0, 3.0, 3.0]
    first = row(2.0, draws, move("slow", 1.0, 8.0), move("links", 1.8, 2.6), move("rate", 2.0, 2.3))
    # `slow` changes both alike. The ratio is 2.2 / 1.8 to 2.2 / 2.6 by `links`, 1.1 to 2.2 / 2.3 by `rate`.
    other = row(2.2, [2.1, 2.2, 2.4, 2.5], move("slow", 1.1, 8.8))
    # The ratio is 1.2 by `slow`, 2.4 / 1.8 to 2.4 / 2.6 by `links`, 1.2 to 2.4 / 2.3 by `rate`.
    third = row(2.4, [1.9, 2.4, 2.9, 3.5], move("slow", 1.2, 9.6))
    # No unknown reverses this order; `links` has the largest effect, 3 / 1.8 to 3 / 2.6.
    last = row(3.0, [1.8, 4.0, 4.0, 4.0], move("slow", 1.5, 12.0))
    _, *ties = ties_of(first, other, third, last)
    assert ties[0] == [Tie(1, 0.5, ("links", "rate"))]
    assert ties[1][0] == Tie(1, 0.5, ("links",))
    assert ties[2][0] == Tie(1, 0.25, ("links",))


def test_rows_are_ranked_by_a_quantile_of_their_step_times() -> None:
    """The row with the best predicted time may be slow in many draws. A row without unknowns has one step time."""
    risky, safe = row(1.0, [0.9, 1.0, 3.0, 4.0, 5.0]), row(1.2, [1.1, 1.2, 2.9, 3.0, 6.0])
    known = row(3.5, [3.5])
    known.interval = None
    rows = [risky, safe, known]
    for quantile, order, rank_s in (
        ("median", [safe, risky, known], [3.0, 2.9, 3.5]),
        ("p75", [safe, known, risky], [4.0, 3.0, 3.5]),
        ("p95", [known, risky, safe], [4.8, 5.4, 3.5]),
    ):
        assert rank_rows(rows, quantile) == order
        assert [each.rank_s for each in rows] == pytest.approx(rank_s)
    assert risky.undecided == []
    assert [one.than for one in safe.undecided] == [1]


def test_rows_of_systems_are_ranked_by_cost_or_time(exact: System) -> None:
    """Steps of 1 and 1.2 s at 3 dollars an hour cost more than one of 2 s at 1 dollar. Tight rows are last."""
    quick, later, slow, tight = (
        row(step_s, [step_s * s for s in (0.9, 1.0, 1.1, 1.2)]) for step_s in (1.0, 1.2, 2.0, 0.5)
    )
    tight.is_tight = True
    slow_request = replace(query(exact), rank_by="cost", price_per_gpu_hour=1.0)
    quick_request = replace(other_query(exact), rank_by="cost", price_per_gpu_hour=3.0)
    found = [
        (quick_request, rank_rows([quick, later], "cost")),
        (slow_request, rank_rows([slow, tight], "cost")),
    ]
    assert found[1][1] == [slow, tight]
    of_quick, of_slow = (quick_request, quick), (slow_request, slow)
    assert rank_systems(found) == [of_slow, of_quick, (quick_request, later), (slow_request, tight)]
    assert slow.rank_s == pytest.approx(2.25), "75 % quantile of the step times"
    # Costs of 1.8 to 2.4 and 2.7 to 3.6 dollars do not overlap.
    assert (slow.undecided, quick.undecided, tight.undecided) == ([], [], None)
    by_time = [(replace(request, rank_by="p75"), rows) for request, rows in found]
    assert [each for _, each in rank_systems(by_time)] == [quick, later, slow, tight]


def test_unknown_numbers_of_two_systems_are_independent(exact: System) -> None:
    """An unknown slows rows up to 8 times. Rows of one system are slowed alike, and rows of two systems are not.

    The draws of both rows are 1 to 64. In about half of independent pairs, less the equal pairs, the second draw is
    lower.
    """
    draws = [float(second) for second in range(1, 65)]
    first, second = (row(s, [s * each for each in draws], move("pace", 0.5 * s, 4 * s)) for s in (1.0, 1.01))
    rank_rows([first, second], "p75")
    assert second.undecided == []
    found = [(query(exact), [first]), (other_query(exact), [second])]
    assert [each for _, each in rank_systems(found)] == [first, second]
    (tie,) = second.undecided
    assert 0.35 < tie.part < 0.65
    assert set(tie.by) == {"pace (dgx2)", "pace (other)"}


def test_exact_and_uncertain_systems_are_compared(exact: System) -> None:
    known, ranged = row(1.0, [1.0]), row(1.1, [0.5, 1.1, 1.2, 1.3] * 16, move("links.a", 0.5, 1.3))
    known.interval = None
    found = [(query(exact), rank_rows([known], "p75")), (other_query(exact), rank_rows([ranged], "p75"))]
    assert [each for _, each in rank_systems(found)] == [known, ranged]
    assert ranged.undecided == [Tie(1, 0.25, ("links.a (other)",))]


def test_less_than_3_percent_of_free_memory_is_tight(exact: System) -> None:
    """The device of the fastest layout has 2.9 % and then 3.1 % of free memory."""
    request = replace(query(exact), given={**query(exact).given, "tp": 1})
    (found,) = plan_of(request, 1).rows
    used = found.memory["reserved_bytes"] + exact.context()
    limits = [round(used / (1 - left)) for left in (0.029, 0.031)]
    rows = [found, *(plan_of(replace(request, limit=limit), 1).rows[0] for limit in limits)]
    assert [(each.outcome, each.is_tight) for each in rows] == [(OK, False), (OK, True), (OK, False)]


def test_a_tight_row_has_a_star_and_is_counted_beyond_the_table(
    exact: System, capsys: pytest.CaptureFixture[str]
) -> None:
    """One footnote explains the star. Rows beyond the table are counted if they are tight and faster."""
    found = plan_of(query(exact))
    best, other = found.rows[:2]
    other.is_tight = True
    out = printed(query(exact), found, 4, capsys)
    assert f"{gb(other.memory['reserved_bytes'])}*" in out
    assert out.count("*") == 2
    assert "*: less than 3 % of the device's memory is left" in out
    for is_tight, factor in ((True, 0.5), (True, 2), (False, 0.5)):
        other.is_tight, other.rank_s = is_tight, factor * best.rank_s
        out = printed(query(exact), replace(found, rows=[best, other]), 1, capsys)
        counted = "Faster, but with less than 3 % of the device's memory left: 1 layout (--top 2)." in out
        assert counted == (is_tight and factor < 1)


@pytest.fixture(scope="module")
def exact() -> System:
    system = systems.load_system_file("dgx2")
    return with_values(system, {one.key: one.best for one in unknowns(system)})


def query(system: System) -> PlanRequest:
    given = {"pp": 1, "zero": 0, "micro_batch": 2, "sp": False, "recompute": False, "kernels": "softmax"}
    return PlanRequest(MODEL, system, 64, 32 * 10**9, MODEL.seq, given)


def other_query(system: System) -> PlanRequest:
    return query(replace(system, name="other"))


def plan_of(request: PlanRequest, shown: int = 4) -> Plan:
    with Workers(1) as workers:
        return search_layouts(request, workers, shown, exhaustive=False)


def printed(
    request: PlanRequest, plan: Plan, top: int, capsys: pytest.CaptureFixture[str], **options: Any
) -> str:
    """Return the printed plan of one system, with single spaces."""
    print_layouts([(request, plan)], [(request, row) for row in plan.rows], top, **options)
    return " ".join(capsys.readouterr().out.split())


def test_a_plan_names_the_unknown_behind_a_tie(
    exact: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan with an exact value at one end of the range has the tied rows in the other order."""
    use_exact_kernels(monkeypatch)
    link = exact.links["inter-node"]
    known = link.used("inter-node", "rings")
    rings = replace(known, low=1, high=8, source="low: one; high: one for each adapter")
    ranged = replace(exact, links={**exact.links, "inter-node": replace(link, rings=rings)})
    found = plan_of(query(ranged))
    pairs = [(row, one) for row in found.rows for one in row.undecided]
    assert pairs
    plans = [plan_of(query(with_values(exact, {RINGS: value}))) for value in (1, 8)]
    orders = [[row.layout for row in plan.rows] for plan in plans]
    output = printed(query(ranged), found, 4, capsys, details=True)
    for row, one in pairs:
        layout, other = row.layout, found.rows[one.than - 1].layout
        assert one.by == (RINGS,)
        assert any(order.index(layout) < order.index(other) for order in orders)
        assert re.search(rf" {found.rows.index(row) + 1} {one.than} [\d.]+ {RINGS}", output)
    for row in found.rows[:4]:
        ties = [{"than": one.than, "part": one.part, "by": [RINGS]} for one in row.undecided]
        assert json.loads(json.dumps(plan_entry(query(ranged), row)["undecided"])) == ties
    assert ("Main uncertainty: inter-node rings." in output) == any(one.than == 1 for _, one in pairs)


TIED = "are tied within their uncertainty. Main uncertainty:"
FASTEST = "is faster than each of the 2 next rows in 95 % or more"


@pytest.mark.parametrize(
    ("lowest_draws", "top", "texts"),
    [
        ([1.1, 1.05], 3, [f"Row 1 {FASTEST}"]),
        ([0.9, 1.05], 3, [f"Rows 1 and 2 {TIED} a."]),
        # The sentence names every row that may be the fastest, and the input that decides most ties.
        ([0.9, 0.9, 0.9, 1.1, 0.95], 6, [f"Rows 1 to 4 and 6 {TIED} a."]),
        # The last row may be the fastest, also if the table has one or two rows.
        ([1.2, 0.9], 1, [f"Rows 1 and 3 {TIED} b.", "1 more tied row: --top 3."]),
        ([1.2, 0.9], 2, [f"Rows 1 and 3 {TIED} b.", "1 more tied row: --top 3."]),
        ([1.2, 0.9], 3, [f"Rows 1 and 3 {TIED} b."]),
        ([], 1, []),
    ],
)
def test_the_text_states_the_fastest_row_or_all_ties_with_it(
    lowest_draws: list[float], top: int, texts: list[str], exact: System, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lowest_draws`: one of two draws of each row after the first, whose draws are 1.0. One row has no ties.

    Only in the last row, the input `b` can reverse the order. The input `a` of the first row decides the other ties.
    """
    first, last = row(1.0, [1.0, 1.0], move("links.a", 0.7, 1.3)), len(lowest_draws) - 1
    inputs = [move("links.b", 0.8 if place == last else 1.1, 1.3) for place in range(len(lowest_draws))]
    rows = [first, *(row(1.3, [draw, 1.3], b) for draw, b in zip(lowest_draws, inputs, strict=True))]
    for each, ties in zip(rows, ties_of(*rows), strict=True):
        each.undecided = ties
    output = printed(query(exact), Plan(rows, 0, ""), top, capsys)
    possible = (f"Row 1 {FASTEST}", TIED, "more tied row")
    assert all(text in output for text in texts)
    assert sum(text in output for text in possible) == len(texts)
