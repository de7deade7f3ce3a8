"""Settings and fixtures of all tests: one thread a process, pools of real gloo ranks, emulated networks."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop(
    "COLUMNS", None
)  # pytest-xdist sets 80 for its workers; what a test shows is as wide as in a pipe

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from repro.emulate import lab
from repro.engines import missing_library
from repro.util import processes
from tests.pool import PRELOADED, RankPool

processes.PRELOADED = PRELOADED  # ranks and workers are forks of one process, whoever asks for it first

# How long an example takes, or is looked for, says more of the machine than of the code; the same ones every time.
hypothesis.settings.register_profile(
    "repro",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("repro")


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


@pytest.fixture(scope="session")
def emulation() -> None:
    """Emulated networks, or a skip that says what they lack here; to find out, a small one is made."""
    if missing := lab.missing_requirement():
        pytest.skip(missing)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RankPool | None:
    """The pool of the size that an indirect parameter asks for; None for one process."""
    size = request.param
    return None if size == 1 else request.getfixturevalue({2: "two", 4: "four"}[size])


POOLS = {"two", "four", "eight", "ranks"}


LONG = (
    *("ranks", "test_cuda_compile.py", "test_packaging.py", "test_largest.py", "first-hour.md", "README.md"),
    *("test_faults.py", "fake_cuda", "test_step.py", "test_derive.py", "time.md", "cores"),
)
"""Groups of many seconds, begun first: at the end no worker waits long for another."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A worker of pytest-xdist gets whole files, and one of them all that shares pools of ranks, or one report."""
    group_of = {item: _group(item) for item in items}
    for item, group in group_of.items():
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(group))
    if hasattr(config, "workerinput"):
        place = {name: at for at, name in enumerate(LONG)}
        items.sort(key=lambda item: place.get(Path(group_of[item]).name, len(LONG)))
    _need_gpu([item for item in items if item.get_closest_marker("gpu")])


def _group(item: pytest.Item) -> str:
    """The group that a test is marked with, or the pools, the report or the file that it shares."""
    if marked := item.get_closest_marker("xdist_group"):
        return str(marked.args[0])
    named = {*getattr(item, "fixturenames", ()), *_asked_for(item)}
    if POOLS.intersection(named):
        library = item.get_closest_marker("library")
        return f"ranks of {library.args[0]}" if library else "ranks"
    return "report" if "report" in named else str(item.path)


def _asked_for(item: pytest.Item) -> tuple[str, ...]:
    """Fixtures that a test's own file asks for by name as it runs: pools of the size of a layout."""
    names = getattr(getattr(item, "function", None), "__code__", None)
    return ("ranks",) if names and "request" in names.co_varnames[: names.co_argcount] else ()


def _need_gpu(items: list[pytest.Item]) -> None:
    """They say so where there is none."""
    if not items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(
                pytest.mark.skip(reason="needs a CUDA device: `make test-gpu` on a machine with one")
            )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Who asks for a library's tests has it: to leave them out where it is missing would look as if they passed."""
    if (marked := item.get_closest_marker("library")) and (lacks := missing_library(*marked.args)):
        pytest.fail(f"{lacks}; `make test-engines` installs it", pytrace=False)
