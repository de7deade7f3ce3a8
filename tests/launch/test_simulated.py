"""Tests of `repro run --evidence simulated`: experiments of any scale run here and have separate records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from repro.cli import main
from repro.config import ConfigError, OperatorSet, suites, systems
from repro.config.quantity import Quantity
from repro.launch import run as measured
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

CLUSTER = (
    '[[experiment]]\nname = "full"\nsystem = "selene"\nlayout = { dp = 64, zero = 2, precision = "fp16" }\n'
)
TORCH = '[[experiment]]\nname = "torch"\nengine = "torch"\nlayout.zero = 1\n'
LIMITED = '[[experiment]]\nname = "limit"\nexpect = "oom"\nlimits.memory_bytes = 100_000\n'


@pytest.fixture(autouse=True)
def use_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate in this process, because a worker starts more slowly than the steps run."""
    monkeypatch.setattr(processes, "usable_cores", lambda: 1)


def run(
    suite: Path, results: Path, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any]]:
    code = main(
        ["run", str(suite), "--evidence", "simulated", "--results", str(results), "--json", *arguments]
    )
    out = capsys.readouterr().out
    return code, json.loads(out) if out else {}


def rows(summary: dict[str, Any]) -> dict[str, tuple[str, Any, bool]]:
    return {
        row["name"]: (row["outcome"], row["expected"], row["already_known"]) for row in summary["experiments"]
    }


def test_all_scales_are_simulated_exactly_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = write_suite(tmp_path, experiments("small") + CLUSTER + TORCH + LIMITED)
    code, summary = run(suite, tmp_path / "results", capsys)
    assert code == 0
    assert rows(summary) == {
        "small": ("ok", True, False),
        "full": ("ok", True, False),
        "torch": ("not run", None, True),
        "limit": ("oom", True, False),
    }
    reasons = {row["name"]: row["reason"] for row in summary["experiments"]}
    assert reasons["torch"] == "needs engine native: only native steps can be simulated"
    assert "out of memory" in reasons["limit"]

    code, again = run(suite, tmp_path / "results", capsys)
    assert code == 0
    assert all(known for _, _, known in rows(again).values())
    assert len(lines(tmp_path / "results")) == 3
    run(suite, tmp_path / "results", capsys, "--rerun", "--only", "full")
    assert len(lines(tmp_path / "results")) == 4


def test_run_of_several_suites_reads_each_record_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write_suite(tmp_path, experiments("a", "b"), name=name) for name in ("one", "two", "three")]
    command = ["run", *map(str, files), "--evidence", "simulated", "--results", str(tmp_path / "results")]
    assert main(command) == 0
    with mock.patch.object(store, "read_record", side_effect=read_record) as read:
        assert main(command) == 0
    assert read.call_count == len(lines(tmp_path / "results"))


def test_simulated_record_has_memory_traffic_and_roles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = write_suite(tmp_path, CLUSTER)
    run(suite, tmp_path / "results", capsys)
    (record,) = lines(tmp_path / "results")
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
    assert metrics["comm.link.inter-node.sent_bytes"] == metrics["comm.sent_bytes"]
    assert metrics["comm.sent_bytes"] == sum(row["sent_bytes"] for row in record["comm"])
    (role,) = record["roles"]
    assert role["ranks"] == nd
    assert role["peak"]["total"] == metrics["memory.peak_bytes"]
    assert ":" in role["peak_line"]


def test_measured_and_simulated_records_are_separate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = write_suite(tmp_path, experiments("a", "b"))
    results = tmp_path / "results"
    code, _, err = run_process(suite, results, "--only", "a")
    assert code == 0, err
    code, summary = run(suite, results, capsys)
    assert rows(summary) == {"a": ("ok", True, False), "b": ("ok", True, False)}, "measured records count"
    assert len(latest(results)) == 1
    assert len(latest(results, SIMULATED)) == 2
    code, out, err = run_process(suite, results, "--json")
    assert code == 0, err
    assert rows(json.loads(out)) == {"a": ("ok", True, True), "b": ("ok", True, False)}, (
        "simulated records count"
    )


