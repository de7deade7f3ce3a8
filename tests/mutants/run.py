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
from tests.mutants.relevant import ROOT, new_files_in_the_index, relevant, sources

SETTINGS = read_toml(Path(__file__).with_name("packages.toml"))
PACKAGES = SETTINGS["package"]
BUILD = ROOT / "build/mutants"
PYTEST = """
import os, sys, pytest
from repro.util.processes import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
sys.exit(pytest.main())
"""
"""Program of a fault's tests; cosmic-ray gives it a separate session, which Ctrl-C and SLURM's limit do not reach."""
TIME_FACTOR = 4
"""Time limit of a mutant's tests, as a multiple of the time of all tests of the package without a fault."""


def session(package: str, base: str | None, sample: int | None, seed: int) -> Path:
    """Return the session of a package's current sources; create the session if it does not exist."""
    files = sources(ROOT, PACKAGES[package]["files"], base)
    key = sha256(repr((files, base, sample, sample and seed, SETTINGS["exclude"])).encode())
    for file in files:
        key.update((ROOT / file).read_bytes())
    path = BUILD / f"{package}-{key.hexdigest()[:12]}.sqlite"
    if not path.exists():
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        with use_db(partial) as work:
            init(files, work, {})
            OperatorsFilter()._skip_filtered(work, SETTINGS["exclude"])
            if base:
                with new_files_in_the_index(ROOT):
                    GitFilter()._skip_filtered(work, base)
            _skip_all_but(work, sample, seed)
        partial.rename(path)
    return path


def _skip_all_but(work: WorkDB, sample: int | None, seed: int) -> None:
    pending = sorted(work.pending_work_items, key=site)
    if sample:
        random.Random(seed).shuffle(pending)
    selected = {item.job_id for item in islice(filter(_changes_program, pending), sample)}
    reason = "a syntax error, no change, or not in the sample"
    skipped = WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output=reason)
    work.set_multiple_results([item.job_id for item in pending if item.job_id not in selected], skipped)


def _changes_program(item: WorkItem) -> bool:
    """Return whether the fault changes the syntax tree; 1e18 + 1 or a changed `*` of a signature does not."""
    (mutation,) = item.mutations
    before = mutation.module_path.read_text(encoding="utf-8")
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    after = mutate_code(before, operator, mutation.occurrence)
    try:
        return after is not None and ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
    except SyntaxError:
        return False


def site(item: WorkItem) -> tuple[str, int, str, int]:
    """Return the file, the line, the operator, and the fault's index among the operator's faults in the file."""
    (mutation,) = item.mutations
    return str(mutation.module_path), mutation.start_pos[0], mutation.operator_name, mutation.occurrence


def results(work: WorkDB) -> list[tuple[WorkItem, WorkResult]]:
    """Return the faults whose tests have run, in the order of the files."""
    found = [(item, result) for item, result in work.completed_work_items if result.test_outcome]
    return sorted(found, key=lambda row: site(row[0]))


