"""One synthetic store and its report for all tests of the page."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from repro.claims import reader, run_commands
from repro.report import evidence
from repro.report import export as artifact
from repro.report.evidence import JudgedStore

if TYPE_CHECKING:
    from repro.report.page.build import Report

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def synthetic_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import synthetic

    return synthetic.store(tmp_path_factory.mktemp("synthetic") / "results")


@pytest.fixture(scope="session")
def report(synthetic_results: Path) -> Report:
    """What `repro report` made of the synthetic store."""
    from repro.report.page.build import build_report

    return build_report(synthetic_results, synthetic_results.parent / "out")


@pytest.fixture(scope="session")
def built(report: Report) -> Path:
    """The folder of that report."""
    return report.page.parent


READ_ONCE = functools.cache(reader.load_ledger)
ONE_CATALOGUE = functools.cache(run_commands.SuiteCatalogue)


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """The ledger's and the suites' files, which no test here changes, are read and checked once."""
    from repro.report.page import build

    with pytest.MonkeyPatch.context() as patch:
        for module in (reader, evidence, artifact):
            patch.setattr(module, "load_ledger", READ_ONCE)
        for module in (run_commands, artifact, build):
            patch.setattr(module, "SuiteCatalogue", ONE_CATALOGUE)
        yield


@pytest.fixture(scope="session")
def found(synthetic_results: Path) -> JudgedStore:
    """The synthetic store and its judged ledger."""
    return evidence.read_store(synthetic_results)


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports draw nothing, which is most of their work: for what a page says beside its figures."""
    monkeypatch.setattr("repro.report.figures.draw_all", lambda *of: [])
