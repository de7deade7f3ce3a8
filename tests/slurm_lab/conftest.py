"""The lab that SLURM's tests share. They are slow and need packages and root, so that `make test-slurm` runs them.

Most of them wait for SLURM's timers, so that several labs work side by side, one of each worker of pytest-xdist.
Tests that compute or measure with real ranks are one group, `cores`, and never run beside each other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm_lab.cluster import Lab, remove_abandoned, started


@pytest.hookimpl(tryfirst=True)  # before all tests get their groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test of this folder to any worker."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.name.split("[")[0]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip all of this folder unless it is asked for; then what is missing is an error, which `slurm/lab` words."""
    if os.environ.get("REPRO_SLURM") != "1":
        pytest.skip("run by make test-slurm")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Lab]:
    """Four nodes with accounting, for the whole session of this worker."""
    remove_abandoned()
    with started("-main", N="4", NODE_TIMEOUT="10") as lab:
        yield lab


@pytest.fixture
def lab(cluster: Lab) -> Lab:
    """The shared lab, idle."""
    cluster.settle()
    return cluster
