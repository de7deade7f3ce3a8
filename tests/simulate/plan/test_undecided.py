"""Tests of ties: layouts whose order unknown numbers leave undecided, by hand, in a plan and in its text."""

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
from repro.simulate.plan.plan import COMPARED_ROWS, Plan, search_layouts
from repro.simulate.plan.rows import FULL, OK, PlanRow, Tie, find_ties, plan_entry, rank_rows, rank_systems
from repro.simulate.time.calibration import UNCALIBRATED
from repro.util.processes import Workers
from repro.util.units import gb
from tests.simulate.exact import use_exact_kernels

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
    return find_ties([(row.time["step_s"], row.interval) for row in rows if row.interval is not None])


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
    assert rank_rows(rows, "median") == [safe, risky, known]
    assert [each.rank_s for each in rows] == [3.0, 2.9, 3.5]
    assert rank_rows(rows, "p75") == [safe, known, risky]
    assert [each.rank_s for each in rows] == [4.0, 3.0, 3.5]
    assert rank_rows(rows, "p95") == [known, risky, safe]
    assert [each.rank_s for each in rows] == pytest.approx([4.8, 5.4, 3.5])
    assert [one.than for one in risky.undecided or []] == []
    assert [one.than for one in safe.undecided or []] == [1]


def test_rows_of_systems_are_ranked_by_cost_or_time(exact: System) -> None:
    """Steps of 1 and 1.2 s at 3 dollars an hour cost more than one of 2 s at 1 dollar. Tight rows are last."""
    draws = [0.9, 1.0, 1.1, 1.2]
    quick, later = row(1.0, draws), row(1.2, [1.2 * s for s in draws])
    slow, tight = row(2.0, [2 * s for s in draws]), row(0.5, [s / 2 for s in draws])
    tight.is_tight = True
    slow_request = replace(query(exact), rank_by="cost", price_per_gpu_hour=1.0)
    other = replace(exact, name="other")
    quick_request = replace(slow_request, system=other, price_per_gpu_hour=3.0)
    for rows in ([quick, later], [slow, tight]):
        rank_rows(rows, "cost")
    found = [(quick_request, [quick, later]), (slow_request, [slow, tight])]
    assert rank_systems(found) == [
        (slow_request, slow),
        (quick_request, quick),
        (quick_request, later),
        (slow_request, tight),
    ]
    assert slow.rank_s == pytest.approx(2.25), "75 % quantile of the step times"
    assert (slow.undecided, quick.undecided, tight.undecided) == ([], [], None), (
        "costs of 1.8 to 2.4 and 2.7 to 3.6 dollars do not overlap"
    )
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
    found = [(query(exact), [first]), (replace(query(exact), system=replace(exact, name="other")), [second])]
    assert [each for _, each in rank_systems(found)] == [first, second]
    (tie,) = second.undecided or []
    assert 0.35 < tie.part < 0.65
    assert set(tie.by) == {"pace (dgx2)", "pace (other)"}


def test_exact_and_uncertain_systems_are_compared(exact: System) -> None:
    known, ranged = row(1.0, [1.0]), row(1.1, [0.5, 1.1, 1.2, 1.3] * 16, move("links.a", 0.5, 1.3))
    known.interval = None
    for each in (known, ranged):
        rank_rows([each], "p75")
    found = [(query(exact), [known]), (replace(query(exact), system=replace(exact, name="other")), [ranged])]
    assert [each for _, each in rank_systems(found)] == [known, ranged]
    assert ranged.undecided == [Tie(1, 0.25, ("links.a (other)",))]


def test_a_tight_row_is_last_and_has_no_ties(exact: System) -> None:
    fast, slow = row(1.0, [1.0, 1.0]), row(2.0, [2.0, 0.5])
    fast.is_tight = True
    assert rank_rows([fast, slow], "p75") == [slow, fast]
    assert (fast.undecided, slow.undecided) == (None, [])
    entries = [plan_entry(query(exact), each) for each in (slow, fast)]
    assert [(entry["tight"], entry["rank_s"]) for entry in entries] == [(False, 1.625), (True, 1.0)]


