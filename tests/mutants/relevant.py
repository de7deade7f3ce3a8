"""Files of a package that changed, and tests that can detect a fault in a file: those with the fewest imports first."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def module(path: Path) -> str:
    """Return the dotted module name of a file whose path is relative to the repository."""
    parts = path.with_suffix("").parts
    return ".".join(("repro", *parts) if parts[0] == "kernels" else parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    """Return the path, relative to the repository, of each module of the product and of the tests."""
    found = [path for folder in ("repro", "kernels", "tests") for path in (ROOT / folder).rglob("*.py")]
    return {module(path.relative_to(ROOT)): path.relative_to(ROOT) for path in found}


@cache
def imports(name: str) -> frozenset[str]:
    """Return the modules that the module `name` imports, also inside functions."""
    return frozenset(_imports(name))


def _imports(name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / modules()[name]).read_text(encoding="utf-8"))):
        named = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        for part in named:
            while part and part not in modules():
                part = part.rpartition(".")[0]
            if part:
                yield part


def relevant(path: Path, tests: Sequence[str]) -> list[str]:
    """Return the files of `tests` (files and folders) that import `path`, sorted by the length of the import chain.

    If no test imports `path`, for example the program of a subprocess, return all of `tests`. Files that share a
    `conftest.py` are adjacent, because pytest loses the fixtures of a folder when it returns to the folder.
    """
    files = sorted(file.relative_to(ROOT) for test in tests for file in _files(ROOT / test))
    found = {file: length for file in files if (length := _distance(module(file), module(path))) is not None}
    groups: dict[Path, list[str]] = {}
    for file in sorted(found, key=found.__getitem__) or files:
        shared = (ROOT / file).with_name("conftest.py").exists()
        groups.setdefault(file.parent if shared else file, []).append(str(file))
    return [file for files in groups.values() for file in files]


def _files(test: Path) -> Iterator[Path]:
    return test.rglob("test_*.py") if test.is_dir() else iter([test])


def _distance(start: str, end: str) -> int | None:
    """Return the length of the shortest import chain between two modules, or None without a chain."""
    visited, queue = {start}, deque([(start, 0)])
    while queue:
        name, length = queue.popleft()
        if name == end:
            return length
        new = imports(name) - visited
        visited |= new
        queue.extend((imported, length + 1) for imported in new)
    return None


def sources(root: Path, patterns: Iterable[str], base: str | None) -> list[Path]:
    """Return files of the repository `root`, relative to `root`; with `base`, only files changed since this commit."""
    found = {path.relative_to(root) for pattern in patterns for path in root.glob(pattern)}
    if base:
        with new_files_in_the_index(root):
            changed = _git(root, "diff", "--name-only", base)
        found &= set(map(Path, changed.splitlines()))
    return sorted(found)


@contextmanager
def new_files_in_the_index(root: Path) -> Iterator[None]:
    """Let `git diff` in this process show untracked files, with a copy of the index; the user's index is unchanged."""
    index = root / _git(root, "rev-parse", "--git-path", "index").strip()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy2(index, folder)
        os.environ["GIT_INDEX_FILE"] = f"{folder}/{index.name}"
        try:
            _git(root, "add", "--intent-to-add", ".")
            yield
        finally:
            del os.environ["GIT_INDEX_FILE"]


def _git(root: Path, *words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=root, text=True)
