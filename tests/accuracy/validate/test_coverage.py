"""`repro validate --covered`: so many published values lie in their intervals, or the exit code says they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from repro import cli
from repro.accuracy.validate.published import ALL_RATES, RATIOS, FamilyStatistics
from repro.report.text import validate as view

LEAST, MOST = 80.0, 97.0


def family(name: str, held: int, wider: int = 100) -> FamilyStatistics:
    worst: Any = None
    return FamilyStatistics(
        name=name, points=wider, median=0.1, worst=worst, close=0, held=0, wider=wider, held_wider=held
    )


@pytest.mark.parametrize(
    ("rates", "ratios", "code"), [(80, 97, 0), (92, 79, 1), (98, 90, 1), (79, 98, 1), (100, 100, 1)]
)
def test_both_have_to_be_between(
    rates: int,
    ratios: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [family("V100", 0), family(ALL_RATES, rates), family(RATIOS, ratios)]
    monkeypatch.setattr(view.published, "family_statistics", lambda points: found)
    assert view.print_coverage(tmp_path, (LEAST, MOST)) == code
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith(
        f"{rates} of 100 rates and {ratios} of 100 ratios lie in their wider 90 % intervals"
    )
    assert ("not both between 80 and 97 %" in told) == bool(code)


def test_a_store_without_predictions_covers_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", "--results", str(tmp_path), "--covered", "80", "97"]) == 1
    assert "This store has too few predictions" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("97", "80"), ("-1", "50"), ("80", "101")])
def test_what_is_no_range_of_percentages_is_refused(
    words: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", "--results", str(tmp_path), "--covered", *words]) == 2
    assert "two percentages between 0 and 100, the smaller one first" in " ".join(
        capsys.readouterr().err.split()
    )


def test_it_goes_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "--results", str(tmp_path), "--covered", "80", "97", "--unknowns"]) == 2
    assert "excludes --svg" in " ".join(capsys.readouterr().err.split())
