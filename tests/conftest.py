"""Settings and fixtures of all tests: one thread a process, and pools of real gloo ranks."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="session")
def two() -> Iterator[RankPool]:
    """Two gloo ranks that stay for the whole session."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four() -> Iterator[RankPool]:
    """Four gloo ranks that stay for the whole session."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def eight() -> Iterator[RankPool]:
    """Eight gloo ranks that stay for the whole session."""
    with RankPool(8) as pool:
        yield pool


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RankPool | None:
    """The pool of the size that an indirect parameter asks for; None for one process."""
    size = request.param
    return None if size == 1 else request.getfixturevalue({2: "two", 4: "four"}[size])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need a GPU say so where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device: `make test-gpu` on a machine with one")
            )
