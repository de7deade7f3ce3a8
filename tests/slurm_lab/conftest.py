"""The lab that SLURM's tests share. They are slow and need packages and root, so that `make test-slurm` runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm_lab.cluster import Lab, remove_abandoned, started


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip all of this folder unless it is asked for; then what is missing is an error, which `slurm/lab` words."""
    if os.environ.get("REPRO_SLURM") != "1":
        pytest.skip("run by make test-slurm")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Lab]:
    """Four nodes with accounting, for the whole session."""
    remove_abandoned()
    with started("-main", N="4", NODE_TIMEOUT="10") as lab:
        yield lab


@pytest.fixture
def lab(cluster: Lab) -> Lab:
    """The shared lab, idle."""
    cluster.settle()
    return cluster
