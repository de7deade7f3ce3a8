"""Tests of `repro fit --measure`, which searches for the largest model by trials on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock

import pytest
import torch

from repro import cli
from repro.config import ConfigError, Layout, Model
from repro.launch import fit as measured
from repro.launch.job import Interrupt, Job
from repro.launch.rank import session
from repro.launch.rank_process import HeartbeatReader, HeartbeatWriter
from repro.launch.supervise import Ending
from repro.measure.memory import MemoryTracker
from repro.parallel import mesh as meshes
from repro.parallel.zero import flat_parameters
from repro.results.schema import FitRecord
from repro.results.store import Store
from repro.simulate.memory.live_bytes import measure_live_bytes
from repro.simulate.plan.candidates import LayoutQuery
from repro.simulate.plan.fit import FitAnswer, FitTrial
from repro.simulate.trace.roles import PipelineRole, trace
from tests.training import tiny

MODEL = Model(name="tiny", layers=4, hidden=64, heads=4, vocab=512, seq=32)
GENERATOR_STATE_BYTES = 16 + 8
"""Bytes of the seed and the offset that fused attention on a GPU retains for its backward pass."""
LIMIT = ["--memory-limit", "60MB", "--hidden", "256", "--heads", "4", "--vocab", "512", "--seq", "64"]
FIT = ["fit", "--measure", "--system", "local", "--gpus", "1", *LIMIT]


@pytest.mark.slow
def test_fit_finds_the_largest_trainable_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernel refuses memory above the limit. The first failing model has one layer more than the largest."""
    assert cli.main([*FIT, "--results", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (record,) = Store(tmp_path).records()
    assert isinstance(record, FitRecord)
    assert (record.id, record.conclusive, record.one_rank) == (found["record"], True, False)
    assert (found["evidence"], found["binding"]) == ("measured", "allocation")
    largest, failing = found["largest"], found["first_failing"]
    assert (failing["outcome"], failing["layers"]) == ("oom", largest["layers"] + 1)
    assert "memory" in failing["reason"] or "bad_alloc" in failing["reason"]
    # 12 bytes of Adam's states and 4 of gradients per parameter (ZeRO sec. 3.1 with fp32 throughout).
    assert 16 * largest["params"] <= 60e6
    assert {row["outcome"] for row in found["trials"]} == {"ok", "oom"}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=8, zero=1, global_batch=16, precision="bf16"),
        Layout(dp=16, zero=3, tp=4, global_batch=16, precision="bf16", recompute=True),
        Layout(dp=4, pp=4, tp=2, zero=2, micro_batch=4, global_batch=64, precision="bf16", sp=True),
    ],
    ids=["z1", "z3-tp4", "pp4-tp2"],
)
def test_trial_has_simulated_bytes(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process without peers allocates the bytes that the simulator predicts for the role of its rank."""
    # A trace has no temporaries of initial values. They are small compared with a real model, but not with MODEL.
    monkeypatch.setattr(flat_parameters, "INITIALISED_ELEMENTS", 1024)
    experiment = tiny(layout, MODEL)
    HeartbeatReader(tmp_path / "heartbeat", 1)
    heartbeat = HeartbeatWriter(tmp_path / "heartbeat", 0)
    for stage in sorted({0, layout.pp - 1}):
        as_rank = meshes.groups(layout, "pp")[0][stage]
        name = "all" if layout.pp == 1 else "first" if stage == 0 else "last"
        expected = measure_live_bytes(trace(experiment, PipelineRole(name, stage, 1)).events)
        tracker = MemoryTracker()
        found = session._run_trial(experiment, as_rank, torch.device("cpu"), heartbeat, tracker)
        assert found["memory"]["states"] == expected.states
        assert tracker.most["parameters"] == expected.most["parameters"]
        assert tracker.most["optimizer"] == expected.most["optimizer"]
        # The trace of a GPU adds the next step's tokens and targets, and one generator state per attention.
        next_step = 2 * layout.replica_batch * experiment.seq * torch.int64.itemsize
        attentions = 1 if layout.recompute else MODEL.layers // layout.pp * (layout.pp - stage)
        assert expected.peak_bytes - tracker.peak["total"] == next_step + attentions * GENERATOR_STATE_BYTES


def query(system: str = "local", gpus: int = 1, **keys: Any) -> LayoutQuery:
    return LayoutQuery(system, gpus, {}, **{"seq": 64, "memory_limit": "60MB", **keys})


def plan(asked: LayoutQuery, as_rank: int | None = None, of: int = 1) -> measured.Trials:
    sizes = {"hidden": 256, "heads": 4, "vocab": 512}
    return measured.plan_trials(asked, None, sizes, "layers", as_rank, of)


def test_invalid_query_is_rejected() -> None:
    for invalid, as_rank, of, message in (
        (query("dgx2"), None, 1, "system = 'dgx2': must be a system of this machine with --measure: local, local-gpu"),
        (query(expandable=True), None, 1, "expandable: this option does not work with --measure: set PYTORCH"),
        (query(memory_limit=""), None, 1, "memory_limit: a limit is required on processor cores"),
        (query(gpus=2), 0, 4, "gpus = 2: must be 1 device, because --as-rank"),
        (query(), 0, 0, "of = 0: must be the number of ranks"),
        (query(), 4, 4, "as_rank = 4: must be a rank from 0 to 3"),
        (query(), -1, 4, "as_rank = -1: must be a rank from 0 to 3"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            plan(invalid, as_rank, of)


def test_processes_are_limited_to_the_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured.local_launch, "count_cuda_devices", lambda: 2)
    monkeypatch.setattr(measured.local_launch, "usable_cores", lambda: 1)
    limit = measured.local_launch.max_ranks().value
    assert plan(query("local-gpu", 2)).question.layout.world == 2
    with pytest.raises(ConfigError, match="gpus = 3: must be at most the 2 CUDA devices that are visible"):
        plan(query("local-gpu", 3))
    assert plan(query(gpus=limit)).question.layout.world == limit
    with pytest.raises(ConfigError, match=f"gpus = {limit + 1}: must be at most {limit}"):
        plan(query(gpus=limit + 1))


@pytest.mark.parametrize(("as_rank", "of"), [(None, 1), (0, 4)])
def test_each_trial_has_its_own_launch(monkeypatch: pytest.MonkeyPatch, as_rank: int | None, of: int) -> None:
    trials, interrupt = plan(query(), as_rank, of), Interrupt()
    memories: list[dict[str, Any]] = [
        {"rss_peak_bytes": 5, "cuda": {"reserved_peak": 3, "retries": 1}, "beside_torch": {"start": 9, "world": 2}},
        {"rss_peak_bytes": 4, "cuda": {"reserved_peak": 7, "retries": 0},
         "beside_torch": {"start": 8, "world": 4, "embedding": 1}},
    ]  # fmt: skip
    most: dict[str, Any] = {"rss_peak_bytes": 5, "cuda": {"reserved_peak": 7, "retries": 1}}
    most["beside_torch"] = {"start": 9, "world": 4, "embedding": 1}
    for reported, ending, reserved, binding, memory in (
        (memories, Ending("ok", "", 0, [1.0]), 7, "", most),
        ([], Ending("oom", "rank 0: MemoryError", 0, [1.0]), None, "allocation", {}),
        ([], Ending("hang", "no progress", 0, [1.0]), None, "hang", {}),
    ):
        run_once = Mock(return_value=(ending, [{"memory": each} for each in reported]))
        monkeypatch.setattr(measured, "run_once", run_once)
        expected = FitTrial(
            2, ending.outcome, reserved, binding, ending.reason, {"memory_of_process": memory}
        )
        assert trials._attempt(2, interrupt) == expected
    run_once.assert_called_once_with(ANY, interrupt, target=measured.TRIAL_TARGET)
    job: Job = run_once.call_args.args[0]
    (tried,) = job.experiments
    assert (job.as_rank, job.world) == (-1 if as_rank is None else 0, 1)
    assert (tried.model.layers, tried.system, tried.limits.memory_bytes) == (2, "local", 60_000_000)
    assert (tried.training.steps, tried.training.untimed_steps, tried.seq) == (2, 1, 64)
    assert (tried.limits.timeout_s, tried.limits.hang_s) == (600.0, 120.0)
    interrupt.signal = 2
    assert trials._attempt(3, interrupt) == FitTrial(3, "interrupted", None)
    run_once.assert_called_once()


def test_search_starts_at_the_simulated_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU process gets the requested memory limit, because a CPU has no context as a GPU has."""
    trials = plan(query(gpus=4))
    simulated = SimpleNamespace(largest=FitTrial(3, "ok", 1), first_failing=FitTrial(4, "oom", None))
    answer = FitAnswer(FitTrial(3, "ok", 7), FitTrial(4, "oom", None), [])
    search = Mock(return_value=answer)
    monkeypatch.setattr(measured.fit, "fit_by_simulation", lambda question: simulated)
    monkeypatch.setattr(measured.fit, "search_largest", search)
    assert trials.run(Interrupt()) is answer
    values, attempt, limit, start = search.call_args.args
    assert (list(values), limit, start) == (list(trials.question.values()), 60_000_000, [3, 4])
    simulated.largest = None
    trials.run(Interrupt())
    assert search.call_args.args[3] == [4]
    monkeypatch.setattr(trials, "_attempt", lambda value, interrupt: value)
    assert attempt(5) == 5
    record = trials.record(answer, 1.5)
    assert (record.ranks, record.one_rank, record.rank, record.collectives) == (4, False, None, "data")
    trials.limit = None
    assert trials.limit_bytes == 0


def test_only_a_finished_search_is_recorded_with_both_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record contains both trials at the limit and the memory of the processes, but no step time."""
    memory = {"rss_peak_bytes": 5, "cuda": {"reserved_peak": 7, "allocated_peak": 6}}
    memory |= {"beside_torch": {"end": 3}, "states": {"parameters": 2, "gradients": 1, "optimizer": 4}}
    signal = 2

    def run(trials: measured.Trials, interrupt: Interrupt) -> FitAnswer:
        interrupt.signal = signal
        fits = FitTrial(3, "ok", 7, "", "", {"memory_of_process": memory})
        fails = FitTrial(4, "interrupted" if signal else "oom", None, "fragmentation")
        return FitAnswer(fits, fails, [fits, fails])

    monkeypatch.setattr(measured.Trials, "run", run)
    command = [*FIT, "--as-rank", "2", "--of", "64", "--results", str(tmp_path)]
    assert cli.main(command) == 130
    assert "Recorded" not in capsys.readouterr().out
    signal = 0
    assert cli.main(command) == 0
    assert f"Recorded in {tmp_path}" in capsys.readouterr().out
    (record,) = Store(tmp_path).records()
    assert isinstance(record, FitRecord)
    assert (record.ranks, record.one_rank, record.rank, record.collectives) == (64, True, 2, "no data")
    assert (record.experiment.model.layers, record.experiment.layout.world) == (3, 64)
    assert (record.limit_bytes, "metrics" in record.as_dict()) == (60_000_000, False)
    largest, failing = record.largest, record.first_failing
    assert largest is not None
    assert largest.memory is not None
    assert largest.memory.as_dict() == memory
    assert failing is not None
    assert (failing.layers, failing.binding) == (4, "fragmentation")
    assert failing.parameters - largest.parameters == 12 * 256**2 + 13 * 256
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["evidence"], found["communicator_bytes"]) == ("measured (one rank of 64)", 0)
    assert found["limit_bytes"] == found["allocator_limit_bytes"] == 60_000_000
    assert not found.keys() & {"traces", "trace_seconds"}


GIB = 2**30
TORCH_OOM = (
    "rank 0 at step 1, backward: OutOfMemoryError: CUDA out of memory. Tried to allocate {requested}. GPU 0 has a "
    "total capacity of 31.74 GiB of which 1.20 GiB is free. Of the allocated memory {allocated} is allocated by "
    "PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated."
)


def test_memory_failure_kind_follows_from_the_message() -> None:
    for reason, device, expected in (
        (TORCH_OOM.format(requested="2.00 GiB", allocated="29.00 GiB"), "cuda", "fragmentation"),
        (TORCH_OOM.format(requested="2.00 GiB", allocated="31.00 GiB"), "cuda", "allocation"),
        (TORCH_OOM.format(requested="1000.00 MiB", allocated="31.00 GiB"), "cuda", "fragmentation"),
        (TORCH_OOM.format(requested="900.00 KiB", allocated="32767.00 MiB"), "cuda", "fragmentation"),
        ("rank 0 at step 0, init: OutOfMemoryError: something new", "cuda", "allocation"),
        ("rank 3 at step 0, init: killed by SIGKILL; the kernel ran out of memory", "cuda", "host memory"),
        ("rank 3 at step 0, init: RuntimeError: DefaultCPUAllocator: can't allocate memory", "cuda", "host memory"),
        ("rank 0 at step 0, backward: RuntimeError: std::bad_alloc", "cpu", "allocation"),
    ):  # fmt: skip
        assert measured.memory_failure_kind(reason, device, 32 * GIB) == expected, reason
