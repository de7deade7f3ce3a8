"""Tests of the verdict `possible`: ranges of uncertain inputs, the deciding input, counts and displays."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from repro.claims import verdicts as v
from repro.claims.ledger import Ledger
from repro.claims.reader import load_ledger
from repro.claims.table import as_dict, summary, totals, why
from repro.claims.verdicts import ClaimResult, InputUncertainty
from repro.report.compare import BETTER, SAME, WORSE, _judge_verdicts
from repro.report.text.claims import print_claim_details
from repro.report.views import row_view, tornado
from repro.results.interval import Sensitivity, StepInterval
from repro.results.schema import SIMULATED, ExperimentRecord
from tests.claims.constructed_records import RATIO, judged, record, row, value

RINGS, LAUNCH = "links.inter-node.rings", "device.time.launch_s"


def simulated(name: str, step_s: float, interval: StepInterval | None = None) -> ExperimentRecord:
    """Return a simulated step of 100 samples."""
    metrics = {"step_seconds.median": step_s, "samples_per_s": 100 / step_s}
    return replace(record(name, **metrics), evidence=SIMULATED, interval=interval)


def step_range(rings: tuple[float, float], launch: tuple[float, float], draws: list[float]) -> StepInterval:
    """Return the interval of a step, with its times at both ends of two uncertain inputs."""
    moves = [
        Sensitivity(key=key, low=1, best=2, high=3, low_s=low, high_s=high)
        for key, (low, high) in ((RINGS, rings), (LAUNCH, launch))
    ]
    return StepInterval(draws=draws, moves=moves)


def rate(name: str = "s/a") -> str:
    return value(f'metric("{name}", "samples_per_s")', 'metric = "throughput"')


def judge_rate(path: Path, published: str, *records: ExperimentRecord, bound: str = "") -> ClaimResult:
    return judged(path, row(published, bound=f'"{bound}"', simulated=rate()), *records)


WIDE_INTERVAL = step_range((10.0, 5.0), (9.9, 11.0), [5.0, 8.0, 10.0, 12.0])
"""Interval of a step of 10 s, or 10 samples/s: 20 samples/s with more rings, 8.3 samples/s in one joint draw."""
WIDE = simulated("s/a", 10.0, WIDE_INTERVAL)


def test_published_value_in_the_range_of_unknowns_is_possible(tmp_path: Path) -> None:
    for published, bound, verdict in (
        ("10.0", "", v.REPRODUCED),  # the value at the best inputs
        ("11.4", "", v.REPRODUCED),  # within 15 % of the published value
        ("15.0", "", v.POSSIBLE),
        ("20.0", "", v.POSSIBLE),
        ("20.1", "", v.NOT_REPRODUCED),  # the tolerance does not widen the range of the uncertain inputs
        ("8.8", "", v.REPRODUCED),
        ("8.0", "", v.NOT_REPRODUCED),
        ("19", "over", v.POSSIBLE),
        ("20", "over", v.NOT_REPRODUCED),
        ("9", "over", v.REPRODUCED),
    ):
        result = judge_rate(tmp_path, published, WIDE, bound=bound)
        (finding,) = result.findings
        assert result.verdict == verdict, (published, bound, finding.reason)
        ends = 100 / 12 + 0.15 * (10 - 100 / 12), 20 - 0.15 * (20 - 12.5)  # 5 and 95 % of four draws
        assert (finding.low, finding.high) == pytest.approx(ends)
        if verdict == v.REPRODUCED:
            continue
        tolerance, _, rest = finding.reason.partition("; ")
        assert tolerance == ("printed bound" if bound else "15% (throughput)")
        assert rest.startswith("the ranges of all uncertain inputs give ")
        interval = "the interval 8.333 to 20 without the published value"
        assert (f"{RINGS} decides" if verdict == v.POSSIBLE else interval) in rest
        (shown,) = row_view(result.rows[0], result.claim)["findings"]
        assert shown["tolerance"].endswith(f": {tolerance}"), "the page shows the tolerance once"
        assert shown["reason"] == rest


def test_two_unknowns_and_two_values_decide_together(tmp_path: Path) -> None:
    """Neither unknown explains the miss alone. A possible value decides over a reproduced value of the same row."""
    uncertainty = step_range((10.0, 8.0), (9.0, 10.0), [7.0] * 4)
    result = judge_rate(tmp_path, "14.0", simulated("s/a", 10.0, uncertainty))
    assert result.verdict == v.POSSIBLE
    assert f"{RINGS} and {LAUNCH} decide" in result.rows[0].reason
    rows = row("15.0", simulated=f"[{rate('s/b')}, {rate('s/a')}]")
    result = judged(tmp_path, rows, WIDE, simulated("s/b", 100 / 15))
    assert [one.verdict for one in result.findings] == [v.REPRODUCED, v.POSSIBLE]
    assert result.verdict == v.POSSIBLE


def test_ratio_uses_the_same_draw_on_both_sides(tmp_path: Path) -> None:
    """The ratio is 2 in every draw of both rates. An unknown that affects one side alone changes the ratio."""
    rows = row("3.0", simulated=value(RATIO, 'metric = "ratio"'))
    draws = [5.0, 8.0, 10.0, 12.0]
    ours = simulated("s/a", 10.0, step_range((5.0, 12.0), (10.0, 10.0), draws))
    other = simulated("s/b", 20.0, step_range((10.0, 24.0), (20.0, 20.0), [2 * step for step in draws]))
    (finding,) = judged(tmp_path, rows, ours, other).findings
    assert (finding.verdict, finding.low, finding.high) == (v.NOT_REPRODUCED, 2.0, 2.0)
    one_sided = simulated("s/b", 20.0, step_range((10.0, 24.0), (20.0, 30.0), [2 * step for step in draws]))
    (finding,) = judged(tmp_path, rows, ours, one_sided).findings
    assert (finding.verdict, finding.deciding) == (v.POSSIBLE, (LAUNCH,))


def test_possible_values_have_a_separate_count(tmp_path: Path) -> None:
    rows = row("10.0", "a", simulated=rate("s/a")) + row("15.0", "b", simulated=rate("s/b"))
    result = judged(tmp_path, rows, WIDE, simulated("s/b", 10.0, WIDE_INTERVAL))
    assert (result.verdict, result.basis) == (v.POSSIBLE, "simulated 1/2")
    assert result.disagreements == ()
    kind = result.kind("simulated")
    assert kind is not None
    assert (kind.verdict, kind.reproduced, kind.decided) == (v.POSSIBLE, 1, 2)
    counts = summary([result])
    assert (counts["verdicts"][v.POSSIBLE], counts["row_verdicts"][v.POSSIBLE]) == (1, 1)
    assert counts["quantities"] == {"tested": 2, "hold": 1, "possible": 1}
    assert counts["evidence"]["simulated"]["rows_possible"] == 1
    assert "1 agree (0 weak), 0 miss, 1 undecided." in totals([result])
    assert why(result).startswith("1 of 2 values agree; uncertain inputs explain the miss of 1 more")


def test_possible_ranks_between_reproduced_and_not_reproduced() -> None:
    assert _judge_verdicts(v.REPRODUCED, v.POSSIBLE) == WORSE == _judge_verdicts(v.POSSIBLE, v.NOT_REPRODUCED)
    assert (
        _judge_verdicts(v.NOT_REPRODUCED, v.POSSIBLE) == BETTER == _judge_verdicts(v.POSSIBLE, v.REPRODUCED)
    )
    assert _judge_verdicts(v.POSSIBLE, v.POSSIBLE) == SAME == _judge_verdicts(v.NOT_COMPARABLE, v.POSSIBLE)


def test_page_and_terminal_show_the_unknowns_with_the_largest_effects(tmp_path: Path) -> None:
    """Rings give 10 to 20 samples/s and launch 10.1 to 9.09, so the axis extends from 9.09 to 20."""
    result = judge_rate(tmp_path, "15.0", WIDE)
    (shown,) = row_view(result.rows[0], result.claim)["findings"]
    rings, launch = shown["tornado"]
    assert (rings["key"], launch["key"]) == (RINGS, LAUNCH)
    axis = 20 - 100 / 11
    assert rings["left"] == rings["best"] == pytest.approx(100 * (10 - 100 / 11) / axis, abs=0.1)
    assert rings["left"] + rings["width"] == pytest.approx(100)
    assert launch["left"] == 0
    assert launch["width"] == pytest.approx(100 * (100 / 9.9 - 100 / 11) / axis, abs=0.1)
    spans = 10, 100 / 9.9 - 100 / 11
    assert rings["share"] == f"{100 * spans[0] / sum(spans):.1f} %"
    assert (rings["least"], rings["most"], launch["least"]) == ("10", "20", "9.09")
    assert launch["ends"] == "prediction 10.1 at the low end of the input, 9.09 at its high end"
    ledger = load_ledger(tmp_path)
    document = as_dict(result, ledger)["rows"][0]["evidence"][0]
    moves = [(move["key"], move["low"]) for move in document["moved_by"]]
    assert moves == [(RINGS, 10.0), (LAUNCH, 100 / 9.9)]
    assert result.findings[0].deciding == (RINGS,)
    lines = printed(result, ledger)
    assert ["x", RINGS, "10", "20", "90.8", "%"] in lines
    assert [LAUNCH, "10.1", "9.09", "9.2", "%"] in lines
    exact = judge_rate(tmp_path, "15.0", simulated("s/a", 10.0))
    assert not any("moves" in line for line in printed(exact, ledger)), "the value has no interval"
    # The effect of `launch` is less than 2 % of the sum of all effects.
    effects = {"rings": (1.0, 3.0), "pcie": (2.0, 2.06), "launch": (2.0, 2.02)}
    bars = tornado(InputUncertainty(1.0, 3.0, 1.0, 3.0, 2.0, effects))
    assert [bar["key"] for bar in bars] == ["rings", "pcie"]


def printed(result: ClaimResult, ledger: Ledger) -> list[list[str]]:
    """Return the words of each line of the claim's details in a terminal."""
    output = io.StringIO()
    print_claim_details(result, ledger, Console(file=output, width=140, highlight=False))
    return [line.split() for line in output.getvalue().splitlines()]
