"""Tests of experiments and comparisons on one rank in this process: measurements, batches and outcomes."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import math
import pickle
import re
import shutil
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.cuda import _memory_viz

from repro.config import Experiment, Layout
from repro.config.systems import load_system_file
from repro.launch.job import Job
from repro.launch.rank import experiment as experiment_module
from repro.launch.rank import session
from repro.launch.rank.experiment import ExperimentRun, process_memory
from repro.launch.rank.step_data import BatchLoader, Diverged, StepHistory
from repro.measure import timing
from repro.measure.timing import StageWaits, StepClock
from repro.model.data import TokenStream, open_stream
from repro.parallel import mesh as meshes
from repro.parallel.zero.optimizer import Norms
from repro.results.record_parts import RankMemory
from repro.simulate.time.breakdown import trace_events
from repro.simulate.time.predict import predict
from tests.clock import Clock
from tests.launch.runs import experiments, run, write_suite
from tests.training import tiny

CPU = torch.device("cpu")
PAIR = [tiny(Layout(micro_batch=size), steps=8, untimed_steps=1) for size in (2, 4)]


def start(
    experiment: Experiment, profiles: Path | None = None, reported: list[tuple[int, str]] | None = None
) -> ExperimentRun:
    """Run the untimed steps of an experiment, and append the reported steps and phases to `reported`."""
    torch.set_num_threads(1)
    phases: list[Any] = [] if reported is None else reported
    mesh = meshes.single_rank_mesh()
    run = ExperimentRun(experiment, mesh, CPU, lambda *at: phases.append(at), profiles=profiles)
    run.prelude()
    return run


def test_result_contains_all_measurements_of_the_run() -> None:
    experiment = tiny(Layout(micro_batch=2, global_batch=4, recompute=True), steps=7, untimed_steps=2)
    reported: list[tuple[int, str]] = []
    run = start(experiment, reported=reported)
    run.steps(3)
    run.steps(2)
    result = run.result().as_dict()
    assert (result["outcome"], [len(round_) for round_ in result["rounds"]]) == ("ok", [3, 2])
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
    assert (reported[0], reported[-1]) == ((0, "init"), (6, "optimizer"))
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
    signs = {"alloc": 1, "free_completed": -1}
    live = itertools.accumulate(signs.get(event["action"], 0) * event["size"] for event in events)
    assert max(live) == results[1]["memory"]["peak"]["total"]
    states: Counter[str] = Counter()
    category_at = {event["addr"]: event["category"] for event in events if event["action"] == "alloc"}
    for segment in snapshot["segments"]:
        (block,) = segment["blocks"]
        states[category_at[block["address"]]] += block["requested_size"]
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


def test_gpu_memory_contains_allocator_and_non_torch_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = {"allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 7, "num_alloc_retries": 2}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: statistics if device.index == 3 else {})
    monkeypatch.setattr(experiment_module, "non_torch_bytes", lambda device: 11)
    mesh = replace(meshes.single_rank_mesh(), beside_torch={"start": 4, "world": 6})
    memory = process_memory(RankMemory(), torch.device("cuda", 3), mesh)
    assert memory.cuda == {"allocated_peak": 5, "reserved_peak": 7, "retries": 2}
    assert memory.beside_torch == {"start": 4, "world": 6, "end": 11}
    without_tensors = process_memory(RankMemory(), torch.device("cuda", 0), mesh)
    assert without_tensors.cuda == {"allocated_peak": 0, "reserved_peak": 0, "retries": 0}
    assert process_memory(RankMemory(), CPU, mesh).beside_torch is None
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


def test_waits_are_known_only_for_some_pipeline_layouts() -> None:
    """The native engine knows the waits of every pipeline, the torch engine only those of a pure pipeline."""
    run: Any = object.__new__(ExperimentRun)
    run.clock = StepClock(CPU)
    for layout, engine, has_known_waits, has_stage_waits in (
        (Layout(), "native", False, False),
        (Layout(pp=2, dp=2, global_batch=4), "native", True, False),
        (Layout(pp=2, global_batch=2), "torch", True, True),
        (Layout(pp=2, dp=2, global_batch=4), "torch", False, False),
        (Layout(pp=2, tp=2, global_batch=2), "torch", False, False),
        (Layout(dp=2), "torch", False, False),
    ):
        run.experiment = SimpleNamespace(layout=layout, engine=engine)
        waits = run._has_known_waits, isinstance(run._clocked(), StageWaits)
        assert waits == (has_known_waits, has_stage_waits), (layout, engine)


def test_fifty_consecutive_skipped_steps_count_as_divergence() -> None:
    def norms(*values: float) -> Norms:
        names = ("loss", "gradient", "overflow")
        return Norms(**{name: torch.tensor(float(value)) for name, value in zip(names, values, strict=True)})

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
        with pytest.raises(Diverged, match=f"^{message}$"):
            StepHistory(norms=[norms(*found)]).read(fp16)


def test_skipped_steps_are_counted_but_not_timed() -> None:
    run = start(tiny(Layout(precision="fp16"), steps=12, untimed_steps=1, loss_scale=2.0**22))
    run.steps(11)
    result = run.result().as_dict()
    timed = sum(len(round_) for round_ in result["rounds"])
    skipped_after_prelude = [step for step in result["skipped_steps"] if step >= 1]
    assert result["skipped_steps"], "2^22 must overflow"
    assert timed == 11 - len(skipped_after_prelude)
    assert len(result["loss_scale"]) == 12


class SynchronousStream:
    """A stream, and also its event, whose operations finish immediately."""

    def record_event(self) -> SynchronousStream:
        return self

    def wait_event(self, event: SynchronousStream) -> None: ...


def enable_prefetch(patch: pytest.MonkeyPatch) -> None:
    """Prefetch the next batch, as on a GPU."""
    patch.setattr(BatchLoader, "_copy_stream", lambda self: SynchronousStream())
    patch.setattr(torch.cuda, "current_stream", lambda device=None: SynchronousStream())
    patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)


def loader_of(experiment: Experiment, rank: int) -> BatchLoader:
    stream = open_stream(experiment.training, experiment.model)
    return BatchLoader(stream, experiment.layout, rank, CPU)


def test_samples_depend_only_on_step_and_global_batch() -> None:
    """Replicas and micro-batches divide the same global batch in the same order."""
    (full,) = loader_of(tiny(Layout(micro_batch=8)), 0).micro_batches(3)
    parts = loader_of(tiny(Layout(micro_batch=2, global_batch=8)), 0).micro_batches(3)
    assert torch.equal(torch.cat([batch.tokens for batch in parts]), full.tokens)
    assert [batch.place.first_sample for batch in parts] == [0, 2, 4, 6]
    assert torch.equal(full.tokens[:, 1:], full.targets[:, :-1])
    for rank in range(4):
        (batch,) = loader_of(tiny(Layout(dp=4, micro_batch=2)), rank).micro_batches(3)
        assert torch.equal(batch.tokens, full.tokens[2 * rank : 2 * rank + 2])
        assert batch.place.first_sample == 2 * rank


def test_prefetched_batches_equal_the_samples_of_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    enable_prefetch(monkeypatch)
    experiment = tiny(Layout(dp=2, micro_batch=1, global_batch=4))
    loader, stream = loader_of(experiment, 1), open_stream(experiment.training, experiment.model)
    assert loader.can_prefetch
    for step in range(5):
        batches = loader.micro_batches(step)
        loader.prefetch(step + 1)
        samples = stream.samples(4 * step + 2, 2)
        assert torch.equal(torch.cat([batch.tokens for batch in batches]), samples[:, :-1])
        assert torch.equal(torch.cat([batch.targets for batch in batches]), samples[:, 1:])


def slow_run(patch: pytest.MonkeyPatch) -> ExperimentRun:
    """Run four steps in which only the samples take time, 5 s per step; return the run."""
    clock = Clock().rules(patch, timing)

    def open_slow(*arguments: Any) -> TokenStream:
        stream = open_stream(*arguments)
        make = stream.samples
        patch.setattr(stream, "samples", lambda *numbers: (clock.sleep(5.0), make(*numbers))[1])
        return stream

    patch.setattr(experiment_module, "open_stream", open_slow)
    run = start(tiny(Layout(), steps=4, untimed_steps=1))
    run.steps(3)
    return run


def test_sample_time_belongs_to_the_step_that_loads_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    run = slow_run(monkeypatch)
    assert run.rounds == [[5.0, 5.0, 5.0]]
    assert run.result().phase_seconds == {"input": 5.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    enable_prefetch(monkeypatch)
    assert slow_run(monkeypatch).rounds == [[5.0, 5.0, 0.0]], "the last step has no batch to prefetch"


def compared(experiments: list[Experiment], apart: bool) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    job = Job(experiments=experiments, rounds=3, compare=True, apart=apart)
    heartbeat = Mock()
    results = session.run_rank(job, rank=0, world=1, device="cpu", rendezvous="", heartbeat=heartbeat)
    finished = dict(finish.args for finish in heartbeat.finished.call_args_list)
    assert finished == {index: results[one.key] for index, one in enumerate(experiments)}
    return results


@pytest.mark.parametrize("apart", [False, True])
def test_separate_turns_have_one_live_engine(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[weakref.ref[Any]] = []
    max_live = 0

    class CountedRun(ExperimentRun):
        def __init__(self, *args: Any, **settings: Any):
            nonlocal max_live
            super().__init__(*args, **settings)
            engines.append(weakref.ref(self.engine))
            gc.collect()
            max_live = max(max_live, sum(engine() is not None for engine in engines))

    monkeypatch.setattr(session, "ExperimentRun", CountedRun)
    results = compared(PAIR, apart)
    assert (len(engines), max_live) == ((6, 1) if apart else (2, 2))
    for experiment in PAIR:
        result = results[experiment.key]
        assert result["outcome"] == "ok"
        assert [len(steps) for steps in result["rounds"]] == [2, 2, 3]
        # Separate turns report the losses of the last turn: one untimed step and three timed steps.
        assert len(result["loss"]) == (4 if apart else 8)
        assert result["memory"]["states"]["optimizer"] > 0


def test_diverged_experiment_does_not_end_its_comparison() -> None:
    diverging = tiny(Layout(micro_batch=4), steps=8, untimed_steps=1, lr=1e18, warmup_steps=0, clip=0.0)
    results = compared([PAIR[0], diverging], apart=True)
    result = results[diverging.key]
    assert result["outcome"] == "diverged"
    assert re.search(r"(loss|gradient norm) is (nan|inf) at step [1-7]", result["reason"])
    assert all(map(math.isfinite, result["loss"]))
    assert result["loss"]
    assert results[PAIR[0].key]["outcome"] == "ok"
    assert len(results[PAIR[0].key]["rounds"]) == 3


@pytest.mark.parametrize("fails", [False, True])
def test_process_group_is_destroyed_only_on_clean_exit(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure, NCCL would wait for collectives that the peers never join."""
    calls: list[str] = []
    monkeypatch.setattr(session.dist, "init_process_group", lambda backend, **how: calls.append(backend))
    monkeypatch.setattr(session.dist, "destroy_process_group", lambda: calls.append("destroy"))
    with contextlib.suppress(KeyError), session.joined_process_group(0, 2, torch.device("cpu"), "file:///x"):
        calls.append("steps")
        if fails:
            raise KeyError
    assert calls == (["gloo", "steps"] if fails else ["gloo", "steps", "destroy"])


def test_only_the_native_engine_connects_communicators_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Mock(return_value={"start": 5})
    monkeypatch.setattr(session, "connect_communicators", connect)
    gpu = torch.device("cuda", 5)
    assert session.make_mesh(PAIR[0], gpu).beside_torch == {"start": 5}
    assert not session.make_mesh(PAIR[0], CPU).beside_torch
    assert not session.make_mesh(replace(PAIR[0], engine="torch"), gpu).beside_torch
    connect.assert_called_once()
