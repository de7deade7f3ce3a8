"""Tests of one experiment on one rank in this process: its measurements and its outcomes."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

from repro.config import Experiment, Layout
from repro.config.enums import Phase
from repro.config.systems import load_system_file
from repro.launch.rank import experiment as experiment_module
from repro.launch.rank.experiment import ExperimentRun, process_memory
from repro.launch.rank.step_data import Diverged, StepHistory
from repro.measure.memory import MemoryTracker
from repro.measure.timing import StageWaits, StepClock
from repro.parallel import mesh as meshes
from repro.parallel.zero.optimizer import Norms
from repro.results.record_parts import RankMemory
from repro.simulate.time.breakdown import trace_events
from repro.simulate.time.predict import predict
from tests.launch.runs import experiments, run, write_suite
from tests.training import tiny


def start(
    experiment: Experiment, profiles: Path | None = None, reported: list[tuple[int, str]] | None = None
) -> ExperimentRun:
    """Run the untimed steps of an experiment, and append the reported steps and phases to `reported`."""
    torch.set_num_threads(1)

    def report(step: int, phase: str) -> None:
        if reported is not None:
            reported.append((step, phase))

    mesh = meshes.single_rank_mesh()
    run = ExperimentRun(experiment, mesh, torch.device("cpu"), report, profiles=profiles)
    run.prelude()
    return run


def test_result_contains_all_measurements_of_the_run() -> None:
    experiment = tiny(Layout(micro_batch=2, global_batch=4, recompute=True), steps=7, untimed_steps=2)
    reported: list[tuple[int, str]] = []
    run = start(experiment, reported=reported)
    run.steps(3)
    run.steps(2)
    result = run.result().as_dict()
    assert result["outcome"] == "ok"
    assert [len(round_) for round_ in result["rounds"]] == [3, 2]
    assert len(result["loss"]) == len(result["grad_norm"]) == 7
    assert all(math.isfinite(loss) for loss in result["loss"])
    phases = result["phase_seconds"]
    mean = sum(map(sum, result["rounds"])) / 5
    assert sum(phases.values()) == pytest.approx(mean, rel=0.05)
    assert min(phases.values()) > 0
    states, peak = result["memory"]["states"], result["memory"]["peak"]
    psi = result["parameters"] + result["padding"]
    assert states == {"parameters": 4 * psi, "gradients": 4 * psi, "optimizer": 8 * psi}
    assert peak["total"] == sum(size for name, size in peak.items() if name != "total")
    assert peak["activations"] > 0
    assert result["memory"]["cuda"] == {}
    assert reported[0] == (0, "init")
    assert reported[-1] == (6, "optimizer")
    phases_of_step_3 = ["input", "forward", *["forward", "backward"] * 2, "optimizer"]
    assert [phase for step, phase in reported if step == 3] == phases_of_step_3


def test_profile_has_the_formats_and_names_of_predicted_steps(tmp_path: Path) -> None:
    experiment = tiny(Layout(micro_batch=2, global_batch=4, recompute=True), steps=3, untimed_steps=2)
    results = []
    for profiles in (None, tmp_path):
        run = start(experiment, profiles)
        run.steps(1)
        results.append(run.result().as_dict())
    assert [len(result["loss"]) for result in results] == [3, 3], "the result excludes the profiled step"
    assert results[0]["loss"] == results[1]["loss"]
    assert results[0]["memory"]["peak"] == results[1]["memory"]["peak"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-0.pickle"]

    snapshot = pickle.loads((tmp_path / "rank-0.pickle").read_bytes())
    (events,) = snapshot["device_traces"]
    now = peak = 0
    for event in events:
        now += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
        peak = max(peak, now)
    assert peak == results[1]["memory"]["peak"]["total"]
    states = dict.fromkeys(results[1]["memory"]["states"], 0)
    for segment in snapshot["segments"]:
        (block,) = segment["blocks"]
        (event,) = (e for e in events if e["action"] == "alloc" and e["addr"] == block["address"])
        states[event["category"]] = states.get(event["category"], 0) + block["requested_size"]
    assert results[1]["memory"]["states"].items() <= states.items()
    assert any(frame["filename"] == "repro/model/gpt.py" for e in events for frame in e["frames"])
    assert "total_allocated" in _memory_viz.segsum(snapshot)
    assert "cudaMalloc" in _memory_viz.trace(snapshot)

    trace = json.loads((tmp_path / "rank-0.json").read_text(encoding="utf-8"))["traceEvents"]
    measured = {event["name"]: event["cat"] for event in trace if event["ph"] == "X"}
    assert {"forward", "backward", "optimizer"} <= {k for k, v in measured.items() if v == "user_annotation"}
    timeline = predict(experiment, load_system_file("dgx2"), record=True).timeline
    named = {e["name"] for e in trace_events(timeline.spans, [0]) if e.get("cat") == "kernel"} - {"host"}
    assert len(named) > 10
    attention = "aten::_scaled_dot_product_flash_attention"
    # Attention kernels of a CPU have other names.
    assert named - measured.keys() <= {attention, f"{attention}_backward"}


@pytest.mark.slow
def test_profiles_of_all_ranks_are_written_even_if_a_record_exists(tmp_path: Path) -> None:
    suite, results = write_suite(tmp_path, experiments("a")), tmp_path / "results"
    for _ in range(2):
        code, _, err = run(suite, results, "--profile", fake=False)
        assert code == 0, err
        assert f"profiles: {results}/profiles" in err
        (folder,) = (results / "profiles").glob("a-*")
        names = [f"rank-{rank}.{kind}" for rank in (0, 1) for kind in ("json", "pickle")]
        assert sorted(path.name for path in folder.iterdir()) == names
        trace = json.loads((folder / names[0]).read_text(encoding="utf-8"))["traceEvents"]
        assert {"gloo:all_reduce", "aten::mm"} <= {event["name"] for event in trace}
        shutil.rmtree(folder)


def test_gpu_memory_contains_allocator_statistics_and_non_torch_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statistics = {"allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 7, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics if device.index == 3 else {})
    monkeypatch.setattr(experiment_module, "non_torch_bytes", lambda device: 11)
    mesh = replace(meshes.single_rank_mesh(), beside_torch={"start": 4, "world": 6})
    memory = process_memory(RankMemory(), torch.device("cuda", 3), mesh)
    assert memory.cuda == {"allocated_peak": 5, "reserved_peak": 7, "retries": 2}
    assert memory.beside_torch == {"start": 4, "world": 6, "end": 11}
    without_tensors = process_memory(RankMemory(), torch.device("cuda", 0), mesh)
    assert without_tensors.cuda == {"allocated_peak": 0, "reserved_peak": 0, "retries": 0}
    assert process_memory(RankMemory(), torch.device("cpu"), mesh).beside_torch is None
    peak_rss_bytes = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    assert memory.rss_peak_bytes == pytest.approx(peak_rss_bytes, rel=0.1)


def test_collectives_are_counted_in_the_last_step_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(tiny(Layout(), steps=8, untimed_steps=1))
    resets: list[int] = []
    monkeypatch.setattr(run.mesh.ledger, "reset", lambda: resets.append(run.index))
    monkeypatch.setattr(run.mesh.ledger, "rows", lambda: resets.append(run.index) or [])
    run.steps(3)
    run.steps(2)
    assert resets == [3, 4, 5, 6]
    assert run.left == 2
    # The ledger counts the collectives of the native engine.
    monkeypatch.setattr(experiment_module, "CollectiveCounter", None)
    with run._counting():
        pass


@pytest.mark.parametrize(
    ("layout", "engine", "has_known_waits", "has_stage_waits"),
    [
        (Layout(), "native", False, False),
        (Layout(pp=2, global_batch=2), "native", True, False),
        (Layout(pp=2, dp=2, global_batch=4), "native", True, False),
        (Layout(pp=2, global_batch=2), "torch", True, True),
        (Layout(pp=2, dp=2, global_batch=4), "torch", False, False),
        (Layout(pp=2, tp=2, global_batch=2), "torch", False, False),
        (Layout(dp=2), "torch", False, False),
    ],
)
def test_waits_are_known_only_for_some_pipeline_layouts(
    layout: Layout, engine: str, has_known_waits: bool, has_stage_waits: bool
) -> None:
    """The native engine knows the waits of every pipeline, the torch engine only those of a pure pipeline."""
    run: Any = object.__new__(ExperimentRun)
    run.experiment = SimpleNamespace(layout=layout, engine=engine)
    run.clock = StepClock(torch.device("cpu"))
    assert run._has_known_waits == has_known_waits
    assert isinstance(run._clocked(), StageWaits) == has_stage_waits


def test_fifty_consecutive_skipped_steps_count_as_divergence() -> None:
    def norms(loss: float, gradient: float, overflow: bool) -> Norms:
        found = {"loss": loss, "gradient": gradient, "overflow": float(overflow)}
        return Norms(**{name: torch.tensor(value) for name, value in found.items()})

    series = StepHistory()
    series.norms = [norms(1.0, 2.0, False)] + [norms(1.0, math.inf, True)] * 49 + [norms(3.0, 4.0, False)]
    series.scales = [torch.tensor(8.0)] * 2
    series.read(fp16=True)
    assert (series.loss, series.loss_scale) == ([1.0] * 50 + [3.0], [8.0, 8.0])
    assert series.grad_norm == [2.0] + [None] * 49 + [4.0]
    assert series.skipped == list(range(1, 50))
    assert (series.norms, series.scales) == ([], [])
    series.norms = [norms(1.0, math.inf, True)] * 49
    series.read(fp16=True)
    series.norms = [norms(1.0, math.inf, True)]
    with pytest.raises(Diverged, match=r"^50 steps in a row overflowed, up to step 100$"):
        series.read(fp16=True)
    for found, fp16, message in (
        ((math.nan, 1.0, True), False, "loss is nan at step 0"),
        ((1.0, math.inf, True), False, "gradient norm is inf at step 0"),
        ((math.inf, math.nan, False), True, "loss is inf at step 0"),
    ):
        other = StepHistory()
        other.norms = [norms(*found)]
        with pytest.raises(Diverged, match=f"^{message}$"):
            other.read(fp16)


def test_non_finite_loss_raises_diverged_and_names_the_step() -> None:
    run = start(tiny(Layout(), steps=8, untimed_steps=1, lr=1e18, warmup_steps=0, clip=0.0))
    with pytest.raises(Diverged, match=r"(loss|gradient norm) is (nan|inf) at step [1-7]"):
        run.steps(7)
    result = run.result("why").as_dict()
    assert result["loss"]
    assert all(math.isfinite(loss) for loss in result["loss"])


def test_skipped_steps_are_counted_but_not_timed() -> None:
    run = start(tiny(Layout(precision="fp16"), steps=12, untimed_steps=1, loss_scale=2.0**22))
    run.steps(11)
    result = run.result().as_dict()
    timed = sum(len(round_) for round_ in result["rounds"])
    skipped_after_prelude = [step for step in result["skipped_steps"] if step >= 1]
    assert result["skipped_steps"], "2^22 must overflow"
    assert timed == 11 - len(skipped_after_prelude)
    assert len(result["loss_scale"]) == 12


def test_only_forward_pass_allocations_count_as_activations() -> None:
    """Unmarked tensors of other phases count as other, for example gradients of activations."""
    tensors = []
    with MemoryTracker() as tracker:
        for phase in (Phase.INIT, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.IDLE, Phase.FORWARD):
            tracker.phase = phase
            tensors.append(torch.zeros(25))
        views = [tensor[10:] for tensor in tensors]
        live = tracker.live()
    assert (live["activations"], live["other"], live["total"]) == (200, 400, 600)
    assert len(views) == 6


def test_core_time_excludes_sleep_and_idle_phases() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.begin()
    clock.mark("forward")
    time.sleep(0.05)
    clock.mark("idle")
    start_s = time.thread_time()
    while time.thread_time() - start_s < 0.03:  # CPU time of an idle phase, as of gloo, is not compute time
        pass
    clock.mark("end")
    (row,) = clock.read()
    assert row["forward"] >= 0.05
    assert row["core"] < 0.01
