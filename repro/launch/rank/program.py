"""Program of one rank, which a launcher starts as `python -m repro.launch.rank.program JOB.json --rank R ...`.

At its end, the rank writes a report file with its outcome and reason. The heartbeat shows the last position of a rank
that was killed before it could write a report.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from repro import engines
from repro.launch import rank_process
from repro.launch.job import Job, Stopped
from repro.launch.rank import device_settings
from repro.launch.rank.device_settings import lift_memory_limit, limit_memory
from repro.launch.rank_process import HeartbeatWriter
from repro.util.files import write_json
from repro.util.processes import die_with_parent

DEFAULT_TARGET = "repro.launch.rank.session:run_rank"
EXIT_CODES = {"ok": 0, "error": 1, "oom": 3, "diverged": 4, "interrupted": 5}
_NO_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|std::bad_alloc"
    r"|could not (create|execute) a primitive$",  # oneDNN's errors if it cannot allocate memory
    re.IGNORECASE,
)


def main(arguments: list[str] | None = None) -> int:
    """Run one rank of a job to its end and return the exit code of the process (`EXIT_CODES`)."""
    options = _parse(arguments)
    die_with_parent(options.parent)
    faulthandler.enable()
    # The launcher sends this signal to a rank that hangs, to get the rank's Python stacks.
    faulthandler.register(rank_process.STACKS_SIGNAL, all_threads=True)
    job = replace(Job.load(options.job), folder=str(options.folder))
    folder = options.folder

    def keep(index: int, result: dict[str, Any]) -> None:
        write_json(result_path(folder, index, options.rank), result)

    heartbeat = HeartbeatWriter(folder / "heartbeat", options.rank, keep)
    outcome, reason = "ok", ""
    if options.device == "cuda":
        device_settings.apply_gpu_environment(job.experiments)
    try:
        module_name, function = options.target.split(":")
        module = importlib.import_module(module_name)
        if job.memory_bytes:
            for engine in {experiment.engine for experiment in job.experiments}:
                engines.import_libraries(engine, options.device)
        limit_memory(job.memory_bytes, options.device)
        results = getattr(module, function)(
            job,
            rank=options.rank,
            world=job.world,
            device=options.device,
            rendezvous=options.rendezvous,
            heartbeat=heartbeat,
        )
        lift_memory_limit()
        for index, experiment in enumerate(job.experiments):
            keep(index, results[experiment.key])
        _write_report(folder, options.rank, outcome, reason)
    except Exception as error:
        lift_memory_limit()
        outcome = classify_error(error, bool(job.memory_bytes))
        reason = str(error) if outcome == "interrupted" else describe_error(error)
        # Write the report before the stack trace, because NCCL's watchdog may end this process while tensors are freed.
        _write_report(folder, options.rank, outcome, reason)
        if outcome != "interrupted":
            traceback.print_exc()
    return EXIT_CODES[outcome]


def _write_report(folder: Path, rank: int, outcome: str, reason: str) -> None:
    write_json(rank_report_path(folder, rank), {"rank": rank, "outcome": outcome, "reason": reason})


def classify_error(error: BaseException, limited: bool) -> str:
    """Return the outcome of an experiment that ended with `error`: `oom`, `diverged`, `interrupted` or `error`.

    `limited`: whether the memory of the rank was limited.
    """
    if isinstance(error, Stopped):
        return "interrupted"
    if isinstance(error, FloatingPointError):
        return "diverged"
    # torch's CPU allocator raises a plain RuntimeError, which only its message distinguishes from other errors.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "oom"
    # If CPython cannot allocate an object in an import, it may raise this SystemError instead of a MemoryError.
    if limited and isinstance(error, SystemError) and "error return without exception set" in str(error):
        return "oom"
    if isinstance(error, (RuntimeError, OSError)) and _NO_MEMORY.search(str(error)):
        return "oom"
    return "error"


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def rank_report_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def result_path(folder: Path, index: int, rank: int) -> Path:
    return folder / f"finished-{index}-{rank}.json"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m repro.launch.rank.program", description=__doc__)
    parser.add_argument("job", type=Path, help="the job's JSON file")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rendezvous", required=True, help="URL for torch.distributed, e.g. file:///path")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the heartbeat and result files")
    parser.add_argument(
        "--parent", type=int, default=0, help="id of the process whose death kills this rank; 0: no process"
    )
    parser.add_argument("--target", default=DEFAULT_TARGET, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip destructors, because the destructor of a process group with a dead peer can block for minutes.
    os._exit(code)