def test_less_than_3_percent_of_free_memory_is_tight(exact: System) -> None:
    """The device of the fastest layout has 2.9 % and then 3.1 % of free memory."""
    request = replace(query(exact), given={**query(exact).given, "tp": 1})
    with Workers(1) as workers:
        (found,) = search_layouts(request, workers, 1).rows
        used = found.memory["reserved_bytes"] + exact.context()
        rows = [
            search_layouts(replace(request, limit=round(used / (1 - left))), workers, 1).rows[0]
            for left in (0.029, 0.031)
        ]
    assert [(each.outcome, each.is_tight) for each in (found, *rows)] == [
        (OK, False),
        (OK, True),
        (OK, False),
    ]


def test_a_tight_row_has_a_star_with_one_footnote(exact: System, capsys: pytest.CaptureFixture[str]) -> None:
    with Workers(1) as workers:
        found = search_layouts(query(exact), workers, 4)
    found.rows[1].is_tight = True
    show_plan(query(exact), found, 4)
    out = " ".join(capsys.readouterr().out.split())
    assert f"{gb(found.rows[1].memory['reserved_bytes'])}*" in out
    assert out.count("*") == 2
    assert "*: less than 3 % of the device's memory is left" in out


def test_faster_tight_rows_beyond_the_table_are_counted(
    exact: System, capsys: pytest.CaptureFixture[str]
) -> None:
    with Workers(1) as workers:
        found = search_layouts(query(exact), workers, 4)
    best, other = found.rows[:2]
    for is_tight, factor in ((True, 0.5), (True, 2), (False, 0.5)):
        other.is_tight, other.rank_s = is_tight, factor * best.rank_s
        show_plan(query(exact), replace(found, rows=[best, other]), 1)
        out = " ".join(capsys.readouterr().out.split())
        counted = "Faster, but with less than 3 % of the device's memory left: 1 layout (--top 2)." in out
        assert counted == (is_tight and factor < 1)


@pytest.fixture(scope="module")
def exact() -> System:
    system = systems.load_system_file("dgx2")
    return with_values(system, {one.key: one.best for one in unknowns(system)})


def query(system: System) -> PlanRequest:
    given = {"pp": 1, "zero": 0, "micro_batch": 2, "sp": False, "recompute": False, "kernels": "softmax"}
    return PlanRequest(MODEL, system, 64, 32 * 10**9, MODEL.seq, given)


def show_plan(request: PlanRequest, plan: Plan, top: int, **options: Any) -> None:
    """Print the plan of one system."""
    print_layouts([(request, plan)], [(request, row) for row in plan.rows], top, **options)


def plan_of(system: System) -> Plan:
    with Workers(1) as workers:
        return search_layouts(query(system), workers, 4, exhaustive=False)


