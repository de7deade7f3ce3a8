"""Print the size of every package and check the sizes against the budgets in `structure.toml`.

A package that grows beyond its budget fails the check. The limits of `[limits]` go down only.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from repro.config.files import read_toml

ROOT = Path(__file__).parents[1]
BUDGETS = Path(__file__).with_suffix(".toml")
SMALL_LINES = 60
"""Length below which a file counts as a fragment of a chapter, in lines."""
MEDIAN_ABOVE_LINES = 20
"""Length from which a file counts for the median, in lines: shorter files only describe a package."""
PRIVATE_NAMES = frozenset({"about", "at", "command", "draw", "now", "of", "said"})
"""Function names that mean nothing without their module; no function of the product may have one."""
PRIVATE_CONSTANTS = frozenset({"CLOSE", "HERE", "LOOK_S", "MOST", "SHOWN", "SOME", "WHOLE", "WORTH"})
"""Names of constants that do not name the limited quantity; no constant of the product may have one."""


class PackageSize(NamedTuple):
    files: int
    lines: int


def sources(root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """Yield the package and the path of every Python file of the product; files of `repro/` itself are `repro`."""
    for path in sorted((root / "repro").rglob("*.py")):
        parts = path.relative_to(root / "repro").parts
        yield parts[0] if len(parts) > 1 else "repro", path
    for path in sorted((root / "kernels").rglob("*.py")):
        yield "kernels", path


def package_sizes(root: Path = ROOT) -> dict[str, PackageSize]:
    """Return the size of every package."""
    found: dict[str, PackageSize] = {}
    for package, path in sources(root):
        size = found.get(package, PackageSize(0, 0))
        found[package] = PackageSize(size.files + 1, size.lines + line_count(path))
    return found


def line_count(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def measure(root: Path = ROOT) -> dict[str, int]:
    """Return the numbers that `[limits]` and `[goals]` bound, by name."""
    lengths = [line_count(path) for _, path in sources(root)]
    functions: Counter[str] = Counter()
    constants: Counter[str] = Counter()
    public: Counter[str] = Counter()
    interfaces = read_toml(BUDGETS)["interfaces"]
    for _, path in sources(root):
        is_command = path.is_relative_to(root / interfaces["commands"])
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions.update(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                if not is_command and node.name not in interfaces["names"]:
                    public[node.name] += 1
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [name for target in targets for name in ast.walk(target)]
                constants.update(name.id for name in names if isinstance(name, ast.Name))
    return {
        "packages": len(package_sizes(root).keys() - {"repro", "kernels"}),
        "files": len(lengths),
        "small_files": sum(length < SMALL_LINES for length in lengths),
        "median_lines": round(statistics.median([n for n in lengths if n > MEDIAN_ABOVE_LINES] or [0])),
        "lines": sum(lengths),
        "private_functions": sum(functions[name] for name in PRIVATE_NAMES),
        "private_constants": sum(constants[name] for name in PRIVATE_CONSTANTS),
        "repeated_public_names": sum(count > 1 for count in public.values()),
    }


def excesses(root: Path = ROOT, budgets: Path = BUDGETS) -> list[str]:
    """Return one line for each budget and limit that is exceeded, and for each package without a budget."""
    document = read_toml(budgets)
    found = []
    for package, size in package_sizes(root).items():
        budget = document["packages"].get(package)
        if budget is None:
            found.append(f"{budgets.name}: packages.{package}: missing; add files and lines")
            continue
        for key, value in size._asdict().items():
            if value > budget[key]:
                found.append(
                    f"{budgets.name}: packages.{package}.{key} = {budget[key]}: the package has {value}; "
                    "shorten it or raise the budget"
                )
    numbers = measure(root)
    for key, limit in document["limits"].items():
        if numbers[key] > limit:
            found.append(f"{budgets.name}: limits.{key} = {limit}: the tree has {numbers[key]}")
    return found


def main() -> int:
    """Print the package sizes, and the tree's numbers with limits and goals; return 1 if a limit is exceeded."""
    document = read_toml(BUDGETS)
    print(f"{'package':<12}{'files':>8}{'budget':>8}{'lines':>10}{'budget':>8}")
    for package, size in package_sizes().items():
        budget = document["packages"].get(package, {"files": 0, "lines": 0})
        print(f"{package:<12}{size.files:>8}{budget['files']:>8}{size.lines:>10}{budget['lines']:>8}")
    print(f"\n{'number':<24}{'now':>8}{'limit':>8}{'goal':>8}")
    for key, value in measure().items():
        limit, goal = document["limits"].get(key, ""), document["goals"].get(key, "")
        print(f"{key:<24}{value:>8}{limit:>8}{goal:>8}")
    found = excesses()
    for line in found:
        print(f"error: {line}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
