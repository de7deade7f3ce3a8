"""A step's command, to the word, and `srun` as a child: started again, waited for, killed, quoted."""

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
def test_a_step_is_asked_for(tasks: int, nodes: int) -> None:
    asked = srun_step.srun_command(parse_profile({}, file="f"), tasks, 2, ["module", "folder"])
    assert asked == [
        *(
            "srun",
            "--overlap",
            "--relative=0",
            f"--nodes={nodes}",
            f"--ntasks={tasks}",
            "--distribution=plane=2",
        ),
        *("--kill-on-bad-exit=0", "--wait=0", sys.executable, "-m", "module", "folder"),
    ]


def step(folder: Path, text: str) -> SrunStep:
    return SrunStep(["sh", "-c", text], folder / "srun.err")


def test_an_allocation_starts_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[list[str], Path]] = []
    monkeypatch.setattr(srun_step, "SrunStep", lambda command, errors: made.append((command, errors)))
    site = parse_profile({}, file="f")
    given = Allocation(nodes=2, per_node=3, site=site, address="a", umask=0)
    given.step(4, "module", tmp_path)
    assert given.tasks == 6
    assert made == [(srun_step.srun_command(site, 4, 3, ["module", str(tmp_path)]), tmp_path / "srun.err")]


def test_its_end_and_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_it_is_signalled_and_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    heard = step(tmp_path, f"trap 'echo heard >&2; exit 4' USR1; touch {ready}; while :; do sleep 0.02; done")
    wait_for(ready.exists)
    heard.signal(signal.SIGUSR1)
    heard.end(10.0)
    assert (heard.code, heard.last_error_line()) == (4, "heard")
    deaf = step(tmp_path, "exec sleep 60")
    assert deaf.code is None
    deaf.end(0.01)
    assert deaf.code == -signal.SIGKILL


def test_it_starts_again_while_slurmctld_is_gone_and_not_for_ever(tmp_path: Path) -> None:
    count = tmp_path / "count"
    text = f"echo x >> {count}; [ $(wc -l < {count}) -ge 3 ] && exit 0"
    gone = step(tmp_path, f"{text}; echo 'srun: error: Unable to contact slurm controller' >&2; exit 1")
    wait_for(lambda: gone.code is not None)
    assert (gone.code, gone.starts) == (0, 3)
    count.unlink()
    gone = step(tmp_path, f"{text}; echo 'srun: error: Unable to contact slurm controller' >&2; exit 1")
    gone.end(10.0)
    assert (gone.code, gone.starts) == (1, 1), "who ends it does not want it again"
