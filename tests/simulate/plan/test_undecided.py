"""Where the order of two layouts is not decided by what is known: by hand, of a plan, and as it is said."""

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


def compared(*rows: PlanRow) -> list[list[Tie]]:
    return find_ties([(row.time["step_s"], row.interval) for row in rows if row.interval is not None])


def test_the_ratio_of_two_layouts_tells_draw_by_draw() -> None:
    """A wide range that slows both alike leaves their order alone; one in 20 draws is not enough, two are."""
    alike = [1.0 + i for i in range(20)]
    first = row(2.0, alike)
    never = row(2.2, [1.1 * seconds for seconds in alike])
    once = row(2.3, [0.9, *(1.2 * seconds for seconds in alike[1:])])
    twice = row(2.4, [0.9, 1.9, *(1.3 * seconds for seconds in alike[2:])])
    assert compared(first, never) == [[], []]
    assert compared(first, once, twice) == [[], [], [Tie(1, 0.1, ())]]


def test_what_turns_the_order_by_itself_decides_or_what_comes_nearest() -> None:
    draws = [2.0, 2.0, 3.0, 3.0]
    first = row(2.0, draws, move("slow", 1.0, 8.0), move("links", 1.8, 2.6), move("rate", 2.0, 2.3))
    # `slow` moves both alike.  The ratio is 2.2 / 1.8 to 2.2 / 2.6 by `links`, 1.1 to 2.2 / 2.3 by `rate`.
    other = row(2.2, [2.1, 2.2, 2.4, 2.5], move("slow", 1.1, 8.8))
    # ... and 1.2 / 1 to 9.6 / 8, 2.4 / 1.8 to 2.4 / 2.6, 1.2 to 2.4 / 2.3.
    third = row(2.4, [1.9, 2.4, 2.9, 3.5], move("slow", 1.2, 9.6))
    # Neither end turns this one: 3 / 1.8 to 3 / 2.6 is the most.
    last = row(3.0, [1.8, 4.0, 4.0, 4.0], move("slow", 1.5, 12.0))
    _, *open_ = compared(first, other, third, last)
    assert open_[0] == [Tie(1, 0.5, ("links", "rate"))]
    assert open_[1][0] == Tie(1, 0.5, ("links",))
    assert open_[2][0] == Tie(1, 0.25, ("links",))


def test_rows_are_ranked_by_a_quantile_of_their_step_times() -> None:
    """A row whose best values are the best may be slow in many draws; of rows without unknown numbers all is known."""
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


def test_rows_of_two_systems_are_ranked_by_cost_or_by_step_time(exact: System) -> None:
    """Steps of 1 and 1.2 s at 3 dollars an hour cost more than one of 2 s at 1 dollar, and tight rows are last."""
    draws = [0.9, 1.0, 1.1, 1.2]
    quick, later = row(1.0, draws), row(1.2, [1.2 * s for s in draws])
    slow, tight = row(2.0, [2 * s for s in draws]), row(0.5, [s / 2 for s in draws])
    tight.is_tight = True
    slow_request = replace(asked(exact), rank_by="cost", price_per_gpu_hour=1.0)
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
    assert slow.rank_s == pytest.approx(2.25), "75 % quantile of the seconds"
    assert (slow.undecided, quick.undecided, tight.undecided) == ([], [], None), (
        "1.8 to 2.4 and 2.7 to 3.6 dollars"
    )
    by_time = [(replace(request, rank_by="p75"), rows) for request, rows in found]
    assert [each for _, each in rank_systems(by_time)] == [quick, later, slow, tight]


def test_unknown_numbers_of_two_systems_are_independent(exact: System) -> None:
    """An unknown slows both systems alike, up to 8 times. In one system this has no effect on the order, in two it has.

    The draws of both rows are 1 to 64. Of independent pairs, the share with the lower second draw is about a half, less
    the share of the ties.
    """
    draws = [float(second) for second in range(1, 65)]
    first, second = (row(s, [s * each for each in draws], move("pace", 0.5 * s, 4 * s)) for s in (1.0, 1.01))
    rank_rows([first, second], "p75")
    assert second.undecided == []
    found = [(asked(exact), [first]), (replace(asked(exact), system=replace(exact, name="other")), [second])]
    assert [each for _, each in rank_systems(found)] == [first, second]
    (tie,) = second.undecided or []
    assert 0.35 < tie.part < 0.65
    assert set(tie.by) == {"pace (dgx2)", "pace (other)"}


