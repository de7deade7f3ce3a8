#!/usr/bin/env python3
"""Fake SLURM commands, which answer from a JSON file and log each call there.

The file is installed under seven names. It checks its arguments and runs no job. No test calls `scontrol`.
"""

import json
import os
import re
import sys
from pathlib import Path

STATE = Path(os.environ.get("FAKE_SLURM", ""))
COMMANDS = ("sbatch", "squeue", "sacct", "scontrol", "sinfo", "scancel", "srun")


def main(name: str, arguments: list[str]) -> int:
    state = json.loads(STATE.read_text())
    state["calls"].append([name, *arguments])
    code = globals()[name](state, arguments)
    STATE.write_text(json.dumps(state))
    return code


def sbatch(state: dict, arguments: list[str]) -> int:
    if "--test-only" in arguments:
        print("sbatch: Job 1 to start", file=sys.stderr)
        return 0
    if state["refuse_after"] is not None and len(state["scripts"]) >= state["refuse_after"]:
        print("sbatch: error: Batch job submission failed: Invalid account", file=sys.stderr)
        return 1
    text = Path(arguments[-1]).read_text()
    number = state["next"]
    state["next"] += 1
    state["scripts"][str(number)] = text
    array = re.search(r"--array=0-(\d+)", text)
    elements = [f"{number}_{i}" for i in range(int(array[1]) + 1)] if array else [str(number)]
    for element in elements:
        state["jobs"][element] = {"state": "PENDING", "reason": "Resources", "nodes": "", "exit": "0:0"}
    print(f"Submitted batch job {number}")
    return 0


def squeue(state: dict, arguments: list[str]) -> int:
    assert "-r" in arguments, "squeue must print one line per array element"
    for element, job in state["jobs"].items():
        print(f"{element}|{job['state']}|{job['reason']}|{job['nodes']}")
    return 0


def sacct(state: dict, arguments: list[str]) -> int:
    if not state["accounting"]:
        print("Slurm accounting storage is disabled", file=sys.stderr)
        return 1
    wanted = set(arguments[arguments.index("-j") + 1].split(","))
    for element, job in state["jobs"].items():
        if element.split("_")[0] in wanted:
            print(f"{element}|{job['state']}|{job['reason']}|{job['nodes']}|{job['exit']}")
    return 0


def sinfo(state: dict, arguments: list[str]) -> int:
    if "--version" in arguments:
        print("slurm 22.05.8")
    else:
        print("\n".join(state["partitions"]))
    return 0


def scancel(state: dict, arguments: list[str]) -> int:
    for element in arguments:
        state["jobs"][element]["state"] = "CANCELLED"
    return 0


def srun(state: dict, arguments: list[str]) -> int:
    print("srun: error: this is no cluster", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[0]).name, sys.argv[1:]))
