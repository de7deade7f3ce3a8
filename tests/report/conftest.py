"""One synthetic store and its report for all tests of the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def synthetic_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import synthetic

    return synthetic.store(tmp_path_factory.mktemp("synthetic") / "results")


@pytest.fixture(scope="session")
def built(synthetic_results: Path) -> Path:
    """The folder of the report on the synthetic store."""
    from repro.report.build import build

    out = synthetic_results.parent / "out"
    build(synthetic_results, out)
    return out
