"""A job whose answer is waited for: what it is asked for, and every way in which it ends."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from repro.config import ConfigError, Experiment, Layout
from repro.launch.job import Interrupt, Job
from repro.launch.slurm import profile
from repro.launch.slurm.allocation import controller as far
from repro.launch.slurm.allocation.nodes import NodeReport
from repro.launch.slurm.allocation.stop import REQUEUE, AllocationStop
from repro.launch.slurm.scheduler import JobState, SchedulerError
from repro.launch.slurm.submission import submit
from repro.launch.slurm.submission.job_array import ArrayShape, JobArray
from repro.launch.slurm.submission.profile_check import require_shared_folder
from repro.launch.supervise import Ending
from tests.launch.slurm.conftest import FakeSlurm
from tests.training import TINY

JOB = Job(experiments=[Experiment(name="a", model=TINY, layout=Layout(dp=2))])
RUNNING = JobState(state="RUNNING", nodes="n1")


class Answers:
    """A scheduler that says one thing after the other, the last for ever; an error is raised."""

    def __init__(self, *message: JobState | SchedulerError | None):
        self.message = list(message)
        self.cancelled: list[str] = []

    def jobs(self, ids: list[str]) -> dict[str, JobState]:
        assert ids == ["7"]
        found = self.message.pop(0) if len(self.message) > 1 else self.message[0]
        if isinstance(found, SchedulerError):
            raise found
        return {} if found is None else {"7": found}

    def cancel(self, ids: list[str]) -> None:
        self.cancelled += ids


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(submit, "ANSWER_DELAY_S", 0.01)


def wait(
    monkeypatch: pytest.MonkeyPatch, folder: Path, answers: Answers, signal: int = 0, quiet: bool = False
) -> dict[str, Any]:
    monkeypatch.setattr(submit, "Scheduler", lambda: answers)
    interrupt = Interrupt()
    interrupt.signal = signal
    return submit.wait_for_answer("7", folder, interrupt, quiet=quiet)


def failed(reason: str) -> dict[str, Any]:
    return {"outcome": "error", "reason": reason, "results": []}


@pytest.mark.parametrize("quiet", [False, True])
def test_each_state_is_reported_once_and_the_answer_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    (tmp_path / far.ANSWER_FILE).write_text('{"outcome": "ok"}')
    waits = JobState(state="PENDING", reason="Resources")
    hiccup = SchedulerError("squeue: timed out")
    answers = Answers(waits, waits, hiccup, RUNNING, JobState(state="COMPLETED"))
    assert wait(monkeypatch, tmp_path, answers, quiet=quiet) == {"outcome": "ok"}
    message = ["job 7 is PENDING: Resources", "job 7 is RUNNING n1"]
    assert capsys.readouterr().err.splitlines() == ([] if quiet else message)


@pytest.mark.parametrize(
    ("end", "word"),
    [
        (JobState(state="FAILED", reason="NonZeroExitCode"), "FAILED NonZeroExitCode"),
        (JobState(state="COMPLETED"), "COMPLETED"),
        (None, "an unknown state"),
    ],
)
def test_a_job_without_an_answer_ended_in_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: JobState | None, word: str
) -> None:
    assert wait(monkeypatch, tmp_path, Answers(end)) == failed(f"job 7 ended in {word}")
    (tmp_path / "submitit").mkdir()
    (tmp_path / "submitit" / "7_0_log.err").write_text("Traceback\nKeyError: 'x'\n")
    assert wait(monkeypatch, tmp_path, Answers(end)) == failed(f"job 7 ended in {word}: KeyError: 'x'")


def test_a_slurm_that_is_silent_for_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "SCHEDULER_TIMEOUT_S", 0.01)
    reason = "SLURM stopped answering: squeue: down"
    assert wait(monkeypatch, tmp_path, Answers(RUNNING, SchedulerError("squeue: down"))) == failed(reason)


def test_who_interrupts_cancels_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(RUNNING, JobState(state="CANCELLED"))
    message = wait(monkeypatch, tmp_path, answers, signal=2)
    assert message == {"outcome": "interrupted", "reason": "cancelled job 7", "results": []}
    assert answers.cancelled == ["7"]
    silent = wait(monkeypatch, tmp_path, Answers(SchedulerError("scancel: down")), signal=2)
    assert silent == failed("job 7 could not be cancelled: scancel: down")


def test_it_is_submitted_once_and_never_requeued(slurm: FakeSlurm, site: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    folder = tmp_path / "errand"
    folder.mkdir()
    shape = ArrayShape(nodes=1, tasks_per_node=2, time_min=20, partition="debug")
    array = JobArray(shape=shape, bundles=())
    assert submit.submit_job(folder, JOB, profile.load_profile(site), array, "mine", target="x:y") == "12"
    script = slurm.state["scripts"]["12"].splitlines()
    assert "#SBATCH --no-requeue" in script
    assert "#SBATCH --requeue" not in script
    assert "#SBATCH --job-name=mine" in script
    assert (folder / "profile.toml").read_text() == site.read_text()
    assert Job.load(folder / far.JOB_FILE) == JOB
    slurm.set(refuse_after=1)
    with pytest.raises(SchedulerError, match="Invalid account"):
        submit.submit_job(folder, JOB, profile.load_profile(site), array, "mine", target="x:y")


def test_its_answer_is_below_the_shared_folder(site: Path, tmp_path: Path) -> None:
    require_shared_folder(profile.load_profile(site), Path("/elsewhere"), option="--output", noun="file")
    site.write_text(site.read_text() + f'[storage]\nshared = "{tmp_path}"\n')
    require_shared_folder(profile.load_profile(site), tmp_path / "below", option="--output", noun="file")
    with pytest.raises(ConfigError, match=f"--output = '/elsewhere': must be a file in {tmp_path}"):
        require_shared_folder(profile.load_profile(site), Path("/elsewhere"), option="--output", noun="file")


class Launched:
    """A launch in the place of ranks on nodes."""

    closed: list[Path | None]

    def __init__(self, job: Job, logs: Path, *_: Any, **named: Any):
        assert (job, named["target"]) == (JOB, "x:y")
        Launched.closed = []

    def start(self) -> None: ...
    def results(self, index: int) -> list[dict[str, Any]]:
        return [{"rank": 0}]

    def close(self, *, keep_logs: Path | None) -> None:
        self.closed.append(keep_logs)


@pytest.mark.parametrize(
    ("missing", "wrong", "outcome"),
    [("lost node n2", "", "ok"), ("", "wrong hardware: x", "ok"), ("", "", "ok"), ("", "", "hang")],
)
def test_the_far_side_says_where_it_ran_and_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, wrong: str, outcome: str
) -> None:
    JOB.save(tmp_path / far.JOB_FILE)
    reports = [NodeReport(node="n1", local=i, task=i) for i in range(2)]
    site = type("Allocation", (), {"site": None})
    monkeypatch.setattr(far, "read_allocation", lambda folder, environment: site)
    monkeypatch.setattr(far, "survey_nodes", lambda allocation, folder, stop: (reports, missing))
    monkeypatch.setattr(far, "describe_wrong_hardware", lambda reports, site: wrong)
    monkeypatch.setattr(far, "ClusterLaunch", Launched)
    monkeypatch.setattr(far.supervise, "watch", lambda launch, interrupted: Ending(outcome, "why", 0, []))
    stop = AllocationStop("7")
    monkeypatch.setattr(far.os, "getloadavg", lambda: (1.2345, 9.0, 9.0))
    message = far._run_awaited_job(tmp_path, "x:y", stop, {"SLURM_JOB_ID": "7"})
    assert message["load"] == 1.23
    if missing or wrong:
        assert (message["outcome"], message["reason"], message["results"]) == ("error", missing or wrong, [])
        assert ("place" in message) == (not missing)
        stop.note(REQUEUE, None)
        monkeypatch.setattr("repro.launch.slurm.allocation.stop.stop_reason", lambda *_: "preempted")
        again = far._run_awaited_job(tmp_path, "x:y", stop, {})["reason"]
        assert again == (wrong or "stopped by SLURM (SIGUSR2): preempted")
        return
    assert (message["outcome"], message["reason"], message["results"]) == (outcome, "why", [{"rank": 0}])
    assert (message["place"]["nodes"], message["place"]["job_id"]) == (["n1"], "7")
    assert Launched.closed == [None if outcome == "ok" else tmp_path / "ranks"]


def test_the_answer_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(far.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(
        far, "_run_awaited_job", lambda *given: {"outcome": "hang", "asked": [str(given[0]), given[1]]}
    )
    assert far.RunAwaitedJob(str(tmp_path), "x:y")() == "hang"
    answer = json.loads((tmp_path / far.ANSWER_FILE).read_text())
    assert answer == {"outcome": "hang", "asked": [str(tmp_path), "x:y"]}
    assert {REQUEUE, signal.SIGTERM} <= set(handlers)


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job(experiments=JOB.experiments * 2, rounds=3, compare=True, apart=True, checkpoints="c", as_rank=1)
    job.save(tmp_path / "job.json")
    assert asdict(Job.load(tmp_path / "job.json")) == asdict(job)
    assert (job.world, replace(job, as_rank=0).world, JOB.world) == (1, 1, 2), (
        "one process is one rank of them"
    )
    with pytest.raises(AssertionError):
        replace(job, rounds=0)
    assert json.loads((tmp_path / "job.json").read_text())["rounds"] == 3