@pytest.mark.slow
def test_simulated_metrics_equal_measured_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = 'layout = { dp = 2, zero = 1, precision = "bf16", recompute = true, global_batch = 4 }'
    suite = write_suite(tmp_path, f'[[experiment]]\nname = "a"\n{layout}', limits="hang_s = 60")
    code, _, err = run_process(suite, tmp_path / "results", fake=False)
    assert code == 0, err
    run(suite, tmp_path / "results", capsys)
    real, traced = (record["metrics"] for record in lines(tmp_path / "results"))
    shared = {name for name in real if name in traced}
    kinds = ("memory.", "comm.", "parameters", "padding")
    measured_only = {"memory.rss_peak_bytes"}
    assert {name for name in real if name.startswith(kinds)} - measured_only <= shared
    # Peak live bytes differ by tokens and scalars, and the real peak occurs during initialisation.
    peaks = {"memory.peak_bytes", "memory.init_peak_bytes", "memory.activations_bytes"}
    assert {n: traced[n] for n in shared - peaks} == {n: real[n] for n in shared - peaks}
    assert traced["memory.peak_bytes"] <= real["memory.peak_bytes"]


@pytest.mark.slow
def test_peak_memory_includes_receive_buffers_of_gloo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = "layout = { dp = 2, zero = 2, global_batch = 8 }"
    suite = write_suite(tmp_path, f'[[experiment]]\nname = "a"\n{layout}', limits="hang_s = 60")
    code, _, err = run_process(suite, tmp_path / "results", fake=False)
    assert code == 0, err
    run(suite, tmp_path / "results", capsys)
    real, traced = (record["metrics"] for record in lines(tmp_path / "results"))
    assert traced["memory.peak_bytes"] == pytest.approx(real["memory.peak_bytes"], rel=0.01)


def test_records_name_the_requested_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite = write_suite(tmp_path, CLUSTER + LIMITED)
    code, summary = run(suite, tmp_path / "results", capsys, "--system", "dgx2", "--only", "f*")
    assert code == 0
    assert rows(summary) == {"full@dgx2": ("ok", None, False)}
    (record,) = lines(tmp_path / "results")
    assert (record["name"], record["experiment"]["system"]) == ("full@dgx2", "dgx2")
    assert record["simulated_on"]["devices_per_node"] == 16


def test_changed_system_invalidates_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = write_suite(tmp_path, CLUSTER)
    run(suite, tmp_path / "results", capsys)
    monkeypatch.setattr("repro.config.system.System.context", lambda self: 7)
    _, summary = run(suite, tmp_path / "results", capsys)
    assert rows(summary)["full"] == ("ok", True, False)


