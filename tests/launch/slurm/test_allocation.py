"""An allocation does what a local run does, and survives what clusters do to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from repro.config import Experiment, Layout, Model, Training
from repro.launch.failures import failure
from repro.launch.job import Job
from repro.launch.slurm import channel, cluster
from repro.launch.slurm.crew import Crew, welcome
from repro.launch.slurm.nodes import Report
from tests.launch.held_session import HELD
from tests.launch.runs import experiments, fill, run, small_disk, wait_for, write_suite
from tests.launch.slurm.allocations import PROFILE, Srun, Submission

SLOW = {"FAKE_STEP_S": "0.3"}


@pytest.fixture
def submission(tmp_path: Path) -> Submission:
    return Submission(tmp_path, write_suite(tmp_path, experiments("a", "b"), limits="hang_s = 4"))


@contextmanager
def running(submission: Submission, **options: object) -> Iterator[Srun]:
    srun = Srun(submission, **options)  # type: ignore[arg-type]
    try:
        yield srun
    finally:
        srun.kill()


def classes(submission: Submission) -> dict[str, str]:
    outcomes, reasons = submission.outcomes(), submission.reasons()
    return {name: failure(outcome, reasons[name]) for name, outcome in outcomes.items()}


def gone(ranks: dict[int, psutil.Process]) -> bool:
    """Whether all of them ended; whoever inherits the orphans may reap them late."""

    def ended(rank: psutil.Process) -> bool:
        try:
            return rank.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_for(lambda: all(ended(rank) for rank in ranks.values()), 5)
    return True


def test_real_ranks_train_as_locally(tmp_path: Path) -> None:
    """Real ranks on two nodes, in a comparison: the same losses as the local launcher's, bit for bit."""
    body = (
        experiments("a", "b", extra="layout = { dp = 1, tp = 2 }")
        + '\n[[compare]]\nbaseline = "a"\nsubjects = ["b"]\nrounds = 2'
    )
    suite = write_suite(tmp_path, body, limits="hang_s = 60")
    submission = Submission(tmp_path, suite)
    with running(submission, REPRO_RANK_TARGET="repro.launch.session:run_rank") as srun:
        assert srun.wait(90) == [0, 0], srun.log()
    assert run(suite, tmp_path / "local", fake=False)[0] == 0
    slurm = submission.records()
    local = [
        json.loads(line)
        for path in (tmp_path / "local" / "records").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]

    def losses(records: list[dict[str, object]]) -> dict[object, object]:
        return {r["name"]: r["series"]["loss"] for r in records if r["kind"] == "experiment"}  # type: ignore[index]

    assert losses(slurm) == losses(local)
    assert len(losses(slurm)) == 2
    assert [r["name"] for r in slurm if r["kind"] == "comparison"] == ["a vs b"]
    place = slurm[0]["provenance"]["slurm"]
    assert (place["nodes"], place["tasks_per_node"], place["job_id"]) == (["n1", "n2"], 1, "7")
    assert submission.state["phase"] == "ended"


def test_each_rank_knows_its_place(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, experiments("a", extra="layout = { dp = 4 }"))
    submission = Submission(tmp_path, suite)
    with running(submission, tasks=4, per_node=2, **SLOW) as srun:
        ranks = srun.reach("a")
        assert sorted(ranks) == [0, 1, 2, 3]
        for number, rank in ranks.items():
            environment = rank.environ()
            assert environment["RANK"] == str(number)
            assert environment["LOCAL_RANK"] == str(number % 2)
            assert environment["SLURMD_NODENAME"] == f"n{1 + number // 2}"
            assert environment["WORLD_SIZE"] == "4"
            assert environment["MASTER_ADDR"] == "127.0.0.1"
            assert environment["GLOO_SOCKET_IFNAME"] == "lo"
            assert f"tcp://127.0.0.1:{environment['MASTER_PORT']}" in rank.cmdline()


def test_a_killed_rank_costs_one_case(submission: Submission) -> None:
    with running(submission, FAKE_FAULT="kill:a:1:2") as srun:
        assert srun.wait() == [0, 0], srun.log()
    assert classes(submission) == {"a": "rank-killed", "b": ""}
    assert submission.reasons()["a"].startswith("rank 1 was killed by signal 9 (SIGKILL) at step 2, backward")
    logs = submission.folder / "logs" / "0"
    assert [path.name for path in logs.iterdir()] == [submission.records()[0]["key"]], "logs of failures only"


