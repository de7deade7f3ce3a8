"""The mark of a test that an engine trains in."""

from __future__ import annotations

import pytest

from repro.engines import missing_library


def needs(engine: str) -> pytest.MarkDecorator:
    """A library beside torch has a run of its own, `make test-engines`.  That of torch is left out with a torch of a
    user's own (`KEEP_TORCH`) that is too old for it, never with the pinned one (`test_needs.py`)."""
    if engine != "torch":
        return pytest.mark.library(engine)
    lacks = missing_library(engine)
    return pytest.mark.skipif(bool(lacks), reason=lacks)
