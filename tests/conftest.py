"""Settings and fixtures of all tests: one thread per process, pools of gloo ranks, emulated networks."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# pytest-xdist sets 80 columns for its workers. Tests need the width of a pipe.
os.environ.pop("COLUMNS", None)

from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from repro.emulate import lab
from repro.engines import missing_library
from repro.util import processes
from tests.pool import PRELOADED, RankPool

processes.PRELOADED = PRELOADED  # All ranks and workers are forks of one server process.

# The time of an example depends on the machine, so it has no limit. All runs use the same examples.
hypothesis.settings.register_profile(
    "repro",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("repro")


def _session_pool(size: int) -> Callable[[], Iterator[RankPool]]:
    @pytest.fixture(scope="session")
    def pool() -> Iterator[RankPool]:
        with RankPool(size) as pool:
            yield pool

    return pool


two, four, eight = map(_session_pool, (2, 4, 8))
"""Fixtures of gloo ranks that live until the session ends."""


@pytest.fixture(scope="session")
def emulation() -> None:
    """Skip the test if this machine cannot create emulated networks, with the missing requirement as the reason."""
    if missing := lab.missing_requirement():
        pytest.skip(missing)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RankPool | None:
    """Return the pool with the number of ranks that the indirect parameter gives; None for one process."""
    size = request.param
    return None if size == 1 else request.getfixturevalue({2: "two", 4: "four"}[size])


POOLS = {"two", "four", "eight", "ranks"}


LONG = (
    *("ranks", "test_cuda_compile.py", "test_packaging.py", "test_largest.py", "first-hour.md", "README.md"),
    *("test_faults.py", "fake_cuda", "test_step.py", "test_derive.py", "time.md", "cores"),
)
"""Groups that take many seconds. They start first, so that no worker waits long at the end."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Group tests by file for pytest-xdist. Tests with pools of ranks form one group, and tests of a report another."""
    group_of = {item: _group(item) for item in items}
    for item, group in group_of.items():
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))
    if hasattr(config, "workerinput"):
        order = {name: index for index, name in enumerate(LONG)}
        items.sort(key=lambda item: order.get(Path(group_of[item]).name, len(LONG)))
    _need_gpu([item for item in items if item.get_closest_marker("gpu")])


def _group(item: pytest.Item) -> str:
    """Return the group of a test from its mark, its pool of ranks, the report fixture, or its file."""
    if marked := item.get_closest_marker("xdist_group"):
        return str(marked.args[0])
    fixtures = {*getattr(item, "fixturenames", ()), *_requested_fixtures(item)}
    if POOLS.intersection(fixtures):
        library = item.get_closest_marker("library")
        return f"ranks of {library.args[0]}" if library else "ranks"
    return "report" if "report" in fixtures else str(item.path)


def _requested_fixtures(item: pytest.Item) -> tuple[str, ...]:
    """Return the fixture `ranks` if a test selects its pool of ranks by `request` at run time."""
    names = getattr(getattr(item, "function", None), "__code__", None)
    return ("ranks",) if names and "request" in names.co_varnames[: names.co_argcount] else ()


def _need_gpu(items: list[pytest.Item]) -> None:
    """Skip these tests if the machine has no CUDA device."""
    if not items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device: `make test-gpu` on a machine with one")
            )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail a test of a missing library, because a skipped test would look as if it had passed."""
    if (marked := item.get_closest_marker("library")) and (lacks := missing_library(*marked.args)):
        pytest.fail(f"{lacks}; `make test-engines` installs it", pytrace=False)
