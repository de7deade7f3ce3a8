"""Tests that megatron-core leaves no global state in its modules or torch, and that its engines can alternate."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from repro.config import Layout
from tests.engines.megatron.both import build, collect, needs_megatron, train, train_step
from tests.pool import RankPool
from tests.training import Trained, smallest, tiny

pytestmark = needs_megatron

TP = Layout(tp=2, sp=True, recompute=True, micro_batch=4, global_batch=8)
INTERLEAVED = Layout(pp=2, schedule="interleaved", chunks=2, micro_batch=2, global_batch=8)
ZERO1 = Layout(dp=2, zero=1, micro_batch=4, global_batch=8)


def experiment_of(layout: Layout, engine: str) -> Any:
    return tiny(layout, smallest(layout), engine, steps=5)


def is_equal(found: Trained, expected: Trained) -> bool:
    parameters = found.parameters
    return (found.loss, found.norm) == (expected.loss, expected.norm) and all(
        torch.equal(parameters[name], value) for name, value in expected.parameters.items()
    )


def _global_state() -> dict[str, Any]:
    """Return the global objects that an engine could change."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import optimizer
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.tensor_parallel import random

    found: dict[str, Any] = {
        name: value for name, value in vars(parallel_state).items() if not name.startswith("__")
    }
    found |= {
        "tracker": random._CUDA_RNG_STATE_TRACKER,
        "torch": optimizer.torch,
        "p2p": p2p_communication.torch,
    }
    found |= {name: getattr(p2p_communication, name) for name in ("_p2p_ops",)}
    found |= {name: getattr(torch.Tensor, name) for name in ("type", "cuda")}
    return found


def _train_around_megatron(layout: Layout) -> tuple[Trained, Trained, list[str], tuple[Tensor, Tensor]]:
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401

    native = experiment_of(layout, "native")
    before, global_state, generator = train(native), _global_state(), torch.get_rng_state()
    train(experiment_of(layout, "megatron"))
    states = generator, torch.get_rng_state()
    after = _global_state()
    changed = [name for name, value in after.items() if value is not global_state.get(name)]
    return before, train(native), changed, states


def test_training_leaves_no_global_state(two: RankPool) -> None:
    for layout in (TP, INTERLEAVED, ZERO1):
        for before, after, changed, (state, later) in two.run(_train_around_megatron, layout):
            assert is_equal(after, before), "engine native trains differently after engine megatron"
            assert not changed
            assert torch.equal(state, later), "the random state must not change"


def _train_alternately(layouts: tuple[Layout, ...]) -> tuple[list[Trained], list[Trained]]:
    experiments = [experiment_of(layout, "megatron") for layout in layouts]
    separate = [train(experiment) for experiment in experiments]
    engines = [build(experiment) for experiment in experiments]
    found = [Trained([], [], {}) for _ in engines]
    for step in range(experiments[0].training.steps):
        for engine, experiment, trained in zip(engines, experiments, found, strict=True):
            train_step(engine, experiment, trained, step)
    return separate, [collect(engine, trained) for engine, trained in zip(engines, found, strict=True)]


def test_alternating_engines_train_like_separate_engines(two: RankPool) -> None:
    """Each engine has its own groups, buffers and stages, although the library stores one set per process."""
    for separate, alternating in two.run(_train_alternately, (TP, INTERLEAVED, ZERO1)):
        assert all(is_equal(found, expected) for found, expected in zip(alternating, separate, strict=True))


def _live_tensors_after_deletion(layout: Layout, precision: str) -> int:
    experiment = experiment_of(replace(layout, precision=precision), "megatron")
    engine = build(experiment)
    train_step(engine, experiment, Trained([], [], {}), 0)
    tensors = [parameter for chunk in engine.models for parameter in chunk.parameters()]
    tensors += [buffer.grad_data for chunk in engine.chunks for buffer in chunk.buffers]
    references = [weakref.ref(tensor) for tensor in tensors]
    del engine, tensors
    gc.collect()
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [TP, INTERLEAVED, ZERO1], ids=["tp", "interleaved", "zero1"])
def test_deleted_engine_frees_its_tensors(two: RankPool, layout: Layout, precision: str) -> None:
    assert two.run(_live_tensors_after_deletion, layout, precision) == [0, 0]
