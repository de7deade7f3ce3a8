"""The mark of a test that an engine trains in: skipped where the engine lacks something, which is the reason."""

from __future__ import annotations

import pytest

from repro.engines import missing


def needs(engine: str) -> pytest.MarkDecorator:
    """Skip where this is not installed."""
    return pytest.mark.skipif(bool(missing(engine)), reason=missing(engine))
