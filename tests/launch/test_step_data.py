"""A step's tokens: the same however they reach the device, and the time that they take is the step's."""

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


class AtOnce:
    """A stream, and an event of it, where everything is done when it is asked for."""

    def record_event(self) -> AtOnce:
        return self

    def wait_event(self, event: AtOnce) -> None: ...


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are fetched a step before, as on a GPU."""
    monkeypatch.setattr(BatchLoader, "_copy_stream", lambda self: AtOnce())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: AtOnce())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)


def inputs_of(experiment: Experiment, rank: int) -> BatchLoader:
    stream = open_stream(experiment.training, experiment.model)
    return BatchLoader(stream, experiment.layout, rank, CPU)


def test_samples_follow_from_step_and_global_batch_alone() -> None:
    """Replicas and micro-batches cut the same global batch, in the same order."""
    (full,) = inputs_of(tiny(Layout(micro_batch=8)), 0).micro_batches(3)
    cut = inputs_of(tiny(Layout(micro_batch=2, global_batch=8)), 0).micro_batches(3)
    assert torch.equal(torch.cat([batch.tokens for batch in cut]), full.tokens)
    assert [batch.place.first_sample for batch in cut] == [0, 2, 4, 6]
    assert torch.equal(full.tokens[:, 1:], full.targets[:, :-1])
    for rank in range(4):
        (batch,) = inputs_of(tiny(Layout(dp=4, micro_batch=2)), rank).micro_batches(3)
        assert torch.equal(batch.tokens, full.tokens[2 * rank : 2 * rank + 2])
        assert batch.place.first_sample == 2 * rank


def test_what_is_fetched_early_is_the_same_and_stays_while_its_step_runs(early: None) -> None:
    experiment = tiny(Layout(dp=2, micro_batch=1, global_batch=4))
    ahead, stream = inputs_of(experiment, 1), open_stream(experiment.training, experiment.model)
    assert ahead.can_prefetch
    for step in range(5):
        batches = ahead.micro_batches(step)
        ahead.prefetch(step + 1)
        samples = stream.samples(4 * step + 2, 2)
        assert torch.equal(torch.cat([batch.tokens for batch in batches]), samples[:, :-1])
        assert torch.equal(torch.cat([batch.targets for batch in batches]), samples[:, 1:])


def slow_run(patch: pytest.MonkeyPatch) -> ExperimentRun:
    """A run of four steps whose samples take 5 s, and nothing else takes any."""
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


def test_a_slow_source_makes_the_step_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    run = slow_run(monkeypatch)
    assert run.rounds == [[5.0, 5.0, 5.0]]
    assert run.result().phase_seconds == {"input": 5.0, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}


def test_the_step_that_fetches_early_pays_for_it(early: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last one there is none to fetch."""
    assert slow_run(monkeypatch).rounds == [[5.0, 5.0, 0.0]]
