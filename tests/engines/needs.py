"""The mark of a test that an engine trains in: skipped where the engine lacks something, which is the reason."""

from __future__ import annotations

import pytest

from repro.engines import missing


def needs(engine: str) -> pytest.MarkDecorator:
    """Skip where this is not installed; a library beside torch has a run of its own, `make test-engines`."""
    if engine == "torch":
        return pytest.mark.skipif(bool(missing(engine)), reason=missing(engine))
    return pytest.mark.library(engine)