@pytest.mark.parametrize(
    "change",
    [
        {"flops_per_device": 90e12},
        {"attention": Quantity(value=90e12, source="a benchmark")},
        {"attention_start": 90.0},
        {"products": Quantity(value=0.9, source="a profile")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_changed_calibration_point_invalidates_only_its_operator_set(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    selene = systems.load_system_file("selene")
    before = {kernels: simulation_facts(selene, kernels) for kernels in OperatorSet}
    points = tuple(
        replace(point, **change) if point.layout.kernels is OperatorSet.FUSED else point
        for point in calibration.calibration_points()
    )
    monkeypatch.setattr(calibration, "calibration_points", lambda: points)
    stale = {kernels for kernels in OperatorSet if simulation_facts(selene, kernels) != before[kernels]}
    assert stale == {OperatorSet.FUSED}


def test_new_simulator_revision_invalidates_records(monkeypatch: pytest.MonkeyPatch) -> None:
    selene = systems.load_system_file("selene")
    before = simulation_facts(selene, OperatorSet.SOFTMAX)
    monkeypatch.setattr(record, "SIMULATOR_REVISION", record.SIMULATOR_REVISION + 1)
    assert simulation_facts(selene, OperatorSet.SOFTMAX) != before


def test_simulator_exception_is_an_error_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such\nshape")

    monkeypatch.setattr("repro.simulate.step.simulate", fail)
    suite = write_suite(tmp_path, experiments("a"))
    code, summary = run(suite, tmp_path / "results", capsys)
    assert code == 1
    (row,) = summary["experiments"]
    assert (row["outcome"], row["reason"]) == ("error", "RuntimeError: no such shape")
    monkeypatch.undo()
    monkeypatch.setattr(processes, "usable_cores", lambda: 1)
    assert run(suite, tmp_path / "results", capsys)[0] == 0, "a failed simulation runs again"


@pytest.mark.slow
def test_workers_simulate_experiments_of_one_suite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 2)
    suite = write_suite(tmp_path, experiments("a", "b", "c"))
    code, summary = run(suite, tmp_path / "results", capsys)
    assert code == 0
    assert summary["counts"] == {"ok": 3}


def test_several_suites_are_simulated_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_suite(tmp_path, experiments("one"))
    second = first.with_name("second.toml")
    renamed = first.read_text().replace('name = "one"', 'name = "two"')
    second.write_text(renamed.replace('name = "faults"', 'name = "second"'))
    arguments = ["run", str(first), str(second), "--evidence", "simulated", "--results", str(tmp_path / "r")]
    assert main([*arguments, "--json"]) == 0
    summaries = json.loads(capsys.readouterr().out)
    assert [[row["name"] for row in summary["experiments"]] for summary in summaries] == [["one"], ["two"]]

    second.write_text(second.read_text().replace('name = "two"', 'name = "two"\nsystem = "dgx22"'))
    assert main([*arguments, "--rerun"]) == 2
    assert "dgx22" in capsys.readouterr().err
    assert len(lines(tmp_path / "r")) == 2, "the first suite runs before the second is read"


def test_interrupt_retains_finished_simulations(tmp_path: Path) -> None:
    suite = suites.load_suite(write_suite(tmp_path, experiments("a", "b")))
    interrupt = Interrupt()
    with Store(tmp_path / "results") as store, Progress(total=2, known=0) as progress:
        recorder = Recorder(suite, store, progress, SIMULATED)
        record_simulation = recorder.simulated

        def record_and_interrupt(*arguments: Any) -> None:
            record_simulation(*arguments)
            interrupt.signal = 2

        recorder.simulated = record_and_interrupt  # type: ignore[method-assign]
        system_of = {e.experiment.name: simulated.simulated_system(e.experiment) for e in suite.entries}
        simulated._simulate_entries(list(suite.entries), system_of, recorder, interrupt, processes.Workers(1))
        assert [record.name for record in store.records()] == ["a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--evidence", "guessed"], "--evidence = 'guessed': must be measured or simulated"),
        (
            ["--system", "dgx2"],
            "--system = 'dgx2': needs --evidence simulated; measured runs use this machine",
        ),
        (["--evidence", "simulated", "--system", "dgx22"], "system = 'dgx22': did you mean dgx2"),
        (["--evidence", "simulated", "--only", "torch"], "not simulated: needs engine native"),
        (
            ["--only", "full"],
            "needs 64 GPUs of system selene; `--evidence simulated` simulates the experiment here",
        ),
    ],
)
def test_invalid_input_prints_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    suite = write_suite(tmp_path, CLUSTER + TORCH)
    assert main(["run", str(suite), "--results", str(tmp_path / "results"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "results").exists()


def test_torch_engine_error_does_not_suggest_simulation(tmp_path: Path) -> None:
    body = TORCH.replace('name = "torch"', 'name = "far"\nsystem = "selene"')
    with pytest.raises(ConfigError, match=r"needs 2 GPUs of system selene$"):
        next(measured.run_suites([write_suite(tmp_path, body)], [], tmp_path / "r", False))
