"""Tests of the packages of `repro`: dependency order, import cycles, docstrings, and the table in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "util",
    "config",
    "kernels",
    "emulate",
    "parallel",
    "model",
    "measure",
    "wrap",
    "engines",
    "results",
    "simulate",
    "launch",
    "claims",
    "accuracy",
    "quality",
    "report",
    "cli",
)
"""All packages in dependency order. A package imports only preceding packages, also inside functions."""
MAX_PACKAGES = 16
"""Maximum number of packages in `repro/`; `kernels/` is not counted."""
MAX_SENTENCES = 3
SENTENCE_END = re.compile(r"(?<!\bsec)[.?!](?:\s|$)")


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module of the product, by dotted name."""
    found = {}
    for folder, name in ((ROOT / "repro", "repro"), (ROOT / "kernels", "repro.kernels")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((name, *parts)).removesuffix(".__init__")] = path
    return found


def imports(module: str) -> Iterator[str]:
    """Yield the modules of the product that `module` imports, at its top or inside functions."""
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


def package(module: str) -> str:
    """Return the package directly under `repro` that contains `module`; `repro` for the top level itself."""
    return module.split(".")[1] if "." in module.removesuffix(".__main__") else "repro"


def test_the_dependency_order_has_every_package_once() -> None:
    assert sorted({package(module) for module in modules()} - {"repro"}) == sorted(PACKAGES)
    assert len(PACKAGES) - 1 <= MAX_PACKAGES


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_import_only_preceding_packages(name: str) -> None:
    allowed = {"repro", *PACKAGES[: PACKAGES.index(name) + 1]}
    violations = {
        f"{module} -> {imported}"
        for module in modules()
        if package(module) == name
        for imported in imports(module)
        if package(imported) not in allowed
    }
    assert not violations


def test_imports_of_modules_have_no_cycle() -> None:
    """Imports under TYPE_CHECKING count too. The error lists the modules of a cycle."""
    graph = {module: sorted(set(imports(module)) - {module}) for module in modules()}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", [name for name, path in modules().items() if path.name == "__init__.py"])
def test_package_docstrings_have_one_to_three_sentences(name: str) -> None:
    text = ast.get_docstring(ast.parse(modules()[name].read_text(encoding="utf-8"))) or ""
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    assert 1 <= len(SENTENCE_END.findall(prose)) <= MAX_SENTENCES, prose


def test_contributing_lists_the_packages_in_dependency_order() -> None:
    """The table in CONTRIBUTING.md has one row for each package."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("\n| package | content |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(?:repro/)?(\w+)`", table, re.MULTILINE)) == PACKAGES
