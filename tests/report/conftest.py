"""One synthetic store and its report for all tests of the page."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from repro.claims import reader, run_commands
from repro.report import evidence
from repro.report import export as artifact
from repro.report.evidence import JudgedStore
from tests.report import synthetic

if TYPE_CHECKING:
    from repro.report.page.build import Report


@pytest.fixture(scope="session")
def synthetic_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.store(tmp_path_factory.mktemp("synthetic") / "results")


@pytest.fixture(scope="session")
def report(synthetic_results: Path) -> Report:
    """Return the report that `repro report` builds for the synthetic store."""
    from repro.report.page.build import build_report

    return build_report(synthetic_results, synthetic_results.parent / "out")


@pytest.fixture(scope="session")
def site_dir(report: Report) -> Path:
    """Return the folder of the synthetic store's report."""
    return report.page.parent


CACHED_LEDGER_READER = functools.cache(reader.load_ledger)
CACHED_CATALOGUE = functools.cache(run_commands.SuiteCatalogue)


@pytest.fixture(scope="module", autouse=True)
def cache_product_files() -> Iterator[None]:
    """Read and check the files of the ledger and the suites once, because no test in this folder changes them."""
    from repro.report.page import build

    with pytest.MonkeyPatch.context() as patch:
        for module in (reader, evidence, artifact):
            patch.setattr(module, "load_ledger", CACHED_LEDGER_READER)
        for module in (run_commands, artifact, build):
            patch.setattr(module, "SuiteCatalogue", CACHED_CATALOGUE)
        yield


@pytest.fixture(scope="session")
def store(synthetic_results: Path) -> JudgedStore:
    """Return the synthetic store and its judged ledger."""
    return evidence.read_store(synthetic_results)


@pytest.fixture
def judged_once(store: JudgedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the synthetic store to commands, which otherwise read and judge their store at each call."""
    monkeypatch.setattr(evidence, "read_store", lambda *of: store)


@pytest.fixture(scope="module")
def report_style() -> Iterator[None]:
    """Draw the figures of a module in the style of the report."""
    from repro.report.figures.style import figure_style

    with figure_style():
        yield
