"""Tests of the controller of a bundle: allocation, survey of the nodes, refused hardware, and requeue of the job."""

from __future__ import annotations

import json
import resource
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from repro.config import ConfigError, Experiment, Layout
from repro.config.suites import Entry, Suite
from repro.launch.job import Job
from repro.launch.plan import Task
from repro.launch.slurm.allocation import controller
from repro.launch.slurm.allocation.bundle import Bundle, SubmissionWork
from repro.launch.slurm.allocation.nodes import NodeReport
from repro.launch.slurm.allocation.srun_step import Allocation
from repro.launch.slurm.allocation.stop import AllocationStop
from repro.launch.slurm.profile import parse_profile
from tests.clock import Clock
from tests.records import lines
from tests.training import TINY

EXPERIMENTS = tuple(Experiment(name=name, model=TINY, layout=Layout(dp=2)) for name in "ab")
REPORTS = [NodeReport(node=f"n{task}", local=0, task=task) for task in range(2)]
SITE = parse_profile({}, file="site.toml")


@pytest.mark.parametrize(
    ("limits", "expected", "umask"),
    [
        ((1024, 4096), [(4096, 4096)], 0o077),
        ((1024, 1 << 20), [(16384, 1 << 20)], 0o022),
        ((1024, -1), [(16384, -1)], 0o077),
        ((16384, -1), [], 0o077),
    ],
)
def test_allocation_is_read_from_environment_and_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Any, expected: list[Any], umask: int
) -> None:
    masks: list[int] = []
    set_to: list[Any] = []
    monkeypatch.setattr(controller.os, "umask", masks.append)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: set_to.append(limit))
    private = "true" if umask == 0o077 else "false"
    profile = f'[environment]\ninterface = "lo"\n[storage]\nprivate = {private}\n'
    (tmp_path / "profile.toml").write_text(profile)
    found = controller.read_allocation(tmp_path, {"SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "4"})
    assert (found.nodes, found.per_node, found.tasks, found.address) == (3, 4, 12, "127.0.0.1")
    assert (found.umask, masks, set_to) == (umask, [umask], expected)
    single = controller.read_allocation(tmp_path, {})
    assert (single.nodes, single.per_node) == (1, 1)


class SurveyStep:
    """The job step of the node survey: two tasks write their reports, then srun ends."""

    tasks = 2

    def __init__(self, reports: list[NodeReport], polls: int):
        self.reports, self.polls = reports, polls
        self.calls: list[Any] = []

    def step(self, tasks: int, module: str, folder: Path) -> SurveyStep:
        self.calls.append((tasks, module, folder))
        assert list(folder.iterdir()) == [], "the folder has files of an earlier start"
        for report in self.reports:
            (folder / f"report-{report.task}.json").write_text(json.dumps(vars(report)))
        return self

    @property
    def code(self) -> int | None:
        self.polls -= 1
        return 0 if self.polls < 0 else None

    def end(self, seconds: float) -> None:
        self.calls.append(seconds)

    def last_error_line(self) -> str:
        return "" if self.polls > 100 else "srun: error: n1 is down"


def test_survey_awaits_reports_and_names_lost_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, folder = Clock().rules(monkeypatch, controller), tmp_path / "nodes"
    folder.mkdir()
    (folder / "report-0.json").touch()
    hostnames = "submitit.slurm.slurm.SlurmJobEnvironment.hostnames"
    monkeypatch.setattr(hostnames, ["n0", "n1"])
    stop = AllocationStop("7")

    def survey(step: Any) -> tuple[list[NodeReport], str]:
        clock.now = 100.0
        return controller.survey_nodes(step, folder, stop)

    full, half = SurveyStep(REPORTS, polls=3), SurveyStep(REPORTS[:1], polls=0)
    assert survey(full) == (REPORTS, "")
    assert full.calls == [(2, "repro.launch.slurm.allocation.nodes", folder), 0.0]
    assert not folder.exists()
    assert clock.now == pytest.approx(100 + 3 * controller.POLL_INTERVAL_S)
    lost = "1 of 2 SLURM tasks started: srun: error: n1 is down"
    assert survey(half) == (REPORTS[:1], f"lost node n1: {lost}")
    never = "lost node n0, n1: 0 of 2 SLURM tasks started: no report within 300 s"
    assert survey(SurveyStep([], polls=10**6)) == ([], never)
    assert 0 <= clock.now - 100 - controller.BOOT_TIMEOUT_S < 2 * controller.POLL_INTERVAL_S
    monkeypatch.setattr(hostnames, ["n0"])
    assert survey(half)[1] == f"lost node of the allocation: {lost}"
    stop.give_up("enough")
    assert (survey(SurveyStep(REPORTS, polls=10**6))[1], clock.now) == ("", 100.0)


@pytest.fixture
def submission(tmp_path: Path) -> Path:
    folder = tmp_path / "results" / "jobs" / "test"
    folder.mkdir(parents=True)
    entries = tuple(Entry(experiment=experiment, expect="ok") for experiment in EXPERIMENTS)
    suite = Suite(name="s", file="s.toml", entries=entries)
    bundles = tuple(Bundle(index=index, tasks=(Task(experiments=EXPERIMENTS),)) for index in range(2))
    SubmissionWork(suite=suite, bundles=bundles, rerun=True).save(folder)
    return folder


ENVIRONMENT = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}


@pytest.mark.parametrize(
    ("missing", "mismatch", "stopped", "found"),
    [
        ("", "", False, "ran"),
        ("lost node n2", "", False, "lost node n2"),
        ("lost node n2", "", True, ""),
        ("", "wrong hardware: x", False, "wrong hardware: x"),
        ("", "wrong hardware: x", True, "wrong hardware: x"),
    ],
)
def test_bundle_runs_only_on_complete_and_correct_nodes(
    submission: Path, monkeypatch: pytest.MonkeyPatch, missing: str, mismatch: str, stopped: bool, found: str
) -> None:
    allocation = Allocation(nodes=2, per_node=1, site=SITE, address="127.0.0.1", umask=0)
    runner = MagicMock()

    def survey(given: Allocation, folder: Path, stop: AllocationStop) -> tuple[list[NodeReport], str]:
        assert (given, folder) == (allocation, submission / "nodes-7-2")
        assert stop.delay_s == SITE.slurm.signal_delay_s
        return (REPORTS[:1], missing) if missing else (REPORTS, "")

    monkeypatch.setattr(controller, "read_allocation", lambda folder, environment: allocation)
    monkeypatch.setattr(controller, "survey_nodes", survey)
    monkeypatch.setattr(controller, "describe_wrong_hardware", lambda reports, site: mismatch)
    monkeypatch.setattr(controller, "Runner", runner)
    stop = AllocationStop("7")
    stop.delay_s = 1.0
    if stopped:
        stop.give_up("enough")
    state = controller.run_bundle(submission, 1, stop, ENVIRONMENT)
    message = json.loads(state.path.read_text())
    assert state.path.name == "bundle-1.json"
    assert (message["bundle"], message["job"], message["restarts"]) == (1, "7", 2)
    records = lines(submission.parents[1])
    if found == "ran":
        _, progress, interrupt, launcher = runner.call_args.args
        launch = launcher.launch(Job(experiments=[*EXPERIMENTS]), launcher.logs)
        assert (launch._nodes, launch._allocation) == (["n0", "n1"], allocation)
        assert launcher.logs == submission / "logs" / "1"
        assert (progress, interrupt, runner.call_args.kwargs) == (state, stop, {"rerun": True})
        assert runner.return_value.run.call_args.args[0] == [Task(experiments=EXPERIMENTS)]
        assert (message["nodes"], message["phase"], message["stopped"]) == (["n0", "n1"], "ended", None)
        assert records == []
        return
    assert (runner.call_count, message["nodes"]) == (0, [])
    names = ["a", "b"] if found else []
    assert [(r["name"], r["outcome"], r["reason"]) for r in records] == [(n, "error", found) for n in names]
    assert all(r["provenance"]["slurm"]["job_id"] == "7" for r in records)
    assert message["phase"] == ("ended" if found else "stopped")
    assert message["stopped"] == (None if found else {"signal": "", "reason": "enough"})


def test_exceptions_are_written_to_the_bundle_file(submission: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr(controller, "read_allocation", lambda folder, environment: SimpleNamespace(site=SITE))
    monkeypatch.setattr(controller, "survey_nodes", fail)
    with pytest.raises(KeyError):
        controller.run_bundle(submission, 0, AllocationStop("7"), {})
    message = json.loads((submission / "bundle-0.json").read_text())
    assert (message["phase"], message["stopped"]["reason"]) == ("stopped", "KeyError: 'x'")
    assert (message["job"], message["restarts"]) == ("0", 0)


def test_hardware_is_compared_with_the_system_of_the_profile() -> None:
    reports = [NodeReport(node="n0", local=task, task=task) for task in range(2)]
    assert controller.describe_wrong_hardware(reports, SITE) == ""
    dgx2 = parse_profile({"system": "dgx2", "slurm": {"gpus_per_node": 4}}, file="f")
    wrong = controller.describe_wrong_hardware(reports, dgx2)
    assert wrong.startswith("wrong hardware: node n0 has no GPU, but system dgx2 has 4 x NVIDIA V100")


def test_node_address_belongs_to_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address comes from the interface, the host name or SLURM. The loopback and other nodes are no answer."""
    ours = {"lo": ["127.0.0.1"], "eth01": ["10.0.0.6"], "eth0": ["10.0.0.5"]}
    entries = {
        name: [SimpleNamespace(family=socket.AF_INET, address=a) for a in own] for name, own in ours.items()
    }
    names = {"n1": "10.0.0.5", socket.gethostname(): "127.0.0.1"}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: entries)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: names[name])

    def address(interface: str = "", nodes: str = "2", **slurm: str) -> str:
        environment = {"SLURM_JOB_NUM_NODES": nodes} | {f"SLURM{key}": value for key, value in slurm.items()}
        return controller.node_address(interface, environment, "site.toml")

    assert address("lo") == address(nodes="1") == "127.0.0.1"
    assert address("=eth0,eth01") == address("eth0") == "10.0.0.5"
    assert address(D_NODENAME="n1") == address(_LAUNCH_NODE_IPADDR="10.0.0.5") == "10.0.0.5"
    other = "site.toml: environment.interface = 'ib7': must be an interface of"
    with pytest.raises(ConfigError, match=other):
        address("ib7")
    unknown = "the network interface that reaches other nodes; .* has only lo, eth01, eth0"
    with pytest.raises(ConfigError, match=unknown):
        address(_LAUNCH_NODE_IPADDR="10.0.0.7")


@pytest.mark.parametrize(
    ("open", "signals", "has_handler", "end"),
    [
        (0, [signal.SIGUSR2], True, None),
        (2, [], True, None),
        (2, [signal.SIGUSR2], True, 128 + signal.SIGUSR2),
        (2, [signal.SIGUSR2], False, 128 + signal.SIGUSR2),
        (2, [signal.SIGTERM], True, 128 + signal.SIGTERM),
        (2, [signal.SIGTERM, signal.SIGUSR2], True, 128 + signal.SIGUSR2),
    ],
)
def test_job_requests_a_requeue_for_open_cases(
    monkeypatch: pytest.MonkeyPatch, open: int, signals: list[int], has_handler: bool, end: int | None
) -> None:
    """submitit's handler of SIGUSR2 requeues the job."""
    submitit, wait = MagicMock(), MagicMock()
    handlers: dict[int, Any] = {signal.SIGTERM: "earlier"}
    handlers[signal.SIGUSR2] = submitit if has_handler else signal.SIG_DFL
    before = dict(handlers)

    def swap(number: int, handler: Any) -> Any:
        old, handlers[number] = handlers.get(number), handler
        return old

    def run_bundle(folder: Path, index: int, stop: AllocationStop, _: Any) -> SimpleNamespace:
        assert (folder, index, stop._job, stop._restarts) == (Path("/x"), 2, "12_3", 4)
        for number in signals:
            handlers[number](number, None)
        return SimpleNamespace(open=open, count_outcomes=lambda: {"ok": 2})

    monkeypatch.setattr(controller.signal, "signal", swap)
    monkeypatch.setattr(controller, "_wait_for_requeue_signal", wait)
    monkeypatch.setattr(controller, "run_bundle", run_bundle)
    for name, value in (("ARRAY_JOB_ID", "12"), ("ARRAY_TASK_ID", "3"), ("RESTART_COUNT", "4")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    run = controller.RunBundle("/x", 2)
    if end is None:
        assert run() == {"ok": 2}
    else:
        with pytest.raises(SystemExit) as left:
            run()
        assert left.value.code == end
    assert handlers == before
    requeued = has_handler and end == 128 + signal.SIGUSR2
    assert submitit.call_args_list == ([call(signal.SIGUSR2, None)] if requeued else [])
    assert wait.call_count == int(end == 128 + signal.SIGTERM)
    again = run.checkpoint()
    assert (again.function, again.args, again.kwargs) == (run, (), {})


def test_sigterm_waits_for_the_requeue_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preemption sends both signals. `scancel` sends only SIGTERM, and the wait ends at its timeout."""
    stop, clock = AllocationStop("7"), Clock().rules(monkeypatch, controller)
    controller._wait_for_requeue_signal(stop)
    until = 100 + controller.REQUEUE_SIGNAL_TIMEOUT_S
    assert clock.now == pytest.approx(until, abs=controller.POLL_INTERVAL_S)
    clock.slept.clear()
    clock.asleep = lambda: stop.note(signal.SIGUSR2, None)
    controller._wait_for_requeue_signal(stop)
    assert clock.slept == [controller.POLL_INTERVAL_S]
