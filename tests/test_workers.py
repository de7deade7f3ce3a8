"""Test of the groups of pytest-xdist, which keep tests with expensive common fixtures on one worker."""

from __future__ import annotations

import os

import pytest


def test_xdist_appends_the_group_to_a_test_name(pytestconfig: pytest.Config) -> None:
    """Without the group in the test's name, pytest-xdist distributes tests individually."""
    has_groups = bool(getattr(pytestconfig.option, "loadgroup", False))
    name = os.environ["PYTEST_CURRENT_TEST"].removesuffix(" (call)")
    assert name.endswith(f"@{__file__}") == has_groups, "pytest 9.2 with pytest-xdist 3.8 appends the group"
