"""Tests of headline claims: their rows, the values and the verdict of a line, and the order of ledger files."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.claims.headlines import HeadlineLine, headline_lines
from repro.claims.judge import judge
from repro.claims.reader import load_ledger
from repro.claims.run_commands import HEADLINES, named_experiments
from repro.claims.verdicts import NOT_REPRODUCED, NOT_RUN, REPRODUCED
from repro.config import ConfigError
from repro.results.schema import MEASURED, SIMULATED, Record
from tests.claims.constructed_records import record
from tests.claims.test_judge import HEAD
from tests.records import changed

MAX_NAME_CHARACTERS = 30


def row(label: str, published: str, **evidence: str) -> str:
    kinds = ", ".join(f"{kind} = [{value}]" for kind, value in evidence.items())
    return f'{{ label = "{label}", published = "{published}", {kinds} }},\n'


def speed_evidence(name: str, more: str = "") -> str:
    return f'{{ value = \'metric("s/{name}", "speed")\'{more} }}'


def line(tmp_path: Path, rows: str, headline: str, *records: Record) -> HeadlineLine:
    """Return the line of one headline of a claim with `rows`."""
    (tmp_path / "test.toml").write_text(
        f"{HEAD}{rows}]\n[[headline]]\nname = 'One'\nclaim = 'a-claim'\n{headline}\n"
    )
    ledger = load_ledger(tmp_path)
    (found,) = headline_lines(ledger, judge(ledger, records))
    return found


def simulated(name: str, speed: float) -> Record:
    return changed(record(f"s/{name}", speed=speed), evidence=SIMULATED)


def test_headline_line_has_values_and_verdict_of_its_rows(tmp_path: Path) -> None:
    rows = row("a", "2.0", simulated=speed_evidence("a")) + row("b", "4.0", simulated=speed_evidence("b"))
    rows += row("c", "9.0", simulated=speed_evidence("c"))
    values = simulated("a", 2.0), simulated("b", 4.02), simulated("c", 1.0)
    found = line(tmp_path, rows, "rows = ['a', 'b']", *values)
    assert (found.published, found.values[SIMULATED], found.verdict) == ("2.0 / 4.0x", "2 / 4.02", REPRODUCED)
    assert line(tmp_path, rows, "rows = ['a', 'c']", *values).verdict == NOT_REPRODUCED
    assert line(tmp_path, rows, "rows = ['a', 'b']", values[0]).values[SIMULATED] == NOT_RUN


def test_more_than_three_values_are_shown_as_a_range(tmp_path: Path) -> None:
    rows = "".join(row(name, "2.0", simulated=speed_evidence(name)) for name in "abcd")
    values = (simulated(name, speed) for name, speed in zip("abcd", (9.0, 2.0, 10.0, 3.0), strict=True))
    assert line(tmp_path, rows, "rows = ['a', 'b', 'c', 'd']", *values).values[SIMULATED] == "2 to 10"


def test_otherwise_row_fills_a_missing_value_without_a_verdict(tmp_path: Path) -> None:
    rows = row("main", "2.0", measured=speed_evidence("full")) + row(
        "small", "2.0", measured=speed_evidence("small")
    )
    found = line(tmp_path, rows, "rows = ['main']\notherwise = ['small']", record("s/small", speed=2.5))
    assert (found.values[MEASURED], found.verdict) == ("2.5", NOT_RUN)
    both = record("s/small", speed=2.5), record("s/full", speed=2.0)
    found = line(tmp_path, rows, "rows = ['main']\notherwise = ['small']", *both)
    assert (found.values[MEASURED], found.verdict) == ("2", REPRODUCED)


@pytest.mark.parametrize(("speed", "text"), [(3.0, "exact"), (6.0, "2 of formula")])
def test_scaled_twin_shows_its_ratio_to_the_formula(tmp_path: Path, speed: float, text: str) -> None:
    rows = row("a", "2.0", measured=speed_evidence("twin", ', expect = "3", scale = "scaled twin"'))
    assert line(tmp_path, rows, "rows = ['a']", record("s/twin", speed=speed)).values[MEASURED] == text


@pytest.mark.parametrize("headline", ["rows = ['c']", "rows = []", "rows = ['a']\notherwise = ['c']"])
def test_error_for_an_unknown_row_names_file_and_headline(tmp_path: Path, headline: str) -> None:
    with pytest.raises(ConfigError, match=r"test.toml: headline\[One\]"):
        line(tmp_path, row("a", "2.0", simulated=speed_evidence("a")), headline)


def test_packaged_headlines_have_short_names_and_claim_numbers() -> None:
    ledger = load_ledger()
    assert len(ledger.headlines) >= 12
    for number, headline in enumerate(ledger.headlines, start=1):
        assert len(headline.name) <= MAX_NAME_CHARACTERS
        assert ledger.claim(str(number)).id == headline.claim
    with pytest.raises(ConfigError, match="no such claim"):
        ledger.claim(str(len(ledger.headlines) + 1))


def test_ledger_files_are_sorted_by_date_of_publication(tmp_path: Path) -> None:
    claim = HEAD.partition("[[claim]]")[2] + row("a", "2.0", simulated=speed_evidence("a")) + "]\n"
    for name, date in (("a", ""), ("b", 'date = "2021-04"'), ("c", 'date = "2019-09"')):
        source = HEAD.partition("[[claim]]")[0].replace('title = "Test"', f'title = "{name}"\n{date}', 1)
        text = (source if name == "a" else f'title = "{name}"\n{date}\n') + "[[claim]]" + claim
        (tmp_path / f"{name}.toml").write_text(text.replace("a-claim", f"{name}-claim"))
    assert [claim.id for claim in load_ledger(tmp_path).claims] == ["c-claim", "b-claim", "a-claim"]


def test_claims_and_headlines_name_the_experiments_they_read() -> None:
    ledger = load_ledger()
    simulations = named_experiments(ledger, HEADLINES, SIMULATED)
    assert {"deepspeed_lowbw/lowbw-megatron", "yuan/yuan-245b"} <= set(simulations)
    assert "windtunnel_smoke/lowbw-deepspeed" in named_experiments(ledger, "ds-3p75x-lowbw", MEASURED)
    assert set(named_experiments(ledger, "yuan-step-time", SIMULATED)) >= {"yuan/yuan-245b"}
    with pytest.raises(ConfigError, match="has no simulated evidence"):
        named_experiments(ledger, "ds-same-loss", SIMULATED)


def test_missed_row_shows_value_accepted_range_and_cause(tmp_path: Path) -> None:
    note = 'simulated = { value = \'metric("s/b", "speed")\' }, note = "Links are slow. More."'
    rows = row("a", "2.0", simulated=speed_evidence("a"))
    rows += f'{{ label = "b", published = "4.0", unit = "x", metric = "ratio", {note} }},\n'
    outcome = "{ value = 'outcome(\"s/c\")', expect = '\"ok\"' }"
    rows += f'{{ label = "c", published = "ok", unit = "", simulated = {outcome} }},\n'
    values = simulated("a", 2.0), simulated("b", 1.234), changed(simulated("c", 1.0), outcome="oom")
    missed = line(tmp_path, rows, "rows = ['a', 'b']", *values)
    assert missed.miss == "simulated 1.23, accepted 3.52 to 4.48x (12%). Links are slow."
    assert line(tmp_path, rows, "rows = ['c']", *values).miss == "simulated does not fit, accepted fits."
    assert line(tmp_path, rows, "rows = ['a']", *values).miss == ""
