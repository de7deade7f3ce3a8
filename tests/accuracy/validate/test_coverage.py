"""Tests of `repro validate --covered`: the exit code states whether the coverage is in a range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from repro import cli
from repro.accuracy.validate.published import ALL_RATES, RATIOS, FamilyStatistics
from repro.report.text import validate as view

MIN_PERCENT, MAX_PERCENT = 80.0, 97.0


def family(name: str, held: int, wider: int = 100) -> FamilyStatistics:
    worst: Any = None
    counts = {"points": wider, "close": 0, "held": 0, "wider": wider, "held_wider": held}
    return FamilyStatistics(name=name, median=0.1, worst=worst, **counts)


@pytest.mark.parametrize(
    ("rates", "ratios", "code"), [(80, 97, 0), (92, 79, 1), (98, 90, 1), (79, 98, 1), (100, 100, 1)]
)
def test_rates_and_ratios_must_both_be_in_the_range(
    rates: int,
    ratios: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [family("V100", 0), family(ALL_RATES, rates), family(RATIOS, ratios)]
    monkeypatch.setattr(view.published, "family_statistics", lambda points: found)
    assert view.print_coverage(tmp_path, (MIN_PERCENT, MAX_PERCENT)) == code
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith(
        f"{rates} of 100 rates and {ratios} of 100 ratios lie in their wider 90 % intervals"
    )
    assert ("not both between 80 and 97 %" in output) == bool(code)


def test_store_without_predictions_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "--results", str(tmp_path), "--covered", "80", "97"]) == 1
    assert "This store has too few predictions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(
            (words, "two percentages between 0 and 100, the smaller one first")
            for words in (["97", "80"], ["-1", "50"], ["80", "101"])
        ),
        (["80", "97", "--unknowns"], "excludes --svg"),
    ],
)
def test_invalid_range_or_another_option_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", "--results", str(tmp_path), "--covered", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
