"""Mark of tests that need the library of an engine."""

from __future__ import annotations

import pytest

from repro.engines import missing_library


def needs(engine: str) -> pytest.MarkDecorator:
    """Return the mark of a test that trains in an engine. `make test-engines` runs the tests of libraries except torch.
    Tests of torch are skipped if the user's torch (`KEEP_TORCH`) is too old; the pinned torch suffices."""
    if engine != "torch":
        return pytest.mark.library(engine)
    lacks = missing_library(engine)
    return pytest.mark.skipif(bool(lacks), reason=lacks)
