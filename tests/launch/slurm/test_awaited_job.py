"""Tests of a job whose answer the submitting process waits for: its submission and every end."""

from __future__ import annotations

import json
import signal
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from repro.config import Experiment, Layout
from repro.launch.job import Interrupt, Job
from repro.launch.slurm import profile
from repro.launch.slurm.allocation import controller
from repro.launch.slurm.allocation.nodes import NodeReport
from repro.launch.slurm.allocation.stop import REQUEUE, AllocationStop
from repro.launch.slurm.scheduler import JobState, SchedulerError
from repro.launch.slurm.submission import submit
from repro.launch.slurm.submission.job_array import ArrayShape, JobArray
from repro.launch.supervise import Ending
from tests.launch.slurm.conftest import FakeSlurm
from tests.training import TINY

JOB = Job(experiments=[Experiment(name="a", model=TINY, layout=Layout(dp=2))])
RUNNING = JobState(state="RUNNING", nodes="n1")


Answer = JobState | SchedulerError | None


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Return the imitated SLURM of the waiting process, whose intervals are short."""
    monkeypatch.setattr(submit, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(submit, "ANSWER_DELAY_S", 0.01)
    imitated = MagicMock()
    monkeypatch.setattr(submit, "Scheduler", lambda: imitated)
    return imitated


def wait(
    scheduler: MagicMock, folder: Path, *answers: Answer, signal: int = 0, quiet: bool = False
) -> dict[str, Any]:
    """Wait for job 7; SLURM answers with each state or error in turn and repeats the last, None: unknown job."""
    known = [{"7": answer} if isinstance(answer, JobState) else answer or {} for answer in answers]
    scheduler.jobs.side_effect = chain(known, repeat(known[-1]))
    interrupt = Interrupt()
    interrupt.signal = signal
    answer = submit.wait_for_answer("7", folder, interrupt, quiet=quiet)
    assert all(asked == call(["7"]) for asked in scheduler.jobs.call_args_list)
    return answer


def failed(reason: str) -> dict[str, Any]:
    return {"outcome": "error", "reason": reason, "results": []}


@pytest.mark.parametrize("quiet", [False, True])
def test_each_job_state_is_printed_once(
    scheduler: MagicMock, tmp_path: Path, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    (tmp_path / controller.ANSWER_FILE).write_text('{"outcome": "ok"}')
    pending, error = JobState(state="PENDING", reason="Resources"), SchedulerError("squeue: timed out")
    answers = (pending, pending, error, RUNNING, JobState(state="COMPLETED"))
    assert wait(scheduler, tmp_path, *answers, quiet=quiet) == {"outcome": "ok"}
    message = ["job 7 is PENDING: Resources", "job 7 is RUNNING n1"]
    assert capsys.readouterr().err.splitlines() == ([] if quiet else message)


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (JobState(state="FAILED", reason="NonZeroExitCode"), "FAILED NonZeroExitCode"),
        (JobState(state="COMPLETED"), "COMPLETED"),
        (None, "unknown"),
    ],
)
def test_missing_answer_reports_job_state_and_last_error(
    scheduler: MagicMock, tmp_path: Path, end: JobState | None, state: str
) -> None:
    log = tmp_path / "submitit" / "7_0_log.err"
    log.parent.mkdir()
    for text, error in (("", ""), ("Traceback\nKeyError: 'x'\n", ": KeyError: 'x'")):
        log.write_text(text)
        assert wait(scheduler, tmp_path, end) == failed(f"job 7 ended in state {state}{error}")


def test_wait_ends_when_slurm_stops_answering(
    scheduler: MagicMock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "SCHEDULER_TIMEOUT_S", 0.01)
    reason = "SLURM stopped answering: squeue: down"
    assert wait(scheduler, tmp_path, RUNNING, SchedulerError("squeue: down")) == failed(reason)


def test_interrupt_cancels_the_job(scheduler: MagicMock, tmp_path: Path) -> None:
    message = wait(scheduler, tmp_path, RUNNING, JobState(state="CANCELLED"), signal=2)
    assert message == {"outcome": "interrupted", "reason": "cancelled job 7", "results": []}
    assert scheduler.cancel.call_args_list == [call(["7"])]
    failure = wait(scheduler, tmp_path, SchedulerError("scancel: down"), signal=2)
    assert failure == failed("job 7 could not be cancelled: scancel: down")


def test_awaited_job_is_not_requeued(slurm: FakeSlurm, site: Path, tmp_path: Path) -> None:
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
    assert Job.load(folder / controller.JOB_FILE) == JOB
    slurm.set(refuse_after=1)
    with pytest.raises(SchedulerError, match="Invalid account"):
        submit.submit_job(folder, JOB, profile.load_profile(site), array, "mine", target="x:y")


@pytest.mark.parametrize(
    ("missing", "wrong", "outcome"),
    [("lost node n2", "", "ok"), ("", "wrong hardware: x", "ok"), ("", "", "ok"), ("", "", "hang")],
)
def test_answer_contains_nodes_outcome_and_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, wrong: str, outcome: str
) -> None:
    JOB.save(tmp_path / controller.JOB_FILE)
    reports = [NodeReport(node="n1", local=i, task=i) for i in range(2)]
    launch = MagicMock()
    launch.return_value.results.return_value = [{"rank": 0}]
    for name, value in {
        "read_allocation": MagicMock(),
        "survey_nodes": lambda *_: (reports, missing),
        "describe_wrong_hardware": lambda *_: wrong,
        "ClusterLaunch": launch,
        "supervise.watch": lambda *_, interrupted: Ending(outcome, "why", 0, []),
        "os.getloadavg": lambda: (1.2345, 9.0, 9.0),
    }.items():
        monkeypatch.setattr(f"{controller.__name__}.{name}", value)
    stop = AllocationStop("7")
    message = controller._run_awaited_job(tmp_path, "x:y", stop, {"SLURM_JOB_ID": "7"})
    assert message["load"] == 1.23
    if missing or wrong:
        assert (message["outcome"], message["reason"], message["results"]) == ("error", missing or wrong, [])
        assert ("place" in message) == (not missing)
        stop.note(REQUEUE, None)
        monkeypatch.setattr("repro.launch.slurm.allocation.stop.stop_reason", lambda *_: "preempted")
        again = controller._run_awaited_job(tmp_path, "x:y", stop, {})["reason"]
        assert again == (wrong or "stopped by SLURM (SIGUSR2): preempted")
        return
    assert (message["outcome"], message["reason"], message["results"]) == (outcome, "why", [{"rank": 0}])
    assert (message["place"]["nodes"], message["place"]["job_id"]) == (["n1"], "7")
    assert (launch.call_args.args[0], launch.call_args.kwargs["target"]) == (JOB, "x:y")
    keep_logs = None if outcome == "ok" else tmp_path / "ranks"
    assert launch.return_value.close.call_args_list == [call(keep_logs=keep_logs)]


def test_answer_is_written_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(controller.signal, "signal", handlers.__setitem__)
    asked = lambda *given: {"outcome": "hang", "asked": [str(given[0]), given[1]]}
    monkeypatch.setattr(controller, "_run_awaited_job", asked)
    assert controller.RunAwaitedJob(str(tmp_path), "x:y")() == "hang"
    answer = json.loads((tmp_path / controller.ANSWER_FILE).read_text())
    assert answer == {"outcome": "hang", "asked": [str(tmp_path), "x:y"]}
    assert {REQUEUE, signal.SIGTERM} <= set(handlers)
