"""Which tests can notice a fault in a file: those that import it, the ones that are nearest to it first."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def module(path: Path) -> str:
    """The dotted name of a file of the product or of the tests, given relative to the repository."""
    parts = path.with_suffix("").parts
    return ".".join(("repro", *parts) if parts[0] == "kernels" else parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    """Every file of the product and of the tests by its dotted name, relative to the repository."""
    found = [path for folder in ("repro", "kernels", "tests") for path in (ROOT / folder).rglob("*.py")]
    return {module(path.relative_to(ROOT)): path.relative_to(ROOT) for path in found}


@cache
def imports(name: str) -> frozenset[str]:
    """Modules that the module `name` imports, wherever it does so."""
    return frozenset(_imports(name))


def _imports(name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / modules()[name]).read_text(encoding="utf-8"))):
        named = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        for part in named:
            while part and part not in modules():
                part = part.rpartition(".")[0]
            if part:
                yield part


def relevant(path: Path, tests: Sequence[str]) -> list[str]:
    """Those of `tests` (files and folders) that lead to `path` by imports, by how many these are.

    What is run in processes of its own, and imported by none, is answered for by all of `tests`.  Those that share a
    `conftest.py` stay together: when pytest comes to a folder again, it does not find its fixtures any more.
    """
    files = sorted(file.relative_to(ROOT) for test in tests for file in _files(ROOT / test))
    found = {file: steps for file in files if (steps := _distance(module(file), module(path))) is not None}
    together: dict[Path, list[str]] = {}
    for file in sorted(found, key=found.__getitem__) or files:
        shared = (ROOT / file).with_name("conftest.py").exists()
        together.setdefault(file.parent if shared else file, []).append(str(file))
    return [file for files in together.values() for file in files]


def _files(test: Path) -> Iterator[Path]:
    return test.rglob("test_*.py") if test.is_dir() else iter([test])


def _distance(start: str, end: str) -> int | None:
    """Imports from one module to another, or None."""
    seen, ahead = {start}, deque([(start, 0)])
    while ahead:
        name, steps = ahead.popleft()
        if name == end:
            return steps
        new = imports(name) - seen
        seen |= new
        ahead.extend((imported, steps + 1) for imported in new)
    return None
