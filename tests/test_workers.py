"""The workers of pytest-xdist: tests that share what is dear to make stay together."""

from __future__ import annotations

import os

import pytest


def test_xdist_sees_the_group_of_a_test(pytestconfig: pytest.Config) -> None:
    """It writes the group behind a test's name; where pytest takes no such name, tests are dealt out singly."""
    together = bool(getattr(pytestconfig.option, "loadgroup", False))
    name = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
    assert name.endswith(f"@{__file__}") == together, "which pytest 9.2 does with pytest-xdist 3.8"
