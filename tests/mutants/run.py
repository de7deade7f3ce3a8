"""`make mutants`: cosmic-ray's faults in changed lines or in a package, and the faults that the tests do not detect.

Each package has a cosmic-ray session in `build/mutants`. The next run continues an interrupted session and repeats the
undetected faults. Every worker changes a copy of the working tree, so that no fault appears in the user's files.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from compileall import compile_dir
from concurrent.futures import ProcessPoolExecutor, as_completed
from hashlib import sha256
from itertools import islice
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.tools.filters.git import GitFilter
from cosmic_ray.tools.filters.operators_filter import OperatorsFilter
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult

from repro.config.files import read_toml
from repro.util.processes import die_with_parent
from tests.mutants.changed import new_files_in_the_index, sources
from tests.mutants.relevant import ROOT, relevant

SETTINGS = read_toml(Path(__file__).with_name("packages.toml"))
PACKAGES = SETTINGS["package"]
BUILD = ROOT / "build/mutants"
PYTEST = """
import os, sys, pytest
from repro.util.processes import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
sys.exit(pytest.main())
"""
"""What tries a fault has a session of its own, which neither Ctrl-C nor a batch system's limit would reach."""
PATIENCE = 4
"""Time limit of a mutant's tests, as a multiple of the time of all tests of the package without a fault."""


def session(package: str, base: str | None, sample: int | None, seed: int) -> Path:
    """Return the session of a package's current sources; create it if there is none."""
    files = sources(ROOT, PACKAGES[package]["files"], base)
    key = sha256(repr((files, base, sample, sample and seed, SETTINGS["exclude"])).encode())
    for path in files:
        key.update((ROOT / path).read_bytes())
    made = BUILD / f"{package}-{key.hexdigest()[:12]}.sqlite"
    if not made.exists():
        partial = made.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        with use_db(partial) as work:
            init(files, work, {})
            OperatorsFilter()._skip_filtered(work, SETTINGS["exclude"])
            if base:
                with new_files_in_the_index(ROOT):
                    GitFilter()._skip_filtered(work, base)
            _skip_all_but(work, sample, seed)
        partial.rename(made)
    return made


def _skip_all_but(work: WorkDB, sample: int | None, seed: int) -> None:
    waiting = sorted(work.pending_work_items, key=place)
    if sample:
        random.Random(seed).shuffle(waiting)
    kept = {item.job_id for item in islice(filter(_another_program, waiting), sample)}
    skipped = WorkResult(
        worker_outcome=WorkerOutcome.SKIPPED, output="no program, the same, or not in the sample"
    )
    work.set_multiple_results([item.job_id for item in waiting if item.job_id not in kept], skipped)


def _another_program(item: WorkItem) -> bool:
    """Not so the lone `*` of a signature, which is taken for a product, or 1e18 with one added."""
    (mutation,) = item.mutations
    before = mutation.module_path.read_text(encoding="utf-8")
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    after = mutate_code(before, operator, mutation.occurrence)
    try:
        return after is not None and ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    except SyntaxError:
        return False


def place(item: WorkItem) -> tuple[str, int, str, int]:
    """File, line, kind of fault, and which of its kind in the file."""
    (mutation,) = item.mutations
    return str(mutation.module_path), mutation.start_pos[0], mutation.operator_name, mutation.occurrence


def tried(work: WorkDB) -> list[tuple[WorkItem, WorkResult]]:
    """Mutants that tests were run on, in the order of the files."""
    found = [(item, result) for item, result in work.completed_work_items if result.test_outcome]
    return sorted(found, key=lambda row: place(row[0]))


