"""Tests of compared experiments on one rank in this process: live engines and reported results."""

from __future__ import annotations

import contextlib
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Experiment, Layout
from repro.launch.job import Job
from repro.launch.rank import session
from repro.launch.rank.experiment import ExperimentRun
from repro.parallel.mesh import Mesh
from tests.training import tiny

PAIR = [tiny(Layout(micro_batch=size), steps=8, untimed_steps=1) for size in (2, 4)]


class ResultHeartbeat:
    """A heartbeat that stores only the finished results."""

    def __init__(self) -> None:
        self.results_by_index: dict[int, dict[str, Any]] = {}

    def phase(self, index: int, step: int, phase: str) -> None: ...
    def collective(self, sequence: int, op: str, group: str) -> None: ...
    def finished(self, index: int, result: dict[str, Any]) -> None:
        self.results_by_index[index] = result


def compared(experiments: list[Experiment], apart: bool) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    job = Job(experiments=experiments, rounds=3, compare=True, apart=apart)
    heartbeat: Any = ResultHeartbeat()
    results = session.run_rank(job, rank=0, world=1, device="cpu", rendezvous="", heartbeat=heartbeat)
    assert heartbeat.results_by_index == {index: results[one.key] for index, one in enumerate(experiments)}
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
    assert results[diverging.key]["outcome"] == "diverged"
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


def test_only_the_native_engine_connects_communicators_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected: list[Mesh] = []

    def connect(mesh: Mesh, device: torch.device) -> dict[str, int]:
        connected.append(mesh)
        return {"start": device.index}

    monkeypatch.setattr(session, "connect_communicators", connect)
    gpu = torch.device("cuda", 5)
    assert session.make_mesh(PAIR[0], gpu).beside_torch == {"start": 5}
    assert len(connected) == 1
    assert not session.make_mesh(PAIR[0], torch.device("cpu")).beside_torch
    assert not session.make_mesh(replace(PAIR[0], engine="torch"), gpu).beside_torch
    assert len(connected) == 1