@pytest.mark.parametrize(("private", "others_may"), [("true", 0), ("false", stat.S_IRGRP | stat.S_IROTH)])
def test_files_are_the_users_own_unless_the_profile_says_otherwise(
    tmp_path: Path, private: str, others_may: int
) -> None:
    suite = write_suite(tmp_path, experiments("a"))
    profile = f"{PROFILE}[storage]\nprivate = {private}\n"
    submission = Submission(tmp_path, suite, profile=profile)
    made_here = {*submission.results.rglob("*"), submission.results}
    with running(submission, FAKE_FAULT="kill:a:1:2") as srun:
        made_here |= set(srun.logs)
        assert srun.wait() == [0, 0], srun.log()
    written = [path for path in submission.results.rglob("*") if path not in made_here]
    kinds = {path.name.rpartition(".")[2] for path in written}
    assert {"jsonl", "out", "err", "pkl"} <= kinds, "records, logs of ranks, submitit's result"
    for path in written:
        if path.suffix == ".pkl" or path.name.startswith("."):
            continue  # submitit's umask is the script's; what is hidden is for one process
        assert path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) & ~0o011 == others_may, path


def test_a_case_without_memory_costs_one_case(tmp_path: Path) -> None:
    suite = write_suite(tmp_path, experiments("a", "b"), limits="hang_s = 20, memory_bytes = 50_000_000")
    submission = Submission(tmp_path, suite)
    with running(submission, FAKE_FAULT="memory:a:1:1") as srun:
        assert srun.wait() == [0, 0], srun.log()
    assert classes(submission) == {"a": "out-of-memory", "b": ""}


def test_a_stopped_rank_is_a_hang(submission: Submission) -> None:
    with running(submission, FAKE_FAULT="stop:a:1:2") as srun:
        assert srun.wait() == [0, 0], srun.log()
    assert submission.outcomes() == {"a": "hang", "b": "ok"}
    assert "rank 1 is stopped (SIGSTOP or a debugger) at step 2" in submission.reasons()["a"]
    logs = submission.folder / "logs" / "0" / submission.records()[0]["key"]
    assert (
        "rank 1 on n2: at step 2, backward, after all_reduce #3 on dp" in (logs / "positions.txt").read_text()
    )
    assert "most recent call first" in (logs / "rank-0.err").read_text(), "no stacks of the rank that waits"


def test_a_lost_agent_is_named_and_the_rest_is_asked_for_again(submission: Submission) -> None:
    with running(submission, **SLOW) as srun:
        ranks = srun.reach("a")
        srun.tasks[1].kill()
        assert srun.wait() == [255, -signal.SIGKILL], srun.log()
        assert gone(ranks)
    assert classes(submission) == {"a": "lost-node"}
    assert "lost node n2" in submission.reasons()["a"]
    assert submission.state["phase"] == "stopped"
    assert "requeue 7" in submission.calls.read_text()
    with running(submission, restarts=1) as srun:
        assert srun.wait() == [0, 0], srun.log()
    assert submission.outcomes() == {"a": "error", "b": "ok"}, "what failed waits until it is asked for"


def test_without_their_controller_agents_and_ranks_end(submission: Submission) -> None:
    with running(submission, **SLOW) as srun:
        ranks = srun.reach("a")
        assert len(ranks) == 2
        srun.tasks[0].kill()
        assert srun.wait() == [-signal.SIGKILL, 1], srun.log()
        assert gone(ranks)
    assert not (submission.submitit / "7_1_result.pkl").exists(), "submitit would take the job for done"
    with running(submission, restarts=1) as srun:
        assert srun.wait() == [0, 0], srun.log()
    assert submission.outcomes() == {"a": "ok", "b": "ok"}


def test_preemption_requeues_and_runs_again_only_what_it_met(submission: Submission) -> None:
    with running(submission, **SLOW) as srun:
        srun.reach("b")
        srun.signal(signal.SIGUSR2)
        assert srun.wait()[0] == 255, srun.log()
    assert submission.outcomes() == {"a": "ok", "b": "interrupted"}
    assert classes(submission)["b"] == "preempted"
    state = submission.state
    assert (state["phase"], state["stopped"]["signal"]) == ("stopped", "SIGUSR2")
    assert submission.calls.read_text().splitlines()[-1] == "requeue 7"
    before = len(submission.records())
    with running(submission, restarts=1) as srun:
        assert srun.wait() == [0, 0], srun.log()
    assert submission.outcomes() == {"a": "ok", "b": "ok"}
    assert len(submission.records()) == before + 1, "what was done is not done again"