def test_a_plan_names_the_unknown_behind_a_tie(
    exact: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan with an exact value at one end of the range has the tied rows in the other order."""
    use_exact_kernels(monkeypatch)
    link = exact.links["inter-node"]
    known = link.used("inter-node", "rings")
    rings = replace(known, low=1, high=8, source="low: one; high: one for each adapter")
    ranged = replace(exact, links={**exact.links, "inter-node": replace(link, rings=rings)})
    found = plan_of(ranged)
    pairs = [(row, one) for row in found.rows for one in row.undecided]
    assert pairs
    few, many = ([row.layout for row in plan_of(with_values(exact, {RINGS: value})).rows] for value in (1, 8))
    for row, one in pairs:
        other = found.rows[one.than - 1]
        assert one.by == (RINGS,)
        reversed_orders = [order.index(row.layout) < order.index(other.layout) for order in (few, many)]
        assert any(reversed_orders)
    message = [plan_entry(query(ranged), row)["undecided"] for row in found.rows[:4]]
    assert json.loads(json.dumps(message)) == [
        [{"than": one.than, "part": one.part, "by": [RINGS]} for one in row.undecided]
        for row in found.rows[:4]
    ]
    show_plan(query(ranged), found, 4, details=True)
    output = capsys.readouterr().out
    for row, one in pairs:
        assert re.search(rf"\n +{found.rows.index(row) + 1} +{one.than} +[\d.]+  {RINGS}", output)
    assert ("Main uncertainty: inter-node rings." in output) == any(one.than == 1 for _, one in pairs)


def test_a_plan_with_exact_numbers_has_no_ties(
    exact: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_exact_kernels(monkeypatch)
    found = plan_of(exact)
    assert [plan_entry(query(exact), row)["undecided"] for row in found.rows[:4]] == [[]] * 4
    show_plan(query(exact), found, 4)
    output = capsys.readouterr().out
    assert "uncertain" not in output
    assert "Row" not in output


def printed(rows: list[PlanRow], top: int, system: System, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the printed table of the first `top` rows, and the text about ties, with single spaces."""
    for each, ties in zip(rows, ties_of(*rows), strict=True):
        each.undecided = ties
    show_plan(query(system), Plan(rows, 0, ""), top)
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("draw", "fastest"), [(0.9, False), (1.1, True)])
def test_the_text_states_the_fastest_row_or_ties(
    draw: float, fastest: bool, exact: System, capsys: pytest.CaptureFixture[str]
) -> None:
    first = row(1.0, [1.0, 1.0], move("links.a", 0.7, 1.3))
    others: Any = [row(1.2, [draw, 1.2]), row(1.3, [1.05, 1.3], move("links.b", 1.1, 1.3))]
    rows = [first, *others]
    output = printed(rows, 3, exact, capsys)
    assert ("Row 1 is faster than each of the 2 next rows in 95 % or more" in output) == fastest
    tied = "Rows 1 and 2 are tied within their uncertainty. Main uncertainty: a."
    assert (tied in output) == (not fastest)


def test_all_ties_with_row_1_are_one_sentence(exact: System, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence names every row that may be the fastest, and the input that decides most ties."""
    a, b = move("links.a", 0.7, 1.3), move("links.b", 1.1, 1.3)
    rows = [row(1.0, [1.0, 1.0], a), *(row(1.2, [0.9, 1.2]) for _ in range(3)), row(1.25, [1.1, 1.3])]
    rows += [row(1.3, [0.95, 1.4], b)]
    output = printed(rows, 6, exact, capsys)
    assert "Rows 1 to 4 and 6 are tied within their uncertainty. Main uncertainty: a." in output


def test_hidden_rows_count_in_the_text_about_ties(exact: System, capsys: pytest.CaptureFixture[str]) -> None:
    """The last of three rows may be the fastest, also if the table has one or two rows. One row has no ties."""
    rows = [row(1.0, [1.0, 1.0]), row(1.2, [1.2, 1.2]), row(1.3, [0.9, 1.3], move("links.b", 0.8, 1.3))]
    for top, hidden in ((1, True), (2, True), (3, False)):
        output = printed(rows, top, exact, capsys)
        assert "Rows 1 and 3 are tied within their uncertainty. Main uncertainty: b." in output
        assert ("1 more tied row: --top 3." in output) == hidden
    assert "tied" not in printed(rows[:1], 1, exact, capsys)


def test_a_plan_compares_more_rows_than_it_shows() -> None:
    """Rows after the first COMPARED_ROWS have no interval and no list of ties."""
    base = query(systems.load_system_file("dgx2"))
    request = replace(base, given={key: base.given[key] for key in ("pp", "sp", "recompute", "kernels")})
    with Workers(1) as workers:
        found = search_layouts(request, workers, 1, exhaustive=True)
    fits = [row for row in found.rows if row.outcome == "ok"]
    assert len(fits) > COMPARED_ROWS
    message = [plan_entry(request, row)["undecided"] for row in fits]
    assert [row.interval is not None for row in fits] == [i < COMPARED_ROWS for i in range(len(fits))]
    assert [one is not None for one in message] == [i < COMPARED_ROWS for i in range(len(fits))]
