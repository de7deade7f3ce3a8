"""One synthetic store and its report for all tests of the page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from repro.report.build import Report

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def synthetic_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import synthetic

    return synthetic.store(tmp_path_factory.mktemp("synthetic") / "results")


@pytest.fixture(scope="session")
def report(synthetic_results: Path) -> Report:
    """What `repro report` made of the synthetic store."""
    from repro.report.build import build

    return build(synthetic_results, synthetic_results.parent / "out")


@pytest.fixture(scope="session")
def built(report: Report) -> Path:
    """The folder of that report."""
    return report.page.parent


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports draw nothing, which is most of their work: for what a page says beside its figures."""
    monkeypatch.setattr("repro.report.figures.draw_all", lambda *of: [])