@pytest.mark.timeout(300)
def test_a_long_training_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Asked to stop, real ranks write one after the step that they are in; the next start of the job goes on there."""
    long = "training = { steps = 8, untimed_steps = 1, checkpoint_every = 8 }"
    suite = write_suite(tmp_path, f'[[experiment]]\nname = "a"\n{long}', limits="hang_s = 100")
    submission = Submission(tmp_path, suite)
    (tmp_path / "a").touch()
    held = {"REPRO_RANK_TARGET": "tests.launch.held_session:run_rank", "FAKE_HOLD": str(tmp_path)}
    with running(submission, **held) as srun:
        srun.reach("a", HELD)
        srun.signal(signal.SIGUSR2)
        assert srun.wait(90)[0] == 255, srun.log()
    assert classes(submission) == {"a": "preempted"}
    with running(submission, restarts=1, **held) as srun:
        assert srun.wait(90) == [0, 0], srun.log()
    assert submission.outcomes() == {"a": "ok"}
    record = submission.records()[-1]
    assert len(record["series"]["loss"]) == 8
    assert record["series"]["resumed_from"] == [HELD + 1]


def test_a_cancelled_job_is_not_requeued(submission: Submission) -> None:
    submission.says(state="CANCELLED", preempted="None")
    with running(submission, **SLOW) as srun:
        srun.reach("a")
        srun.signal(signal.SIGTERM)
        assert srun.wait()[0] == 128 + signal.SIGTERM, srun.log()
    assert classes(submission) == {"a": "cancelled"}
    assert "requeue" not in submission.calls.read_text()


def test_wrong_hardware_starts_nothing(tmp_path: Path) -> None:
    profile = 'system = "dgx2"\n[slurm]\ngpus_per_node = 16\n'
    suite = write_suite(tmp_path, experiments("a", "b"))
    submission = Submission(tmp_path, suite, profile=profile)
    with running(submission) as srun:
        assert srun.wait() == [0, 0], srun.log()
    assert set(submission.outcomes().values()) == {"error"}
    assert set(classes(submission).values()) == {"wrong-hardware"}
    assert submission.reasons()["a"].startswith("wrong hardware: node n1 has ")
    assert submission.reasons()["a"].endswith(": not comparable")


def test_a_silent_agent_is_lost(tmp_path: Path) -> None:
    """A node that is cut off ends no connection: only its silence tells."""
    crew = Crew("127.0.0.1", welcome(interface="", variables={}, umask=0o077), lost_s=0.5)
    channel.publish(tmp_path / "channel.json", crew.place)
    report = Report(node="n2", node_index=1, local=0, task=0, tasks=1)
    link, _ = channel.connect(tmp_path / "channel.json", {"report": report.message()}, seconds=10)
    assert crew.gather(1, 10, lambda: False)
    with pytest.raises(channel.Lost, match="task 0 is here already"):
        channel.connect(tmp_path / "channel.json", {"report": report.message()}, seconds=0.2)
    wait_for(lambda: crew.lost(0) == "n2: no word from its agent for 0.5 s")
    crew.close(dismiss=True)
    link.close()


def test_without_a_port_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that names none would leave every rank waiting at port 0 until the launch counts as a hang."""
    monkeypatch.setattr(cluster, "PORT_S", 0.3)
    crew = Crew("127.0.0.1", welcome(interface="", variables={}, umask=0o077), lost_s=30)
    channel.publish(tmp_path / "channel.json", crew.place)
    report = Report(node="n2", node_index=0, local=0, task=0, tasks=1)
    link, _ = channel.connect(tmp_path / "channel.json", {"report": report.message()}, seconds=10)
    assert crew.gather(1, 10, lambda: False)
    model = Model(name="least", layers=1, hidden=1, heads=1, vocab=2, seq=1)
    job = Job(experiments=[Experiment(name="a", model=model, layout=Layout(), training=Training())])
    launch = cluster.ClusterLaunch(job, tmp_path / "logs", crew, target="", on_loss=lambda why: None)
    launch.start()
    assert launch.poll(0) == 1
    said = launch.report(0)
    assert said is not None
    assert said["reason"] == "the agent on n2 named no port within 0.3 s"
    assert [message["do"] for message in link.wait(10)] == ["port"]
    launch.close(keep_logs=None)
    crew.close(dismiss=False)
    link.close()


def test_strangers_and_stale_files_do_no_harm(submission: Submission) -> None:
    """An agent that finds a former controller's file, or the wrong token, asks again; a stranger is refused."""
    path = channel.file_of(submission.folder, "7", 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()[1]
    channel.publish(path, channel.Place("127.0.0.1", gone, "stale"))
    with running(submission, **SLOW) as srun:
        wait_for(lambda: (place := channel.find(path)) is not None and place.port != gone)
        place = channel.find(path)
        assert place is not None
        assert os.stat(path).st_mode & 0o777 == 0o600
        wrong = tmp = submission.folder / "wrong.json"
        channel.publish(tmp, place._replace(token="guessed"))
        with pytest.raises(channel.Lost, match="wrong token"):
            channel.connect(wrong, {"report": {}}, seconds=0.5)
        with socket.create_connection((place.address, place.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert srun.wait() == [0, 0], srun.log()
    assert submission.outcomes() == {"a": "ok", "b": "ok"}
    assert not path.exists()


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        suite = write_suite(tmp_path, experiments("a", "b"))
        submission = Submission(disk, suite)
        with running(submission, FAKE_RING=str(tmp_path), **SLOW) as srun:
            srun.reach("a")
            fill(disk)
            assert srun.wait()[0] == 1, srun.log()
        assert submission.outcomes() == {"a": "error"}
        assert "disk full" in submission.reasons()["a"]
