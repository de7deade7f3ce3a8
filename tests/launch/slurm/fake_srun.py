#!/usr/bin/env python3
"""Fake `srun`, which runs a job step as processes of this machine with the variables that SLURM would set.

Like the real command, it forwards SIGUSR1 and SIGUSR2, and its tasks end when it is killed.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable


def main(arguments: list[str]) -> int:
    options = {}
    while arguments[0].startswith("--"):
        key, _, value = arguments.pop(0).removeprefix("--").partition("=")
        options[key] = value
    tasks, per_node = int(options["ntasks"]), int(options["distribution"].removeprefix("plane="))
    assert options["wait"] == options["kill-on-bad-exit"] == options["relative"] == "0"
    assert "overlap" in options
    nodes = os.environ["SLURM_JOB_NODELIST"].split(",")[: int(options["nodes"])]
    assert tasks <= len(nodes) * per_node
    step_variables = {"SLURM_NTASKS": str(tasks)}
    if "cpus-per-task" in options:
        step_variables["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
    children = [
        subprocess.Popen(
            arguments,
            env={
                **os.environ,
                **step_variables,
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task % per_node),
                "SLURM_NODEID": str(task // per_node),
                "SLURMD_NODENAME": nodes[task // per_node],
            },
            preexec_fn=_dies_with(os.getpid()),
        )
        for task in range(tasks)
    ]

    def forward(number: int, frame: object) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    codes = []
    for task, child in enumerate(children):
        codes.append(child.wait())
        if codes[-1]:
            print(f"srun: error: {nodes[task // per_node]}: task {task}: {codes[-1]}", file=sys.stderr)
    return max(abs(code) for code in codes)


def _dies_with(parent: int) -> Callable[[], None]:
    def prepare() -> None:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
