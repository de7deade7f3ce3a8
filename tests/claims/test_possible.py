"""A predicted time that misses: what unknown numbers leave of it, which of them decides, and how it is counted."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from repro.claims.judge import judge
from repro.claims.reader import load_ledger
from repro.claims.table import as_dict, summary, totals, why
from repro.claims.verdicts import (
    NOT_COMPARABLE,
    NOT_REPRODUCED,
    POSSIBLE,
    REPRODUCED,
    ClaimResult,
    InputUncertainty,
    RowResult,
)
from repro.report.compare import BETTER, SAME, WORSE, _judge_verdicts
from repro.report.text.claims import print_claim_details
from repro.report.views import row_view, tornado
from repro.results.interval import Sensitivity, StepInterval
from repro.results.schema import SIMULATED, ExperimentRecord
from tests.claims.constructed_records import record
from tests.claims.test_judge import HEAD

RINGS, LAUNCH = "links.inter-node.rings", "device.time.launch_s"


def simulated(name: str, step_s: float, interval: StepInterval | None = None) -> ExperimentRecord:
    """A step of 100 samples."""
    metrics = {"step_seconds.median": step_s, "samples_per_s": 100 / step_s}
    return replace(record(name, **metrics), evidence=SIMULATED, interval=interval)


def moved(rings: tuple[float, float], launch: tuple[float, float], draws: list[float]) -> StepInterval:
    """What a step of 10 s takes at the ends of two unknowns."""
    made = [
        Sensitivity(key=key, low=1, best=2, high=3, low_s=low, high_s=high)
        for key, (low, high) in ((RINGS, rings), (LAUNCH, launch))
    ]
    return StepInterval(draws=draws, moves=made)


def judged(
    path: Path, published: str, *records: ExperimentRecord, value: str, bound: str = ""
) -> ClaimResult:
    text = f'{{ label = "x", published = "{published}", bound = "{bound}", {value} }}'
    (path / "claims.toml").write_text(HEAD + text + "]\n")
    return judge(load_ledger(path), records)[0]


def rate(name: str = "s/a") -> str:
    return f"""simulated = {{ value = 'metric("{name}", "samples_per_s")', metric = "throughput" }}"""


def only(result: ClaimResult) -> RowResult:
    (row,) = result.rows
    return row


DOUBT = moved((10.0, 5.0), (9.9, 11.0), [5.0, 8.0, 10.0, 12.0])
"""A rate of 10/s that may be 20/s with more rings, or 8.3/s in some joint draw."""


@pytest.mark.parametrize(
    ("published", "bound", "verdict"),
    [
        ("10.0", "", REPRODUCED),  # the best value
        ("11.4", "", REPRODUCED),  # in the tolerance of 15 % around what was published
        ("15.0", "", POSSIBLE),
        ("20.0", "", POSSIBLE),
        ("20.1", "", NOT_REPRODUCED),  # no tolerance around what is allowed
        ("8.8", "", REPRODUCED),
        ("8.0", "", NOT_REPRODUCED),
        ("19", "over", POSSIBLE),
        ("20", "over", NOT_REPRODUCED),
        ("9", "over", REPRODUCED),
    ],
)
def test_a_published_value_is_possible_where_some_allowed_value_gives_it(
    tmp_path: Path, published: str, bound: str, verdict: str
) -> None:
    row = only(judged(tmp_path, published, simulated("s/a", 10.0, DOUBT), value=rate(), bound=bound))
    assert row.verdict == verdict, row.reason
    (finding,) = row.findings
    ends = 100 / 12 + 0.15 * (10 - 100 / 12), 20 - 0.15 * (20 - 12.5)  # 5 and 95 % of four draws
    assert (finding.low, finding.high) == pytest.approx(ends)
    if verdict == POSSIBLE:
        assert f"{RINGS} decides" in row.reason
    if verdict == NOT_REPRODUCED:
        assert (
            "the ranges of all unknown inputs give 8.333 to 20, which does not contain the published value"
            in row.reason
        )


@pytest.mark.parametrize(("published", "bound"), [("15.0", ""), ("20", "over")])
def test_a_miss_says_its_rule_in_words_and_the_page_says_it_once(
    tmp_path: Path, published: str, bound: str
) -> None:
    result = judged(tmp_path, published, simulated("s/a", 10.0, DOUBT), value=rate(), bound=bound)
    rule, _, rest = only(result).reason.partition("; ")
    assert rule == ("printed bound" if bound else "15% (throughput)")
    assert rest.startswith("the ranges of all unknown inputs give ")
    (shown,) = row_view(only(result), result.claim)["findings"]
    assert shown["tolerance"].endswith(f": {rule}")
    assert shown["reason"] == rest


def test_without_an_interval_a_miss_stays_a_miss_and_has_no_tornado(tmp_path: Path) -> None:
    result = judged(tmp_path, "15.0", simulated("s/a", 10.0), value=rate())
    row = only(result)
    assert (row.verdict, row.findings[0].low) == (NOT_REPRODUCED, 10.0)
    assert row_view(row, result.claim)["findings"][0]["tornado"] == []


def test_where_no_unknown_is_enough_the_two_that_do_most_are_named(tmp_path: Path) -> None:
    uncertainty = moved((10.0, 8.0), (9.0, 10.0), [7.0] * 4)
    row = only(judged(tmp_path, "14.0", simulated("s/a", 10.0, uncertainty), value=rate()))
    assert row.verdict == POSSIBLE
    assert f"{RINGS} and {LAUNCH} decide" in row.reason


def test_both_sides_of_a_ratio_are_taken_in_the_same_case(tmp_path: Path) -> None:
    """Twice as fast in every draw, however far the rates move; and only an unknown of one side moves the ratio."""
    both_read = 'metric("s/a", "samples_per_s") / metric("s/b", "samples_per_s")'
    value = f"simulated = {{ value = '{both_read}', metric = \"ratio\" }}"
    both = [5.0, 8.0, 10.0, 12.0]
    ours = simulated("s/a", 10.0, moved((5.0, 12.0), (10.0, 10.0), both))
    other = simulated("s/b", 20.0, moved((10.0, 24.0), (20.0, 20.0), [2 * step for step in both]))
    row = only(judged(tmp_path, "3.0", ours, other, value=value))
    assert (row.verdict, row.findings[0].low, row.findings[0].high) == (NOT_REPRODUCED, 2.0, 2.0)
    alone = simulated("s/b", 20.0, moved((10.0, 24.0), (20.0, 30.0), [2 * step for step in both]))
    row = only(judged(tmp_path, "3.0", ours, alone, value=value))
    assert row.verdict == POSSIBLE
    assert f"{LAUNCH} decides" in row.reason


def test_possible_is_a_verdict_of_its_own_in_every_count(tmp_path: Path) -> None:
    rows = ",\n".join(
        f'{{ label = "{name}", published = "{value}", {rate(f"s/{name}")} }}'
        for name, value in (("a", "10.0"), ("b", "15.0"))
    )
    (tmp_path / "claims.toml").write_text(HEAD + rows + "]\n")
    records = [simulated(f"s/{name}", 10.0, DOUBT) for name in "ab"]
    (result,) = judge(load_ledger(tmp_path), records)
    assert (result.verdict, result.basis) == (POSSIBLE, "simulated 1/2")
    assert result.disagreements == ()
    kind = result.kind("simulated")
    assert kind is not None
    assert (kind.verdict, kind.reproduced, kind.decided) == (POSSIBLE, 1, 2)
    counts = summary([result])
    assert (counts["verdicts"][POSSIBLE], counts["row_verdicts"][POSSIBLE]) == (1, 1)
    assert counts["quantities"] == {"tested": 2, "hold": 1, "possible": 1}
    assert counts["evidence"]["simulated"]["rows_possible"] == 1
    assert "1 agree (0 weak), 0 miss, 1 undecided." in totals([result])
    assert why(result).startswith("1 of 2 values agree; unknown inputs explain 1 more")


def test_to_become_possible_is_better_than_a_miss_and_worse_than_a_success() -> None:
    assert _judge_verdicts(REPRODUCED, POSSIBLE) == WORSE == _judge_verdicts(POSSIBLE, NOT_REPRODUCED)
    assert _judge_verdicts(NOT_REPRODUCED, POSSIBLE) == BETTER == _judge_verdicts(POSSIBLE, REPRODUCED)
    assert _judge_verdicts(POSSIBLE, POSSIBLE) == SAME == _judge_verdicts(NOT_COMPARABLE, POSSIBLE)


def test_a_tornado_has_the_unknowns_that_move_a_value_most_as_parts_of_the_widest_span(
    tmp_path: Path,
) -> None:
    """Rings: 10 to 20/s; launch: 10.1 to 9.09/s; so all bars lie between 9.09 and 20."""
    result = judged(tmp_path, "15.0", simulated("s/a", 10.0, DOUBT), value=rate())
    (finding,) = only(result).findings
    (shown,) = row_view(only(result), result.claim)["findings"]
    rings, launch = shown["tornado"]
    assert (rings["key"], launch["key"]) == (RINGS, LAUNCH)
    full = 20 - 100 / 11
    assert rings["left"] == rings["best"] == pytest.approx(100 * (10 - 100 / 11) / full, abs=0.1)
    assert rings["left"] + rings["width"] == pytest.approx(100)
    assert launch["left"] == 0
    assert launch["width"] == pytest.approx(100 * (100 / 9.9 - 100 / 11) / full, abs=0.1)
    spans = 10, 100 / 9.9 - 100 / 11
    assert rings["share"] == f"{100 * spans[0] / sum(spans):.1f} %"
    assert (rings["least"], rings["most"], launch["least"]) == ("10", "20", "9.09")
    assert launch["ends"] == "10.1 at the low end of its range, 9.09 at the high end"
    document = as_dict(result, load_ledger(tmp_path))["rows"][0]["evidence"][0]
    assert [(move["key"], move["low"]) for move in document["moved_by"]] == [
        (RINGS, 10.0),
        (LAUNCH, 100 / 9.9),
    ]
    assert finding.deciding == (RINGS,)


def test_a_tornado_leaves_out_what_decides_nothing() -> None:
    """Less than a fiftieth of what all of them move together."""
    uncertainty = InputUncertainty(
        1.0, 3.0, 1.0, 3.0, 2.0, {"rings": (1.0, 3.0), "pcie": (2.0, 2.06), "launch": (2.0, 2.02)}
    )
    assert [bar["key"] for bar in tornado(uncertainty)] == ["rings", "pcie"]


def test_a_claim_on_a_terminal_says_what_moves_its_values_most(tmp_path: Path) -> None:
    """Only where something does."""
    message = {}
    for name, interval in (("open", DOUBT), ("certain", None)):
        console = Console(file=io.StringIO(), width=140, highlight=False)
        result = judged(tmp_path, "15.0", simulated("s/a", 10.0, interval), value=rate())
        print_claim_details(result, load_ledger(tmp_path), console)
        assert isinstance(console.file, io.StringIO)
        message[name] = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["x", RINGS, "10", "20", "90.8", "%"] in message["open"]
    assert [LAUNCH, "10.1", "9.09", "9.2", "%"] in message["open"]
    assert not any("moves" in line for line in message["certain"])
