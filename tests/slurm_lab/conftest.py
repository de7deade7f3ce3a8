"""Fixtures of the SLURM tests, which are slow and need packages and root; `make test-slurm` runs them.

Most tests wait for SLURM's timers, so that each worker of pytest-xdist has a lab and the labs run at the same time.
Tests that compute or measure with real ranks are in the group `cores`, whose tests never run concurrently.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_lab.cluster import Lab, remove_abandoned, started


@pytest.hookimpl(tryfirst=True)  # before the conftest of tests/ assigns groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make each test of this folder a group, so that any worker can run it."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.name.split("[")[0]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip all tests of this folder without REPRO_SLURM=1. With REPRO_SLURM=1, missing packages are an error."""
    if os.environ.get("REPRO_SLURM") != "1":
        pytest.skip("run by make test-slurm")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Lab]:
    """Start four nodes with accounting for the test session of this worker."""
    remove_abandoned()
    with started("-main", N="4", NODE_TIMEOUT="10") as lab:
        yield lab


@pytest.fixture
def lab(cluster: Lab) -> Lab:
    """Return the shared lab after all its nodes are idle."""
    cluster.settle()
    return cluster
