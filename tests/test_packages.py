"""Tests of the packages of `repro`: order, import cycles, docstrings, the table in CONTRIBUTING.md, and budgets."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

from tests.mutants.relevant import imports, modules
from tests.structure import ROOT, excesses, measure

PACKAGES = (
    *("util", "config", "kernels", "emulate", "parallel", "model", "measure", "wrap", "engines", "results"),
    *("simulate", "launch", "claims", "accuracy", "quality", "report", "cli"),
)
"""All packages in dependency order. A package imports only preceding packages, also inside functions."""
MAX_SENTENCES = 3
SENTENCE_END = re.compile(r"(?<!\bsec)[.?!](?:\s|$)")


PRODUCT = {name: ROOT / path for name, path in sorted(modules().items()) if path.parts[0] != "tests"}


def package(module: str) -> str:
    """Return the package directly under `repro` that contains `module`; `repro` for the top level itself."""
    return module.split(".")[1] if "." in module.removesuffix(".__main__") else "repro"


def test_the_dependency_order_has_every_package_once() -> None:
    assert sorted({package(module) for module in PRODUCT} - {"repro"}) == sorted(PACKAGES)


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_import_only_preceding_packages(name: str) -> None:
    allowed = {"repro", *PACKAGES[: PACKAGES.index(name) + 1]}
    violations = {
        f"{module} -> {imported}"
        for module in PRODUCT
        if package(module) == name
        for imported in imports(module)
        if package(imported) not in allowed
    }
    assert not violations


def test_imports_of_modules_have_no_cycle() -> None:
    """Imports under TYPE_CHECKING count too. The error lists the modules of a cycle."""
    graph = {module: sorted(imports(module) - {module}) for module in PRODUCT}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", [name for name, path in PRODUCT.items() if path.name == "__init__.py"])
def test_package_docstrings_have_one_to_three_sentences(name: str) -> None:
    text = ast.get_docstring(ast.parse(PRODUCT[name].read_text(encoding="utf-8"))) or ""
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    assert 1 <= len(SENTENCE_END.findall(prose)) <= MAX_SENTENCES, prose


def test_contributing_lists_the_packages_in_dependency_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("\n| package | content |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(?:repro/)?(\w+)`", table, re.MULTILINE)) == PACKAGES


BUDGET = """
[limits]
packages = 1
repeated_public_names = 0
private_functions = 0
[packages]
repro = { files = 1, lines = 0 }
claims = { files = 1, lines = 4 }
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create a product with one package of one file with four lines, and its budget."""
    for folder in ("repro/claims", "kernels"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "repro/__init__.py").touch()
    (tmp_path / "repro/claims/judge.py").write_text("def judge():\n    pass\n\n\n")
    (tmp_path / "budget.toml").write_text(BUDGET)
    return tmp_path


def test_trees_within_their_budgets_have_no_excess(tree: Path) -> None:
    assert excesses() == []
    assert excesses(tree, tree / "budget.toml") == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("claims/judge.py", "\n" * 5, "packages.claims.lines = 4: the package has 5"),
        ("claims/other.py", "", "packages.claims.files = 1: the package has 2"),
        ("model/gpt.py", "", "packages.model: missing"),
        ("claims/judge.py", "def of():\n    pass\n", "limits.private_functions = 0: the tree has 1"),
        ("__init__.py", "class judge: pass\n", "limits.repeated_public_names = 0: the tree has 1"),
        ("model/gpt.py", "", "limits.packages = 1: the tree has 2"),
    ],
)
def test_an_excess_is_reported(tree: Path, file: str, text: str, expected: str) -> None:
    path = tree / "repro" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert any(expected in line for line in excesses(tree, tree / "budget.toml"))


def test_commands_and_interfaces_may_repeat_a_name(tree: Path) -> None:
    (tree / "repro/cli/commands").mkdir(parents=True)
    (tree / "repro/cli/commands/judge.py").write_text("def judge():\n    pass\n")
    (tree / "repro/claims/other.py").write_text("def main():\n    pass\n")
    (tree / "repro/__init__.py").write_text("def main():\n    pass\n")
    assert measure(tree)["repeated_public_names"] == 0


def test_small_files_and_private_constants_are_counted(tree: Path) -> None:
    (tree / "repro/claims/judge.py").write_text("MOST = 3\nHERE: str = ''\nMAX_ROWS = 4\n" + "\n" * 60)
    numbers = measure(tree)
    assert (numbers["private_constants"], numbers["small_files"], numbers["median_lines"]) == (2, 1, 63)
