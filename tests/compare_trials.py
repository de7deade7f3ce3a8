"""Count the correct answers of `repro compare` for pairs of commits whose difference in speed is known.

    python -m tests.compare_trials --trials 20 --store build/compare_trials

`--store` keeps a clone of this repository and one line of JSON per trial, so that an interrupted run resumes. The
clone has three commits: `base`, `same` without a difference, and `slow`, in which a step takes 15 % longer. A trial
compares `base` with one of the others. Trials with `same` and with `slow` alternate. Copy
reports/compare_trials.jsonl to `trials.jsonl` in `--store` to continue these trials.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from argparse import RawDescriptionHelpFormatter
from collections import Counter
from pathlib import Path

from tests.test_text import ROOT

COMMITS = ("same", "slow")
SUITE = """\
[suite]
name = "trials"
description = "A small training step of one process"

[[experiment]]
name = "step"
model = "smoke-states"
layout = { dp = 1, precision = "fp32" }
training = { steps = 30, untimed_steps = 3 }
limits = { timeout_s = 300, hang_s = 120 }
"""
SLOWER_STEP = """\


def _slower(step):
    import time

    def slow_step(*arguments):
        began = time.perf_counter()
        result = step(*arguments)
        end = began + 1.15 * (time.perf_counter() - began)
        while time.perf_counter() < end:
            pass
        return result

    return slow_step


NativeEngine.step = _slower(NativeEngine.step)
"""


def _git(clone: Path, *arguments: str) -> None:
    author = ("-c", "user.name=trials", "-c", "user.email=trials@example.org")
    subprocess.run(["git", "-C", str(clone), *author, *arguments], check=True, stdout=subprocess.DEVNULL)


def make_clone(clone: Path) -> None:
    """Clone this repository, and add the tags `base`, `same` and `slow`."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    _git(clone, "tag", "base")
    _git(clone, "commit", "--quiet", "--allow-empty", "-m", "same")
    _git(clone, "tag", "same")
    engine = clone / "repro/engines/native/engine.py"
    engine.write_text(engine.read_text() + SLOWER_STEP)
    _git(clone, "commit", "--quiet", "--all", "-m", "slow")
    _git(clone, "tag", "slow")


def run_trial(store: Path, commit: str) -> dict[str, object]:
    """Compare the commits `base` and `commit`, and return the answer about speed with the duration in seconds."""
    clone = store / "clone"
    command = [sys.executable, "-m", "repro", "compare", "base", commit, "--suite", str(store / "suite.toml")]
    command += ["--results", str(store / "results"), "--json"]
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"repro compare failed: {done.stderr.strip()}")
    speed = next(change for change in json.loads(done.stdout)["changes"] if change["kind"] == "speed")
    revision = ["git", "-C", str(clone), "rev-parse", "--short=9", "base"]
    base = subprocess.check_output(revision, text=True).strip()
    trial = {"date": time.strftime("%Y-%m-%d"), "base": base, "commit": commit, **speed}
    return {**trial, "seconds": round(time.monotonic() - began), "load": round(os.getloadavg()[0], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20, help="number of trials of each commit")
    parser.add_argument("--store", type=Path, default=ROOT / "build/compare_trials")
    arguments = parser.parse_args()
    store = arguments.store.resolve()
    store.mkdir(parents=True, exist_ok=True)
    (store / "suite.toml").write_text(SUITE)
    if not (store / "clone").is_dir():
        make_clone(store / "clone")
    file = store / "trials.jsonl"
    trials = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for _ in range(arguments.trials):
        for commit in COMMITS:
            if sum(trial["commit"] == commit for trial in trials) < arguments.trials:
                trials.append(run_trial(store, commit))
                with file.open("a") as lines:
                    lines.write(json.dumps(trials[-1]) + "\n")
    for commit in COMMITS:
        print(commit, dict(Counter(trial["judged"] for trial in trials if trial["commit"] == commit)))


if __name__ == "__main__":
    main()
