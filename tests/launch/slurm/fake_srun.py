#!/usr/bin/env python3
"""Fake `srun`, which runs a job step as processes of this machine with the variables that SLURM would set.

Like the real command, it forwards SIGUSR1 and SIGUSR2, and its tasks end when it is killed.
"""

import ctypes
import os
import signal
import subprocess
import sys

LIBC, PR_SET_PDEATHSIG = ctypes.CDLL(None), 1


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
    children = [
        subprocess.Popen(
            arguments,
            env={
                **os.environ,
                "SLURM_NTASKS": str(tasks),
                "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
                "SLURM_PROCID": str(task),
                "SLURM_LOCALID": str(task % per_node),
                "SLURM_NODEID": str(task // per_node),
                "SLURMD_NODENAME": nodes[task // per_node],
            },
            preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
