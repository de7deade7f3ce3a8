from __future__ import annotations

import pytest

from repro.lab import ability


@pytest.fixture(scope="session")
def emulation() -> None:
    """Emulated networks, or a skip that says what they lack here; to find out, a small one is made."""
    if missing := ability.missing():
        pytest.skip(missing)