def run(package: str, work: WorkDB, workers: int) -> None:
    """Try what was not tried yet, then again what survived, and store what comes of it as it comes."""
    items = sorted(work.pending_work_items, key=place)
    items += [item for item, result in tried(work) if verdict(item, result) == "survived"]
    if not items:
        return
    tests = {place(item)[0]: relevant(Path(place(item)[0]), PACKAGES[package]["tests"]) for item in items}
    context = get_context("spawn")
    trees: SimpleQueue[str] = context.SimpleQueue()
    for number in range(workers):
        trees.put(_copy(BUILD / f"tree-{number}"))
    limit_s = PATIENCE * _without_fault(package, {test for found in tests.values() for test in found})
    with ProcessPoolExecutor(workers, context, _enter, (trees, os.getpid())) as pool:
        waiting = [pool.submit(_try, item, tests[place(item)[0]], limit_s) for item in items]
        for number, done in enumerate(as_completed(waiting), 1):
            work.set_result(*done.result())
            print(f"\r{package}: {number} of {len(waiting)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def _copy(target: Path) -> str:
    """The working tree without what git ignores, compiled, since mutants leave no bytecode."""
    shutil.rmtree(target, ignore_errors=True)
    listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    compile_dir(target, quiet=1)
    return str(target)


def _without_fault(package: str, tests: set[str]) -> float:
    """Seconds that `tests` take; if one of them fails already, nothing could be learned from it."""
    tree, known, began = BUILD / "tree-0", BUILD / f"{package}.json", time.monotonic()
    files = [path for path in sorted(tree.rglob("*")) if path.suffix in (".py", ".toml", ".cu", ".cuh")]
    state = sha256(b"".join(path.read_bytes() for path in files) + repr(sorted(tests)).encode()).hexdigest()
    if known.exists() and (before := json.loads(known.read_text()))["state"] == state:
        return before["seconds"]
    done = subprocess.run(
        _pytest(sorted(tests)), cwd=tree, env=_environment(tree), capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(
            f"error: the tests of {package} fail without a fault, with exit code {done.returncode}:\n"
            f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    seconds = time.monotonic() - began
    known.write_text(json.dumps({"state": state, "seconds": seconds}))
    return seconds


def _pytest(tests: Sequence[str]) -> list[str]:
    limit = f"--timeout={SETTINGS['test_limit_s']}"
    return [
        sys.executable,
        "-c",
        PYTEST,
        str(os.getpid()),
        "-x",
        "-m",
        "",
        "--no-header",
        "--tb=line",
        limit,
        *tests,
    ]


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def _enter(trees: SimpleQueue[str], runner: int) -> None:
    die_with_parent(runner)
    os.chdir(trees.get())
    os.environ |= _environment(Path.cwd())


def _try(item: WorkItem, tests: list[str], limit_s: float) -> tuple[str, WorkResult]:
    return item.job_id, mutate_and_test(item.mutations, shlex.join(_pytest(tests)), limit_s)


def verdict(item: WorkItem, result: WorkResult) -> str:
    """`noticed`, `timed out` (noticed, too), `same` (it changes nothing, and the settings say why) or `survived`."""
    if result.test_outcome == TestOutcome.SURVIVED:
        return (
            "same"
            if any(_is(known, place(item)[0], *changed(result)) for known in SETTINGS["same"])
            else "survived"
        )
    return "timed out" if result.output == "timeout" else "noticed"


def _is(known: dict[str, Any], file: str, before: str, after: str) -> bool:
    """Whether the fault is what `known` says of a line of `file` (of any, where none is named).

    It puts `to` in the place of `from`, or gives one of `constants` another value above zero.
    """
    there = known.get("file", file) == file
    if "constants" in known:
        name, _, value = after.partition(" = ")
        named = name in known["constants"] and before.startswith(f"{name} = ")
        return there and named and not value.strip().startswith(("-", "0"))
    there = there and known["from"] in before
    return there and "".join(before.replace(known["from"], known["to"], 1).split()) == "".join(after.split())


def changed(result: WorkResult) -> tuple[str, str]:
    """The line with the fault, before and after."""
    text = [line for line in (result.diff or "").splitlines() if not line.startswith(("---", "+++"))]
    before, after = (" ".join(line[1:].strip() for line in text if line.startswith(sign)) for sign in "-+")
    return before, after


def row(package: str, rows: list[tuple[WorkItem, WorkResult]]) -> str:
    """Return the table row of a package."""
    count = Counter(verdict(*each) for each in rows)
    noticed, real = count["noticed"] + count["timed out"], count.total() - count["same"]
    numbers = count.total(), noticed, count["timed out"], count["same"], count["survived"]
    return f"| {package} | {' | '.join(map(str, numbers))} | {f'{noticed / real:.0%}' if real else '-'} |"


def survivors(rows: list[tuple[WorkItem, WorkResult]]) -> Iterator[str]:
    """Where they are, and their line before and after."""
    for item, result in rows:
        if verdict(item, result) == "survived":
            before, after = changed(result)
            yield f"{place(item)[0]}:{place(item)[1]}\n  - {before}\n  + {after}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument(
        "--package", choices=PACKAGES, action="append", help="a package instead of the changed lines"
    )
    parser.add_argument("--base", default="main", help="lines changed since this commit (default: main)")
    parser.add_argument("--sample", type=int, help="number of random mutants of each package")
    parser.add_argument(
        "--seed", type=int, default=0, help="another sample (default: 0, every time the same)"
    )
    parser.add_argument("--workers", type=int, default=1, help="how many mutants at once")
    given = parser.parse_args()
    known = ["git", "rev-parse", "--quiet", "--verify", f"{given.base}^{{commit}}"]
    if subprocess.run(known, cwd=ROOT, capture_output=True).returncode:
        parser.error(f"--base {given.base}: must be a commit of this repository")
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"error: another run has {BUILD}")
        _report(given)


def _report(given: argparse.Namespace) -> None:
    """Print the undetected faults of each package, and a table of all packages."""
    table = ["| package | tried | noticed | by time | change nothing | survived | score |", "|---" * 7 + "|"]
    for package in given.package or PACKAGES:
        with use_db(
            session(package, None if given.package else given.base, given.sample, given.seed)
        ) as work:
            run(package, work, given.workers)
            if rows := tried(work):
                table.append(row(package, rows))
                for survivor in survivors(rows):
                    print(survivor)
    print("\n".join(table) if len(table) > 2 else f"no line of any package has changed since {given.base}")


if __name__ == "__main__":
    main()
