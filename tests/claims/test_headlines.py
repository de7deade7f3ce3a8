"""Tests of headline claims: their rows, and the values, the verdict and the miss of a line."""

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
from tests import committed
from tests.claims.constructed_records import HEAD, record, row, value
from tests.records import changed

MAX_NAME_CHARACTERS = 30


def speed(name: str, keys: str = "") -> str:
    return value(f'metric("s/{name}", "speed")', keys)


def line(tmp_path: Path, rows: str, headline: str, *records: Record) -> HeadlineLine:
    (tmp_path / "test.toml").write_text(
        f"{HEAD}{rows}]\n[[headline]]\nname = 'One'\nclaim = 'a-claim'\n{headline}\n"
    )
    ledger = load_ledger(tmp_path)
    (found,) = headline_lines(ledger, judge(ledger, records))
    return found


def simulated(name: str, rate: float) -> Record:
    return changed(record(f"s/{name}", speed=rate), evidence=SIMULATED)


def test_headline_line_has_values_and_verdict_of_its_rows(tmp_path: Path) -> None:
    """More than three values are shown as a range."""
    rows = "".join(
        row(published, name, simulated=speed(name))
        for name, published in (("a", "2.0"), ("b", "4.0"), ("c", "9.0"), ("d", "2.0"))
    )
    values = [simulated(name, rate) for name, rate in (("a", 2.0), ("b", 4.0236), ("c", 10.2), ("d", 3.0))]
    found = line(tmp_path, rows, "rows = ['a', 'b']", *values)
    assert (found.published, found.values[SIMULATED], found.verdict) == ("2.0 / 4.0x", "2 / 4.02", REPRODUCED)
    assert line(tmp_path, rows, "rows = ['a', 'c']", *values).verdict == NOT_REPRODUCED
    assert line(tmp_path, rows, "rows = ['a', 'b']", values[0]).values[SIMULATED] == NOT_RUN
    four = line(tmp_path, rows, "rows = ['b', 'a', 'c', 'd']", *values)
    assert four.values[SIMULATED] == "2 to 10.2"


def test_otherwise_row_fills_a_missing_value_without_a_verdict(tmp_path: Path) -> None:
    rows = row(label="main", measured=speed("full")) + row(label="small", measured=speed("small"))
    headline = "rows = ['main']\notherwise = ['small']"
    small, full = record("s/small", speed=2.5), record("s/full", speed=2.0)
    found = line(tmp_path, rows, headline, small)
    assert (found.values[MEASURED], found.verdict) == ("2.5", NOT_RUN)
    found = line(tmp_path, rows, headline, small, full)
    assert (found.values[MEASURED], found.verdict) == ("2", REPRODUCED)


def test_scaled_twin_shows_its_ratio_to_the_formula(tmp_path: Path) -> None:
    rows = row(label="a", measured=speed("twin", 'expect = "3", scale = "scaled twin"'))
    for rate, text in ((3.0, "exact"), (6.0, "2 of formula")):
        found = line(tmp_path, rows, "rows = ['a']", record("s/twin", speed=rate))
        assert found.values[MEASURED] == text


def test_error_for_an_unknown_row_names_file_and_headline(tmp_path: Path) -> None:
    for headline in ("rows = ['c']", "rows = []", "rows = ['a']\notherwise = ['c']"):
        with pytest.raises(ConfigError, match=r"test.toml: headline\[One\]"):
            line(tmp_path, row(label="a", simulated=speed("a")), headline)


def test_packaged_headlines_have_short_names_and_claim_numbers() -> None:
    ledger = committed.ledger()
    assert len(ledger.headlines) >= 12
    for number, headline in enumerate(ledger.headlines, start=1):
        assert len(headline.name) <= MAX_NAME_CHARACTERS
        assert ledger.claim(str(number)).id == headline.claim
    with pytest.raises(ConfigError, match="no such claim"):
        ledger.claim(str(len(ledger.headlines) + 1))
    with pytest.raises(ConfigError, match="did you mean zero-fig1-7p5b"):
        ledger.claim("zero-fig1-7p5")


def test_headlines_name_the_experiments_they_read() -> None:
    ledger = committed.ledger()
    assert "deepspeed_lowbw/lowbw-megatron" in named_experiments(ledger, HEADLINES, SIMULATED)
    assert "windtunnel_smoke/lowbw-deepspeed" in named_experiments(ledger, "ds-3p75x-lowbw", MEASURED)


def test_missed_row_shows_value_accepted_range_and_cause(tmp_path: Path) -> None:
    outcome = value('outcome("s/c")', "expect = '\"ok\"'")
    rows = row(label="a", simulated=speed("a"))
    rows += row("4.0", "b", simulated=speed("b"), note='"Links are slow. More."')
    rows += row("ok", "c", unit='""', simulated=outcome)
    values = simulated("a", 2.0), simulated("b", 1.234), changed(simulated("c", 1.0), outcome="oom")
    for headline, miss in (
        ("rows = ['a', 'b']", "simulated 1.23, accepted 3.52 to 4.48x (12%). Links are slow."),
        ("rows = ['c']", "simulated does not fit, accepted fits."),
        ("rows = ['a']", ""),
    ):
        assert line(tmp_path, rows, headline, *values).miss == miss
