"""Tests of the batches of a step: prefetch does not change them, and load time is part of the step time."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from repro.config import Experiment, Layout
from repro.launch.rank import experiment as experiment_module
from repro.launch.rank.experiment import ExperimentRun
from repro.launch.rank.step_data import BatchLoader
from repro.measure import timing
from repro.model.data import TokenStream, open_stream
from repro.parallel import mesh as meshes
from tests.clock import Clock
from tests.training import tiny

CPU = torch.device("cpu")


class SynchronousStream:
    """A stream, and also its event, whose operations finish immediately."""

    def record_event(self) -> SynchronousStream:
        return self

    def wait_event(self, event: SynchronousStream) -> None: ...


@pytest.fixture
def prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the prefetch of the next batch, as on a GPU."""
    monkeypatch.setattr(BatchLoader, "_copy_stream", lambda self: SynchronousStream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SynchronousStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)


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


def test_prefetched_batches_equal_the_samples_of_their_step(prefetch: None) -> None:
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
    run = ExperimentRun(
        tiny(Layout(), steps=4, untimed_steps=1), meshes.single_rank_mesh(), CPU, lambda step, phase: None
    )
    run.prelude()
    run.steps(3)
    return run


def test_sample_time_is_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = slow_run(monkeypatch)
    assert run.rounds == [[5.0, 5.0, 5.0]]
    assert run.result().phase_seconds == {"input": 5.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}


@pytest.mark.usefixtures("prefetch")
def test_prefetch_time_belongs_to_the_earlier_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slow_run(monkeypatch).rounds == [[5.0, 5.0, 0.0]], "the last step has no batch to prefetch"
