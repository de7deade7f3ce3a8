"""Tests of the budgets in `tests/structure.toml`: the tree is within them, and each kind of excess is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure import excesses, measure

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
