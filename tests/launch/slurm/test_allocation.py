"""Tests of fake allocations: results as in a local run, and failures of ranks, nodes, SLURM and disks."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.held_session import HELD
from tests.launch.runs import experiments, fill, run, small_disk, wait_for, write_suite
from tests.launch.slurm.allocations import Job, Submission
from tests.records import lines

pytestmark = pytest.mark.slow


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    return Submission(tmp_path, write_suite(tmp_path, experiments("a", "b")))


def all_ended(ranks: dict[int, psutil.Process]) -> bool:
    """Wait until all ranks have ended; their new parent may reap them later."""

    def ended(rank: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return rank.status() == psutil.STATUS_ZOMBIE
        return True

    wait_for(lambda: all(ended(rank) for rank in ranks.values()))
    return True


def test_allocation_and_local_run_have_equal_losses(tmp_path: Path) -> None:
    """Compared experiments with real ranks on two nodes and with the local launcher have bit-identical losses."""
    body = (
        experiments("a", "b", extra="layout = { dp = 1, tp = 2 }")
        + '\n[[compare]]\nbaseline = "a"\nsubjects = ["b"]\nrounds = 2'
    )
    suite = write_suite(tmp_path, body)
    submission = Submission(tmp_path, suite)
    with Job(submission, REPRO_RANK_TARGET="repro.launch.rank.session:run_rank") as job:
        assert job.wait() == 0, job.log()
    assert run(suite, tmp_path / "local", fake=False)[0] == 0
    slurm = submission.records()

    def losses(records: list[dict[str, Any]]) -> dict[str, list[float]]:
        return {r["name"]: r["series"]["loss"] for r in records if r["kind"] == "experiment"}

    assert losses(slurm) == losses(lines(tmp_path / "local"))
    assert len(losses(slurm)) == 2
    assert [r["name"] for r in slurm if r["kind"] == "comparison"] == ["a vs b"]
    provenance = slurm[0]["provenance"]["slurm"]
    assert (provenance["nodes"], provenance["tasks_per_node"], provenance["job_id"]) == (["n1", "n2"], 1, "7")
    assert submission.state["phase"] == "ended"


def test_killed_hanging_and_too_large_ranks_fail_only_their_cases(tmp_path: Path) -> None:
    """Only failed cases have logs. Files are private by default."""
    body = experiments("a", "large", "stuck", "b")
    for name, limit in (("large", "memory_bytes = 50_000_000"), ("stuck", "hang_s = 4")):
        body = body.replace(f'name = "{name}"', f'name = "{name}"\nlimits.{limit}')
    submission = Submission(tmp_path, write_suite(tmp_path, body))
    with Job(submission, FAKE_FAULT="kill:a:1:2,memory:large:1:1,stop:stuck:1:2") as job:
        assert job.wait() == 0, job.log()
    failures = {"a": "rank-killed", "large": "out-of-memory", "stuck": "hang", "b": ""}
    assert submission.failure_classes() == failures
    reasons = submission.reasons()
    assert reasons["a"].startswith("rank 1 was killed by signal 9 (SIGKILL) at step 2, backward")
    assert "rank 1 is stopped (SIGSTOP or a debugger) at step 2" in reasons["stuck"]
    keys = {record["name"]: record["key"] for record in submission.records()}
    logs = submission.folder / "logs" / "0"
    assert {path.name for path in logs.iterdir()} == {keys[name] for name in ("a", "large", "stuck")}
    position = "rank 1 on n2: at step 2, backward, after collective all_reduce #3 in group dp"
    assert position in (logs / keys["stuck"] / "positions.txt").read_text()
    stacks = (logs / keys["stuck"] / "rank-0.err").read_text()
    assert "most recent call first" in stacks, "the waiting rank has no stacks"
    assert job.modes_of_files() == {0}


def test_lost_task_names_its_node_and_requeues_the_job(submission: Submission) -> None:
    """A rank without its task cannot report, and the allocation cannot continue without the node."""
    with Job(submission, hold="a") as job:
        ranks = job.reach("a")
        job.tasks()[1].kill()
        assert job.wait() == 255, job.log()
        assert all_ended(ranks)
    assert submission.failure_classes() == {"a": "lost-node"}
    assert "lost node n2: the rank's task ended without a report" in submission.reasons()["a"]
    assert submission.state["phase"] == "stopped"
    assert "requeue 7" in submission.calls.read_text()
    with Job(submission, restarts=1) as job:
        assert job.wait() == 0, job.log()
    assert submission.outcomes() == {"a": "error", "b": "ok"}, "failed cases run again only on request"


def test_step_that_does_not_start_is_reported(submission: Submission) -> None:
    (submission.bin / "srun").write_text(
        "#!/bin/sh\necho 'srun: error: Node n2 is not available' >&2\nexit 1\n"
    )
    with Job(submission) as job:
        assert job.wait() == 0, job.log()
    assert submission.failure_classes() == {"a": "lost-node", "b": "lost-node"}
    assert "0 of 2 SLURM tasks started: srun: error: Node n2 is not available" in submission.reasons()["a"]


def test_unavailable_slurmctld_and_occupied_port_fail_no_case(submission: Submission) -> None:
    """srun fails within seconds, but a site may restart slurmctld while jobs run."""
    srun = submission.bin / "srun"
    error = "srun: error: Unable to confirm allocation for job 7: Unable to contact slurm controller (connect failure)"
    up, refused, busy = (submission.ring / name for name in ("up", "refused", "busy"))
    refuse = f"    if not os.path.exists('{up}'):\n        open('{refused}', 'w')\n        sys.exit('{error}\\n')\n"
    srun.write_text(srun.read_text().replace("    options = {}", f"{refuse}    options = {{}}"))
    with Job(submission, FAKE_BUSY=str(busy)) as job:
        wait_for(refused.exists)
        up.touch()
        assert job.wait() == 0, job.log()
    assert busy.exists()
    assert submission.outcomes() == {"a": "ok", "b": "ok"}


def test_tasks_and_ranks_end_without_their_controller(submission: Submission) -> None:
    with Job(submission, hold="a") as job:
        ranks = {**job.reach("a"), **{2 + number: task for number, task in job.tasks().items()}}
        assert len(ranks) == 4
        job.controller.kill()
        assert job.wait() == -signal.SIGKILL, job.log()
        assert all_ended(ranks)
    with Job(submission, restarts=1) as job:
        assert job.wait() == 0, job.log()
    assert submission.outcomes() == {"a": "ok", "b": "ok"}


def test_preemption_repeats_only_the_interrupted_case(submission: Submission) -> None:
    with Job(submission, hold="b") as job:
        job.reach("b")
        job.signal(signal.SIGUSR2)
        assert job.wait() == 255, job.log()
    assert submission.outcomes() == {"a": "ok", "b": "interrupted"}
    assert submission.failure_classes()["b"] == "preempted"
    state = submission.state
    assert (state["phase"], state["stopped"]["signal"]) == ("stopped", "SIGUSR2")
    assert submission.calls.read_text().splitlines()[-1] == "requeue 7"
    before = len(submission.records())
    with Job(submission, restarts=1) as job:
        assert job.wait() == 0, job.log()
    assert submission.outcomes() == {"a": "ok", "b": "ok"}
    assert len(submission.records()) == before + 1, "finished cases do not run again"


def test_preempted_training_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    """After a stop request, real ranks write a checkpoint after their step, and the next start resumes from it."""
    long = "training = { steps = 8, untimed_steps = 1, checkpoint_every = 8 }"
    suite = write_suite(tmp_path, f'[[experiment]]\nname = "a"\n{long}', limits="hang_s = 100")
    submission = Submission(tmp_path, suite)
    target = "tests.launch.held_session:run_rank"
    with Job(submission, hold="a", REPRO_RANK_TARGET=target) as job:
        job.reach("a", HELD)
        job.signal(signal.SIGUSR2)
        assert job.wait() == 255, job.log()
    assert submission.failure_classes() == {"a": "preempted"}
    with Job(submission, hold="a", restarts=1, REPRO_RANK_TARGET=target) as job:
        assert job.wait() == 0, job.log()
    assert submission.outcomes() == {"a": "ok"}
    record = submission.records()[-1]
    assert len(record["series"]["loss"]) == 8
    assert record["series"]["resumed_from"] == [HELD + 1]


@pytest.mark.parametrize("have_tasks_ended", [False, True])
def test_cancelled_job_is_not_requeued(submission: Submission, have_tasks_ended: bool) -> None:
    """SLURM may signal or end the tasks before it signals the controller. These tasks are not lost."""
    submission.set_job_state(state="CANCELLED", preempted="None")
    with Job(submission, hold="a") as job:
        job.reach("a")
        for task in job.tasks().values():
            task.send_signal(signal.SIGKILL if have_tasks_ended else signal.SIGTERM)
        if have_tasks_ended:
            job.controller.send_signal(signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM, job.log()
    assert submission.failure_classes() == {"a": "cancelled"}
    assert "requeue" not in submission.calls.read_text()


def test_full_disk_is_reported(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        suite = write_suite(tmp_path, experiments("a", "b"))
        submission = Submission(disk, suite)
        with Job(submission, FAKE_RING=str(tmp_path), hold="a") as job:
            job.reach("a")
            fill(disk)
            (submission.ring / "a").unlink()
            assert job.wait() == 1, job.log()
        assert submission.outcomes() == {"a": "error"}
        assert "disk full" in submission.reasons()["a"]
