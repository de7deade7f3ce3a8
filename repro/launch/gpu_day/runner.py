"""Runner of `repro gpu-day`: runs one process per step within a time limit, and writes results while a step runs.

A failed step does not end the session. SIGINT or SIGTERM ends the running step and skips all further steps.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from repro.config.errors import require
from repro.launch.gpu_day.result_files import ResultWriter, StepOutcome
from repro.launch.gpu_day.steps import CHECKOUT, GpuDayPlaces, GpuDayStep, gpu_day_steps, write_suites
from repro.launch.job import Interrupt
from repro.launch.local_launch import count_cuda_devices
from repro.util.processes import die_with_parent

STEP_POLL_INTERVAL_S = 0.2
STEP_END_GRACE_S = 3.0
"""Time between SIGTERM and SIGKILL when `repro gpu-day` ends a step, in seconds."""
CLOSING_S = 5.0
"""Part of the time limit of `repro gpu-day` that is reserved for ending the last step, in seconds."""
INJECTED_LIMIT_S = 5.0
"""Time limit of a `repro gpu-day` step that a rehearsal replaces by a hanging program, in seconds."""
FAULTS = {
    "fail": "raise SystemExit('injected failure')",
    "hang": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()",
}
"""Python programs that replace a step in a rehearsal of `repro gpu-day`, by the name of the injected fault."""
CACHES = {
    "XDG_CACHE_HOME": "cache",
    "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
    "TRITON_CACHE_DIR": "cache/triton",
    "HYPOTHESIS_STORAGE_DIRECTORY": "cache/hypothesis",
    "MPLCONFIGDIR": "cache/matplotlib",
    "TMPDIR": "tmp",
}
"""Environment variables that name cache folders, and their values: subfolders of the scratch folder of the session."""
Announce = Callable[[GpuDayStep, StepOutcome | None], None]
"""Callback at the start and the end of a step of `repro gpu-day`; the outcome is None at the start."""


@dataclass(frozen=True)
class GpuDayRequest:
    """Options of one run of `repro gpu-day`."""

    minutes: float
    out: Path
    only: Sequence[str] = ()
    """Globs of the names of the `repro gpu-day` steps to run; empty for all steps."""
    rehearse: bool = False
    faults: Mapping[str, str] | None = None
    """Faults (`fail` or `hang`) to inject in a rehearsal of `repro gpu-day`, by the name of the replaced step."""
    scratch: Path | None = None
    """Folder for records and caches of the `repro gpu-day` steps, deleted at the end; None for a temporary folder."""

    def check(self) -> None:
        """Raise `ConfigError` for invalid options of `repro gpu-day`."""
        right = "a time limit of more than 0 and at most 1440 minutes"
        require(0 < self.minutes <= 24 * 60, "--minutes", self.minutes, right)
        require(self.rehearse or not self.faults, "--inject", True, says="needs --rehearse")


def parse_faults(given: Sequence[str]) -> dict[str, str]:
    """Return the faults to inject in steps of `repro gpu-day`, from texts such as `STEP=hang`. Raises `ConfigError`."""
    found = {}
    for text in given:
        name, _, fault = text.partition("=")
        require(bool(name) and fault in FAULTS, "--inject", text, f"STEP={' or STEP='.join(FAULTS)}")
        found[name] = fault
    return found


def planned_steps(request: GpuDayRequest, scratch: Path) -> list[GpuDayStep]:
    """Return the selected steps of `repro gpu-day` in order, with injected faults. Raises `ConfigError`."""
    steps = gpu_day_steps(GpuDayPlaces(request.out.absolute(), scratch), rehearse=request.rehearse)
    names = [step.name for step in steps]
    for pattern in (*request.only, *(request.faults or {})):
        require(any(fnmatch(name, pattern) for name in names), "step", pattern, f"one of {', '.join(names)}")
    selected = [s for s in steps if any(fnmatch(s.name, glob) for glob in request.only or ("*",))]
    for number, step in enumerate(selected):
        if fault := (request.faults or {}).get(step.name, ""):
            limit_s = INJECTED_LIMIT_S if fault == "hang" else step.limit_s
            command = (sys.executable, "-c", FAULTS[fault])
            selected[number] = replace(step, command=command, limit_s=limit_s, missing="", needs_file="")
    return selected


def run_gpu_day(request: GpuDayRequest, announce: Announce) -> list[StepOutcome]:
    """Run all steps whose expected duration fits into the remaining time; return all outcomes. Raises `ConfigError`."""
    request.check()
    no_gpu = not request.rehearse and not count_cuda_devices()
    require(not no_gpu, "gpu-day", "no GPU", "a machine with a CUDA GPU; add --rehearse for a CPU")
    deadline = time.monotonic() + 60 * request.minutes
    request.out.mkdir(parents=True, exist_ok=True)
    require(not any(request.out.iterdir()), "--out", str(request.out), "a new or empty folder")
    with _scratch_folder(request.scratch) as scratch, Interrupt() as interrupt:
        places = GpuDayPlaces(request.out.absolute(), scratch)
        steps = planned_steps(request, scratch)
        write_suites(places, rehearse=request.rehearse)
        visit = _Visit(places, ResultWriter(places.out, places.store), deadline, interrupt)
        outcomes = []
        for step in steps:
            reason = visit.reason_to_skip(step)
            if not reason:
                announce(step, None)
            outcome = visit.skip(step, reason) if reason else visit.run(step)
            outcomes.append(outcome)
            announce(step, outcome)
        return outcomes


@contextmanager
def _scratch_folder(given: Path | None) -> Iterator[Path]:
    """Create the scratch folder of `repro gpu-day`, yield its path, and delete the folder at the end."""
    scratch = given.absolute() if given is not None else Path(tempfile.mkdtemp(prefix="repro-gpu-day-"))
    try:
        for folder in (*CACHES.values(), "home"):
            (scratch / folder).mkdir(parents=True, exist_ok=True)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@dataclass
class _Visit:
    places: GpuDayPlaces
    writer: ResultWriter
    deadline: float
    interrupt: Interrupt

    @property
    def left_s(self) -> float:
        """Return the remaining time for steps of `repro gpu-day`, in seconds."""
        return self.deadline - CLOSING_S - time.monotonic()

    def reason_to_skip(self, step: GpuDayStep) -> str:
        """Return the reason to skip a step of `repro gpu-day`; empty if the step can start."""
        if self.interrupt:
            return "the session was interrupted"
        if step.missing:
            return f"needs {step.missing}"
        if step.needs_file and not (self.places.out / step.needs_file).is_file():
            return f"the step needs the file {step.needs_file}, which no previous step wrote"
        if self.left_s < step.estimate_s:
            return f"the step needs about {step.estimate_s:.0f} s, but {max(0.0, self.left_s):.0f} s remain"
        return ""

    def skip(self, step: GpuDayStep, reason: str) -> StepOutcome:
        outcome = StepOutcome(step.name, "skipped", reason, estimate_s=step.estimate_s, limit_s=step.limit_s)
        self.writer.write_outcome(outcome)
        return outcome

    def run(self, step: GpuDayStep) -> StepOutcome:
        """Run a `repro gpu-day` step up to its time limit, copy records to the result files, and return the outcome."""
        began, limit_s = time.monotonic(), min(step.limit_s, self.left_s)
        self.writer.begin_step(step.name, step.command)
        output, records, reason = self.places.scratch / f"{step.name}.log", 0, ""
        with open(output, "wb") as sink:
            process = self._start(step, sink)
        while process.poll() is None and not reason:
            records += self.writer.copy_new_records()
            self.writer.copy_output(output)
            if self.interrupt:
                reason = "interrupted"
            elif time.monotonic() - began > limit_s:
                reason = f"timeout after {limit_s:.0f} s"
            else:
                time.sleep(STEP_POLL_INTERVAL_S)
        _end_group(process)
        records += self.writer.copy_new_records()
        self.writer.copy_output(output, ended=True)
        if not reason and process.returncode:
            reason = _failure_reason(process.returncode, output)
        kind = "ok"
        if reason:
            kind = next((k for k in ("timeout", "interrupted") if reason.startswith(k)), "failed")
        seconds = round(time.monotonic() - began, 1)
        outcome = StepOutcome(step.name, kind, reason, seconds, step.estimate_s, round(limit_s, 1), records)
        self.writer.write_outcome(outcome)
        return outcome

    def _start(self, step: GpuDayStep, sink: IO[bytes]) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        return subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            cwd=CHECKOUT if step.in_checkout else self.places.scratch,
            env=self._environment(step),
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )

    def _environment(self, step: GpuDayStep) -> dict[str, str]:
        """Return a `repro gpu-day` step's environment: caches in the scratch folder, Hugging Face libraries offline."""
        scratch = self.places.scratch
        caches = {name: str(scratch / folder) for name, folder in CACHES.items()}
        found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        fixed = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "140"}
        return {**found, **caches, **fixed, "HOME": str(scratch / "home"), **dict(step.environment)}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a step, even orphans: send SIGTERM, and SIGKILL after `STEP_END_GRACE_S` seconds."""
    with suppress(ProcessLookupError, PermissionError):  # The step's process group has already ended.
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STEP_END_GRACE_S)
    process.wait()


def _failure_reason(code: int, output: Path) -> str:
    """Return the exit code or signal of a failed `repro gpu-day` step, with the last line of the step's output."""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{how}: {lines[-1].strip()[:200]}" if lines else how