def run(package: str, work: WorkDB, workers: int) -> None:
    """Test the pending faults, then the undetected faults again, and store each result at once."""
    items = sorted(work.pending_work_items, key=site)
    items += [item for item, result in results(work) if verdict(item, result) == "undetected"]
    if not items:
        return
    tests = {site(item)[0]: relevant(Path(site(item)[0]), PACKAGES[package]["tests"]) for item in items}
    context = get_context("spawn")
    trees: SimpleQueue[str] = context.SimpleQueue()
    for number in range(workers):
        trees.put(_copy(BUILD / f"tree-{number}"))
    limit_s = TIME_FACTOR * _test_seconds(package, {test for found in tests.values() for test in found})
    with ProcessPoolExecutor(workers, context, _enter, (trees, os.getpid())) as pool:
        pending = [pool.submit(_try, item, tests[site(item)[0]], limit_s) for item in items]
        for number, done in enumerate(as_completed(pending), 1):
            work.set_result(*done.result())
            print(f"\r{package}: {number} of {len(pending)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def _copy(target: Path) -> str:
    """Copy the working tree without ignored files, and compile the copy, because runs of mutants write no bytecode."""
    shutil.rmtree(target, ignore_errors=True)
    listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    compile_dir(target, quiet=1)
    return str(target)


def _test_seconds(package: str, tests: set[str]) -> float:
    """Return the seconds of `tests` without a fault; exit if a test fails, because it could detect no fault."""
    tree, cache, began = BUILD / "tree-0", BUILD / f"{package}.json", time.monotonic()
    files = [path for path in sorted(tree.rglob("*")) if path.suffix in (".py", ".toml", ".cu", ".cuh")]
    state = sha256(b"".join(path.read_bytes() for path in files) + repr(sorted(tests)).encode()).hexdigest()
    if cache.exists() and (before := json.loads(cache.read_text()))["state"] == state:
        return before["seconds"]
    where = {"cwd": tree, "env": _environment(tree)}
    done = subprocess.run(_pytest(sorted(tests)), capture_output=True, text=True, **where)
    if done.returncode:
        sys.exit(
            f"error: the tests of {package} fail without a fault, with exit code {done.returncode}:\n"
            f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    seconds = time.monotonic() - began
    cache.write_text(json.dumps({"state": state, "seconds": seconds}))
    return seconds


def _pytest(tests: Sequence[str]) -> list[str]:
    options = ["-x", "-m", "", "--no-header", "--tb=line", f"--timeout={SETTINGS['test_limit_s']}"]
    return [sys.executable, "-c", PYTEST, str(os.getpid()), *options, *tests]


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def _enter(trees: SimpleQueue[str], runner: int) -> None:
    die_with_parent(runner)
    os.chdir(trees.get())
    os.environ |= _environment(Path.cwd())


def _try(item: WorkItem, tests: list[str], limit_s: float) -> tuple[str, WorkResult]:
    return item.job_id, mutate_and_test(item.mutations, shlex.join(_pytest(tests)), limit_s)


def verdict(item: WorkItem, result: WorkResult) -> str:
    """Return `detected`, `timed out` (also detected), `no change` (listed in packages.toml) or `undetected`."""
    if result.test_outcome == TestOutcome.SURVIVED:
        file, lines = site(item)[0], changed_line(result)
        is_known = any(_matches(known, file, *lines) for known in SETTINGS["same"])
        return "no change" if is_known else "undetected"
    return "timed out" if result.output == "timeout" else "detected"


def _matches(known: dict[str, Any], file: str, before: str, after: str) -> bool:
    """Return whether `known`, an entry of `same` in packages.toml, describes the fault in `file`.

    The fault replaces `from` by `to`, or gives one of `constants` another positive value.
    """
    fits = known.get("file", file) == file
    if "constants" in known:
        name, _, value = after.partition(" = ")
        named = name in known["constants"] and before.startswith(f"{name} = ")
        return fits and named and not value.strip().startswith(("-", "0"))
    fits = fits and known["from"] in before
    return fits and "".join(before.replace(known["from"], known["to"], 1).split()) == "".join(after.split())


def changed_line(result: WorkResult) -> tuple[str, str]:
    """Return the line without and with the fault."""
    text = [line for line in (result.diff or "").splitlines() if not line.startswith(("---", "+++"))]
    before, after = (" ".join(line[1:].strip() for line in text if line.startswith(sign)) for sign in "-+")
    return before, after


def row(package: str, rows: list[tuple[WorkItem, WorkResult]]) -> str:
    """Return the table row of a package."""
    count = Counter(verdict(*each) for each in rows)
    detected, real = count["detected"] + count["timed out"], count.total() - count["no change"]
    numbers = count.total(), detected, count["timed out"], count["no change"], count["undetected"]
    return f"| {package} | {' | '.join(map(str, numbers))} | {f'{detected / real:.0%}' if real else '-'} |"


def undetected_faults(rows: list[tuple[WorkItem, WorkResult]]) -> Iterator[str]:
    """Yield the location of each undetected fault, and its line without and with the fault."""
    for item, result in rows:
        if verdict(item, result) == "undetected":
            before, after = changed_line(result)
            yield f"{site(item)[0]}:{site(item)[1]}\n  - {before}\n  + {after}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    package = {"choices": PACKAGES, "action": "append", "help": "a package instead of the changed lines"}
    parser.add_argument("--package", **package)
    parser.add_argument("--base", default="main", help="commit to which lines are compared (default: main)")
    parser.add_argument("--sample", type=int, help="number of random faults of each package")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random sample (default: 0)")
    parser.add_argument("--workers", type=int, default=1, help="number of faults that are tested at once")
    options = parser.parse_args()
    command = ["git", "rev-parse", "--quiet", "--verify", f"{options.base}^{{commit}}"]
    if subprocess.run(command, cwd=ROOT, capture_output=True).returncode:
        parser.error(f"--base {options.base}: must be a commit of this repository")
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"error: another `make mutants` uses {BUILD}")
        _report(options)


def _report(options: argparse.Namespace) -> None:
    """Print the undetected faults of each package, and a table of all packages."""
    table = ["| package | faults | detected | time-out | no change | undetected | score |", "|---" * 7 + "|"]
    for package in options.package or PACKAGES:
        base = None if options.package else options.base
        with use_db(session(package, base, options.sample, options.seed)) as work:
            run(package, work, options.workers)
            if rows := results(work):
                table.append(row(package, rows))
                for fault in undetected_faults(rows):
                    print(fault)
    print("\n".join(table) if len(table) > 2 else f"no line of any package differs from {options.base}")


if __name__ == "__main__":
    main()
