"""Which package may import which, no two files that import each other, and what each package says of itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEVELS = (
    ("config", "host"),
    ("render", "kernels", "lab"),
    ("data", "parallel"),
    ("models", "measure"),
    ("train",),
    ("engines", "wrap"),
    ("checkpoint", "systems"),
    ("suites", "results", "weights"),
    ("simulate",),
    ("claims", "doctor"),
    ("launch", "twin"),
    ("calibrate", "evaluate", "validate"),
    ("report",),
    ("cli",),
)
"""Low to high.  A file imports from its own package and from lower levels, lazily imported or not."""
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}


@cache
def modules() -> dict[str, Path]:
    """Every module of the product by its dotted name."""
    found = {}
    for folder, name in ((ROOT / "repro", "repro"), (ROOT / "kernels", "repro.kernels")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if folder.name == "repro" and parts[0] == "kernels":
                continue
            found[".".join((name, *parts)).removesuffix(".__init__")] = path
    return found


def imports(module: str) -> Iterator[str]:
    """Modules of the product that `module` names in an import, wherever it stands."""
    known = modules()
    for node in ast.walk(ast.parse(known[module].read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name.startswith("repro."):
                if name in known:
                    yield name
                    break
                name = name.rpartition(".")[0]


def room(module: str) -> str:
    """The package directly under `repro` that holds a module."""
    return module.split(".")[1] if "." in module else "repro"


def test_every_package_has_a_level() -> None:
    assert {room(module) for module in modules()} - {"repro"} == set(LEVEL)


@pytest.mark.parametrize("name", LEVEL)
def test_imports_run_downwards(name: str) -> None:
    upwards = {
        f"{module} -> {imported}"
        for module in modules()
        if room(module) == name
        for imported in imports(module)
        if room(imported) not in (name, "repro") and LEVEL[room(imported)] >= LEVEL[name]
    }
    assert not upwards


def test_no_two_files_import_each_other() -> None:
    """Nor along a longer way round.  What only type checkers read counts too."""
    graph = {module: sorted(set(imports(module)) - {module}) for module in modules()}
    state: dict[str, int] = {}
    way: list[str] = []

    def visit(module: str) -> None:
        state[module] = 1
        way.append(module)
        for imported in graph[module]:
            if state.get(imported) == 1:
                circle = [*way[way.index(imported) :], imported]
                pytest.fail(" -> ".join(circle))
            if imported not in state:
                visit(imported)
        way.pop()
        state[module] = 2

    for module in graph:
        if module not in state:
            visit(module)


def test_every_package_says_what_is_in_it_and_who_may_import_it() -> None:
    silent = []
    for module, path in modules().items():
        if path.name == "__init__.py" and module != "repro":
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            if "import" not in text:
                silent.append(module)
    assert not silent


def test_levels_name_no_package_twice() -> None:
    names = sorted(name for rooms in LEVELS for name in rooms)
    assert all(a != b for a, b in pairwise(names))