def test_a_system_without_unknown_numbers_is_compared_with_one_that_has_some(exact: System) -> None:
    known, ranged = row(1.0, [1.0]), row(1.1, [0.5, 1.1, 1.2, 1.3] * 16, move("links.a", 0.5, 1.3))
    known.interval = None
    for each in (known, ranged):
        rank_rows([each], "p75")
    found = [(asked(exact), [known]), (replace(asked(exact), system=replace(exact, name="other")), [ranged])]
    assert [each for _, each in rank_systems(found)] == [known, ranged]
    assert ranged.undecided == [Tie(1, 0.25, ("links.a (other)",))]


def test_a_tight_row_is_last_and_not_compared(exact: System) -> None:
    fast, slow = row(1.0, [1.0, 1.0]), row(2.0, [2.0, 0.5])
    fast.is_tight = True
    assert rank_rows([fast, slow], "p75") == [slow, fast]
    assert (fast.undecided, slow.undecided) == (None, [])
    entries = [plan_entry(asked(exact), each) for each in (slow, fast)]
    assert [(entry["tight"], entry["rank_s"]) for entry in entries] == [(False, 1.625), (True, 1.0)]


def test_a_layout_that_leaves_less_than_3_percent_of_the_memory_is_tight(exact: System) -> None:
    """The fastest layout, on a device that has 2.9 % and then 3.1 % of its memory left."""
    request = replace(asked(exact), given={**asked(exact).given, "tp": 1})
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
        found = search_layouts(asked(exact), workers, 4)
    found.rows[1].is_tight = True
    show_plan(asked(exact), found, 4)
    out = " ".join(capsys.readouterr().out.split())
    assert f"{gb(found.rows[1].memory['reserved_bytes'])}*" in out
    assert out.count("*") == 2
    assert "*: less than 3 % of the device's memory is left" in out


@pytest.fixture(scope="module")
def exact() -> System:
    system = systems.load_system_file("dgx2")
    return with_values(system, {one.key: one.best for one in unknowns(system)})


def asked(system: System) -> PlanRequest:
    given = {"pp": 1, "zero": 0, "micro_batch": 2, "sp": False, "recompute": False, "kernels": "softmax"}
    return PlanRequest(MODEL, system, 64, 32 * 10**9, MODEL.seq, given)


def show_plan(request: PlanRequest, plan: Plan, top: int, **options: Any) -> None:
    """Print the plan of one system."""
    print_layouts([(request, plan)], [(request, row) for row in plan.rows], top, **options)


def planned(system: System) -> Plan:
    with Workers(1) as workers:
        return search_layouts(asked(system), workers, 4, exhaustive=False)


