"""Tests of the command of a job step, and of the srun process: restarts, signals, end and errors."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from repro.launch.slurm.allocation import srun_step
from repro.launch.slurm.allocation.srun_step import Allocation, SrunStep
from repro.launch.slurm.profile import parse_profile
from tests.launch.runs import wait_for


@pytest.mark.parametrize(("tasks", "nodes"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_srun_command_of_a_step(tasks: int, nodes: int) -> None:
    command = srun_step.srun_command(parse_profile({}, file="f"), tasks, 2, ["module", "folder"])
    assert command == [
        *("srun", "--overlap", "--relative=0", f"--nodes={nodes}", f"--ntasks={tasks}"),
        *("--distribution=plane=2", "--kill-on-bad-exit=0", "--wait=0"),
        *(sys.executable, "-m", "module", "folder"),
    ]


def step(folder: Path, text: str) -> SrunStep:
    return SrunStep(["sh", "-c", text], folder / "srun.err")


def test_allocation_starts_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[list[str], Path]] = []
    monkeypatch.setattr(srun_step, "SrunStep", lambda command, errors: steps.append((command, errors)))
    site = parse_profile({}, file="f")
    allocation = Allocation(nodes=2, per_node=3, site=site, address="a", umask=0)
    allocation.step(4, "module", tmp_path)
    assert allocation.tasks == 6
    assert steps == [(srun_step.srun_command(site, 4, 3, ["module", str(tmp_path)]), tmp_path / "srun.err")]


def test_step_has_exit_code_and_last_error_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "7")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    ended = step(tmp_path, 'echo first >&2; echo "$SLURM_JOB_ID$SLURM_STEP_ID last" >&2; exit 3')
    wait_for(lambda: ended.code is not None)
    assert (ended.code, ended.starts, ended.last_error_line()) == (3, 1, "12 last")
    ended.signal(signal.SIGUSR1)
    (tmp_path / "srun.err").write_text("x" * 301)
    assert ended.last_error_line() == "x" * 300
    (tmp_path / "srun.err").write_text("\n")
    assert ended.last_error_line() == ""
    (tmp_path / "srun.err").unlink()
    assert ended.last_error_line() == ""


def test_step_receives_signals_and_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    heard = step(tmp_path, f"trap 'echo heard >&2; exit 4' USR1; touch {ready}; while :; do sleep 0.02; done")
    wait_for(ready.exists)
    heard.signal(signal.SIGUSR1)
    heard.end(10.0)
    assert (heard.code, heard.last_error_line()) == (4, "heard")
    sleeping = step(tmp_path, "exec sleep 60")
    assert sleeping.code is None
    sleeping.end(0.01)
    assert sleeping.code == -signal.SIGKILL


def test_step_restarts_while_slurmctld_is_unavailable(tmp_path: Path) -> None:
    count = tmp_path / "count"
    text = f"echo x >> {count}; [ $(wc -l < {count}) -ge 3 ] && exit 0"
    retried = step(tmp_path, f"{text}; echo 'srun: error: Unable to contact slurm controller' >&2; exit 1")
    wait_for(lambda: retried.code is not None)
    assert (retried.code, retried.starts) == (0, 3)
    count.unlink()
    retried = step(tmp_path, f"{text}; echo 'srun: error: Unable to contact slurm controller' >&2; exit 1")
    retried.end(10.0)
    assert (retried.code, retried.starts) == (1, 1), "an ended step does not restart"
