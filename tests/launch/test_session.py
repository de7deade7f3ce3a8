"""Compared experiments on one rank, in this process: what is there at a time, and what is handed in."""

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

PAIR = [
    tiny(Layout(micro_batch=2), steps=8, untimed_steps=1),
    tiny(Layout(micro_batch=4), steps=8, untimed_steps=1),
]


class Silent:
    """A heartbeat of which only what is handed in is looked at."""

    def __init__(self) -> None:
        self.handed: dict[int, dict[str, Any]] = {}

    def phase(self, index: int, step: int, phase: str) -> None: ...
    def collective(self, sequence: int, op: str, group: str) -> None: ...
    def finished(self, index: int, result: dict[str, Any]) -> None:
        self.handed[index] = result


def compared(experiments: list[Experiment], apart: bool) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    job = Job(experiments=experiments, rounds=3, compare=True, apart=apart)
    heartbeat: Any = Silent()
    results = session.run_rank(job, rank=0, world=1, device="cpu", rendezvous="", heartbeat=heartbeat)
    assert heartbeat.handed == {index: results[one.key] for index, one in enumerate(experiments)}
    return results


@pytest.mark.parametrize("apart", [False, True])
def test_what_is_compared_apart_is_never_there_together(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[weakref.ref[Any]] = []
    most = 0

    class Watched(ExperimentRun):
        def __init__(self, *args: Any, **settings: Any):
            nonlocal most
            super().__init__(*args, **settings)
            engines.append(weakref.ref(self.engine))
            gc.collect()
            most = max(most, sum(engine() is not None for engine in engines))

    monkeypatch.setattr(session, "ExperimentRun", Watched)
    results = compared(PAIR, apart)
    assert (len(engines), most) == ((6, 1) if apart else (2, 2))
    for experiment in PAIR:
        result = results[experiment.key]
        assert result["outcome"] == "ok"
        assert [len(steps) for steps in result["rounds"]] == [2, 2, 3]
        # Apart, the last turn's losses: one untimed step and three timed ones.
        assert len(result["loss"]) == (4 if apart else 8)
        assert result["memory"]["states"]["optimizer"] > 0


def test_one_that_diverges_apart_does_not_end_the_other() -> None:
    wild = tiny(Layout(micro_batch=4), steps=8, untimed_steps=1, lr=1e18, warmup_steps=0, clip=0.0)
    results = compared([PAIR[0], wild], apart=True)
    assert results[wild.key]["outcome"] == "diverged"
    assert results[PAIR[0].key]["outcome"] == "ok"
    assert len(results[PAIR[0].key]["rounds"]) == 3


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_group_is_left_on_a_clean_end_only(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's waits for collectives that the peers of a rank that has failed never join."""
    calls: list[str] = []
    monkeypatch.setattr(session.dist, "init_process_group", lambda *given, **how: calls.append(given[0]))
    monkeypatch.setattr(session.dist, "destroy_process_group", lambda: calls.append("destroy"))
    with contextlib.suppress(KeyError), session.joined_process_group(0, 2, torch.device("cpu"), "file:///x"):
        calls.append("steps")
        if fails:
            raise KeyError
    assert calls == (["gloo", "steps"] if fails else ["gloo", "steps", "destroy"])


def test_our_groups_are_connected_on_a_gpu_and_a_librarys_are_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: list[Mesh] = []

    def connect(mesh: Mesh, device: torch.device) -> dict[str, int]:
        met.append(mesh)
        return {"start": device.index}

    monkeypatch.setattr(session, "connect_communicators", connect)
    gpu = torch.device("cuda", 5)
    assert session.make_mesh(PAIR[0], gpu).beside_torch == {"start": 5}
    assert len(met) == 1
    assert not session.make_mesh(PAIR[0], torch.device("cpu")).beside_torch
    assert not session.make_mesh(replace(PAIR[0], engine="torch"), gpu).beside_torch
    assert len(met) == 1
