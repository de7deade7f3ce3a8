"""Tests of `repro run --evidence simulated`, which simulates experiments of any scale on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from repro.cli import main
from repro.config import OperatorSet, suites, systems
from repro.config.quantity import Quantity
from repro.launch import simulated
from repro.launch.job import Interrupt
from repro.launch.progress import Progress
from repro.launch.recorder import Recorder
from repro.results import store
from repro.results.schema import SIMULATED, read_record
from repro.results.store import Store
from repro.simulate import record
from repro.simulate.record import simulation_facts
from repro.simulate.time import calibration
from repro.util import processes
from tests.launch.runs import experiments, write_suite
from tests.launch.runs import run as run_process
from tests.records import latest, lines

FULL_LAYOUT = 'layout = { dp = 64, zero = 2, precision = "fp16" }'
CLUSTER = f'[[experiment]]\nname = "full"\nsystem = "selene"\n{FULL_LAYOUT}\n'
TORCH = '[[experiment]]\nname = "torch"\nengine = "torch"\nlayout.zero = 1\n'
FAR_TORCH = TORCH.replace('name = "torch"', 'name = "far"\nsystem = "selene"')
LIMITED = '[[experiment]]\nname = "limit"\nexpect = "oom"\nlimits.memory_bytes = 100_000\n'
Simulate = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def use_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate in this process, because a worker starts more slowly than the steps run."""
    monkeypatch.setattr(processes, "usable_cores", lambda: 1)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def simulate(results: Path, capsys: pytest.CaptureFixture[str]) -> Simulate:
    """Return a function that simulates a suite and returns the exit code and the summary."""

    def run(suite: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
        command = ["run", str(suite), "--evidence", "simulated", "--results", str(results), "--json"]
        code = main([*command, *arguments])
        return code, json.loads(capsys.readouterr().out)

    return run


def rows(summary: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    keys = ("outcome", "expected", "already_known")
    return {row["name"]: tuple(row[key] for key in keys) for row in summary["experiments"]}


def test_all_scales_are_simulated_exactly_once(tmp_path: Path, results: Path, simulate: Simulate) -> None:
    suite = write_suite(tmp_path, experiments("small") + CLUSTER + TORCH + LIMITED)
    code, summary = simulate(suite)
    assert code == 0
    assert rows(summary) == {
        **dict.fromkeys(("small", "full"), ("ok", True, False)),
        "torch": ("not run", None, True),
        "limit": ("oom", True, False),
    }
    _, _, torch, limit = (row["reason"] for row in summary["experiments"])
    assert torch == "needs engine = native: training steps of other engines cannot be simulated"
    assert "out of memory" in limit

    code, again = simulate(suite)
    assert code == 0
    assert all(known for _, _, known in rows(again).values())
    assert len(lines(results)) == 3
    simulate(suite, "--rerun", "--only", "full")
    assert len(lines(results)) == 4


def test_simulated_record_has_memory_traffic_and_roles(
    tmp_path: Path, results: Path, simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = write_suite(tmp_path, CLUSTER + LIMITED)
    simulate(suite, "--only", "full")
    (record,) = lines(results)
    experiment = suites.load_suite(suite).entry("full").experiment
    assert (record["evidence"], record["key"], record["name"]) == ("simulated", experiment.key, "full")
    assert record["provenance"]["packages"]["torch"]
    metrics = record["metrics"]
    psi, nd = metrics["model.parameters"], 64
    assert metrics["parameters"] == psi
    assert metrics["memory.states_bytes"] == pytest.approx(2 * psi + 14 * psi / nd, rel=0.05)
    assert metrics["memory.parameters_bytes"] == 2 * (psi + metrics["padding"])
    assert metrics["memory.used_bytes"] == metrics["memory.reserved_bytes"] + metrics["memory.context_bytes"]
    assert metrics["memory.reserved_bytes"] >= metrics["memory.peak_bytes"]
    assert metrics["memory.limit_bytes"] + metrics["memory.context_bytes"] == 85_198_897_152
    sent_bytes = sum(row["sent_bytes"] for row in record["comm"])
    assert metrics["comm.link.inter-node.sent_bytes"] == metrics["comm.sent_bytes"] == sent_bytes
    (role,) = record["roles"]
    assert role["ranks"] == nd
    assert role["peak"]["total"] == metrics["memory.peak_bytes"]
    assert ":" in role["peak_line"]

    monkeypatch.setattr("repro.config.system.System.context", lambda self: 7)
    _, summary = simulate(suite, "--only", "full")
    assert rows(summary)["full"] == ("ok", True, False), "a changed system invalidates records"
    code, summary = simulate(suite, "--system", "dgx2", "--only", "f*")
    assert code == 0
    assert rows(summary) == {"full@dgx2": ("ok", None, False)}
    *_, record = lines(results)
    assert (record["name"], record["experiment"]["system"]) == ("full@dgx2", "dgx2")
    assert record["simulated_on"]["devices_per_node"] == 16


def test_simulated_and_measured_records_differ(tmp_path: Path, results: Path, simulate: Simulate) -> None:
    suite = write_suite(tmp_path, experiments("a", "b"))
    code, _, err = run_process(suite, results, "--only", "a")
    assert code == 0, err
    code, summary = simulate(suite)
    assert rows(summary) == {"a": ("ok", True, False), "b": ("ok", True, False)}, "measured records count"
    assert len(latest(results)) == 1
    assert len(latest(results, SIMULATED)) == 2
    code, out, err = run_process(suite, results, "--json")
    assert code == 0, err
    expected = {"a": ("ok", True, True), "b": ("ok", True, False)}
    assert rows(json.loads(out)) == expected, "simulated records count"


@pytest.mark.slow
def test_simulated_metrics_equal_measured_metrics(tmp_path: Path, results: Path, simulate: Simulate) -> None:
    layouts = {
        "z1": 'dp = 2, zero = 1, precision = "bf16", recompute = true, global_batch = 4',
        "z2": "dp = 2, zero = 2, global_batch = 8",
    }
    body = "\n".join(f'[[experiment]]\nname = "{name}"\nlayout = {{ {layouts[name]} }}' for name in layouts)
    suite = write_suite(tmp_path, body)
    code, _, err = run_process(suite, results, fake=False)
    assert code == 0, err
    simulate(suite)
    found = [(line["name"], line["evidence"], line["metrics"]) for line in lines(results)]
    metrics = {(name, evidence): values for name, evidence, values in found}
    real, traced = metrics["z1", "measured"], metrics["z1", SIMULATED]
    shared = {name for name in real if name in traced}
    kinds = ("memory.", "comm.", "parameters", "padding")
    measured_only = {"memory.rss_peak_bytes"}
    assert {name for name in real if name.startswith(kinds)} - measured_only <= shared
    # Peak live bytes differ by tokens and scalars, and the real peak occurs during initialisation.
    peaks = {"memory.peak_bytes", "memory.init_peak_bytes", "memory.activations_bytes"}
    assert {n: traced[n] for n in shared - peaks} == {n: real[n] for n in shared - peaks}
    assert traced["memory.peak_bytes"] <= real["memory.peak_bytes"]
    measured, simulated = (
        metrics["z2", evidence]["memory.peak_bytes"] for evidence in ("measured", SIMULATED)
    )
    assert simulated == pytest.approx(measured, rel=0.01), "the peak includes the receive buffers of gloo"


def test_changed_calibration_point_invalidates_only_its_operator_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new revision of the simulator invalidates all records."""
    selene, original = systems.load_system_file("selene"), calibration.calibration_points()
    before = {kernels: simulation_facts(selene, kernels) for kernels in OperatorSet}

    def stale() -> set[OperatorSet]:
        return {kernels for kernels in OperatorSet if simulation_facts(selene, kernels) != before[kernels]}

    changes: tuple[dict[str, Any], ...] = (
        {"flops_per_device": 90e12},
        {"attention": Quantity(value=90e12, source="a benchmark")},
        {"attention_start": 90.0},
        {"products": Quantity(value=0.9, source="a profile")},
    )
    for change in changes:
        points = tuple(
            replace(point, **change) if point.layout.kernels is OperatorSet.FUSED else point
            for point in original
        )
        with monkeypatch.context() as patch:
            patch.setattr(calibration, "calibration_points", lambda points=points: points)
            assert stale() == {OperatorSet.FUSED}, change
    monkeypatch.setattr(record, "SIMULATOR_REVISION", record.SIMULATOR_REVISION + 1)
    assert stale() == set(OperatorSet)


def test_simulator_exception_is_an_error_outcome(tmp_path: Path, simulate: Simulate) -> None:
    suite = write_suite(tmp_path, experiments("a"))
    with mock.patch("repro.simulate.step.simulate", side_effect=RuntimeError("no such\nshape")):
        code, summary = simulate(suite)
    assert code == 1
    (row,) = summary["experiments"]
    assert (row["outcome"], row["reason"]) == ("error", "RuntimeError: no such shape")
    assert simulate(suite)[0] == 0, "a failed simulation runs again"


@pytest.mark.slow
def test_workers_simulate_suite(tmp_path: Path, simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 2)
    code, summary = simulate(write_suite(tmp_path, experiments("a", "b", "c")))
    assert (code, summary["counts"]) == (0, {"ok": 3})


def test_suites_are_run_in_order(tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        write_suite(tmp_path, experiments(name, extra=f"training.lr = {rate}"), name=name)
        for name, rate in (("one", 0.1), ("two", 0.2))
    )
    command = ["run", str(first), str(second), "--evidence", "simulated", "--results", str(results)]
    assert main([*command, "--json"]) == 0
    summaries = json.loads(capsys.readouterr().out)
    assert [[row["name"] for row in summary["experiments"]] for summary in summaries] == [["one"], ["two"]]
    with mock.patch.object(store, "read_record", side_effect=read_record) as read:
        assert main(command) == 0
    assert read.call_count == len(lines(results)), "a run of several suites reads each record once"

    second.write_text(
        second.read_text().replace('name = "two"\ntraining', 'name = "two"\nsystem = "dgx22"\ntraining')
    )
    assert main([*command, "--rerun"]) == 2
    assert "dgx22" in capsys.readouterr().err
    assert len(lines(results)) == 2, "all suites are checked before the first runs"


def test_interrupt_retains_finished_simulations(tmp_path: Path, results: Path) -> None:
    suite = suites.load_suite(write_suite(tmp_path, experiments("a", "b")))
    interrupt = Interrupt()
    with Store(results) as store, Progress(total=2, known=0) as progress:
        recorder = Recorder(suite, store, progress, SIMULATED)
        record_simulation = recorder.simulated

        def record_and_interrupt(*arguments: Any) -> None:
            record_simulation(*arguments)
            interrupt.signal = 2

        recorder.simulated = record_and_interrupt  # type: ignore[method-assign]
        system_of = {e.experiment.name: simulated.simulated_system(e.experiment) for e in suite.entries}
        simulated._simulate_entries(list(suite.entries), system_of, recorder, interrupt, processes.Workers(1))
        assert [record.name for record in store.records()] == ["a"]


ON_SELENE = "of system selene; `--evidence simulated` simulates the experiment here\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--evidence", "guessed"], "--evidence = 'guessed': must be measured or simulated"),
        (["--evidence", "simulated", "--system", "dgx22"], "system = 'dgx22': did you mean dgx2"),
        (["--evidence", "simulated", "--only", "torch"], "not simulated: needs engine = native"),
        (["--only", "full"], f"needs 64 GPUs {ON_SELENE}"),
        (["--only", "far"], "needs 2 GPUs of system selene\n"),  # the engine cannot be simulated
    ],
)  # fmt: skip
def test_invalid_input_prints_one_line(
    tmp_path: Path, results: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    suite = write_suite(tmp_path, CLUSTER + TORCH + FAR_TORCH)
    assert main(["run", str(suite), "--results", str(results), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not results.exists()