def test_a_plan_names_the_unknown_that_turns_two_layouts(
    exact: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As said, at an end of the range a plan of exact numbers has them in the other order; of these nothing is said."""
    use_exact_kernels(monkeypatch)
    link = exact.links["inter-node"]
    known = link.used("inter-node", "rings")
    rings = replace(known, low=1, high=8, source="low: one; high: one for each adapter")
    ranged = replace(exact, links={**exact.links, "inter-node": replace(link, rings=rings)})
    found = planned(ranged)
    pairs = [(row, one) for row in found.rows for one in row.undecided]
    assert pairs
    few, many = ([row.layout for row in planned(with_values(exact, {RINGS: value})).rows] for value in (1, 8))
    for row, one in pairs:
        other = found.rows[one.than - 1]
        assert one.by == (RINGS,)
        turned = [order.index(row.layout) < order.index(other.layout) for order in (few, many)]
        assert any(turned)
    message = [plan_entry(asked(ranged), row)["undecided"] for row in found.rows[:4]]
    assert json.loads(json.dumps(message)) == [
        [{"than": one.than, "part": one.part, "by": [RINGS]} for one in row.undecided]
        for row in found.rows[:4]
    ]
    show_plan(asked(ranged), found, 4, details=True)
    output = capsys.readouterr().out
    for row, one in pairs:
        assert re.search(rf"\n +{found.rows.index(row) + 1} +{one.than} +[\d.]+  {RINGS}", output)
    assert ("Main uncertainty: inter-node rings." in output) == any(one.than == 1 for _, one in pairs)


def test_of_exact_numbers_nothing_is_reported(
    exact: System, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_exact_kernels(monkeypatch)
    found = planned(exact)
    assert [plan_entry(asked(exact), row)["undecided"] for row in found.rows[:4]] == [[]] * 4
    show_plan(asked(exact), found, 4)
    output = capsys.readouterr().out
    assert "uncertain" not in output
    assert "Row" not in output


def printed(rows: list[PlanRow], top: int, system: System, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the table of the first `top` of the compared rows, with single spaces."""
    for one, ties in zip(rows, compared(*rows), strict=True):
        one.undecided = ties
    show_plan(asked(system), Plan(rows, 0, ""), top)
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("draw", "fastest"), [(0.9, False), (1.1, True)])
def test_what_is_reported_of_the_first_and_of_neighbours(
    draw: float, fastest: bool, exact: System, capsys: pytest.CaptureFixture[str]
) -> None:
    first = row(1.0, [1.0, 1.0], move("links.a", 0.7, 1.3))
    others: Any = [row(1.2, [draw, 1.2]), row(1.3, [1.05, 1.3], move("links.b", 1.1, 1.3))]
    rows = [first, *others]
    output = printed(rows, 3, exact, capsys)
    assert ("Row 1 is faster than each of the 2 next rows in 95 % or more" in output) == fastest
    tied = "Rows 1 and 2 are tied within their uncertainty. Main uncertainty: a."
    assert (tied in output) == (not fastest)


def test_ties_are_one_sentence(exact: System, capsys: pytest.CaptureFixture[str]) -> None:
    """It names every row that may be the fastest, and the input that decides most of them."""
    a, b = move("links.a", 0.7, 1.3), move("links.b", 1.1, 1.3)
    rows = [row(1.0, [1.0, 1.0], a), *(row(1.2, [0.9, 1.2]) for _ in range(3)), row(1.25, [1.1, 1.3])]
    rows += [row(1.3, [0.95, 1.4], b)]
    output = printed(rows, 6, exact, capsys)
    assert "Rows 1 to 4 and 6 are tied within their uncertainty. Main uncertainty: a." in output


def test_rows_that_are_not_shown_are_compared_too(exact: System, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three the last may be the fastest: who is shown one or two is output so, and of one alone nothing is said."""
    rows = [row(1.0, [1.0, 1.0]), row(1.2, [1.2, 1.2]), row(1.3, [0.9, 1.3], move("links.b", 0.8, 1.3))]
    for top, hidden in ((1, True), (2, True), (3, False)):
        output = printed(rows, top, exact, capsys)
        assert "Rows 1 and 3 are tied within their uncertainty. Main uncertainty: b." in output
        assert ("1 more tied row: --top 3." in output) == hidden
    assert "tied" not in printed(rows[:1], 1, exact, capsys)


def test_a_plan_compares_more_rows_than_it_shows() -> None:
    """Of a system with unknown numbers; what was compared with none says so."""
    few = asked(systems.load_system_file("dgx2"))
    request = replace(few, given={key: few.given[key] for key in ("pp", "sp", "recompute", "kernels")})
    with Workers(1) as workers:
        found = search_layouts(request, workers, 1, exhaustive=True)
    fits = [row for row in found.rows if row.outcome == "ok"]
    assert len(fits) > COMPARED_ROWS
    message = [plan_entry(request, row)["undecided"] for row in fits]
    assert [row.interval is not None for row in fits] == [place < COMPARED_ROWS for place in range(len(fits))]
    assert [one is not None for one in message] == [place < COMPARED_ROWS for place in range(len(fits))]
