"""megatron-core leaves nothing behind: neither in its modules nor in torch, and engines that take turns are apart."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from repro.config import Layout
from tests.engines.megatron.both import build, finish, needs_megatron, take, train
from tests.pool import RankPool
from tests.training import Trained, smallest, tiny

pytestmark = needs_megatron

TP = Layout(tp=2, sp=True, recompute=True, micro_batch=4, global_batch=8)
INTERLEAVED = Layout(pp=2, schedule="interleaved", chunks=2, micro_batch=2, global_batch=8)
ZERO1 = Layout(dp=2, zero=1, micro_batch=4, global_batch=8)


def experiment_of(layout: Layout, engine: str) -> Any:
    return tiny(layout, smallest(layout), engine, steps=5)


def same(found: Trained, expected: Trained) -> bool:
    parameters = found.parameters
    return (found.loss, found.norm) == (expected.loss, expected.norm) and all(
        torch.equal(parameters[name], value) for name, value in expected.parameters.items()
    )


def _outside() -> dict[str, Any]:
    """What an engine could leave changed."""
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


def _before_and_after(layout: Layout) -> tuple[Trained, Trained, list[str], tuple[Tensor, Tensor]]:
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401

    native = experiment_of(layout, "native")
    before, outside, generator = train(native), _outside(), torch.get_rng_state()
    train(experiment_of(layout, "megatron"))
    states = generator, torch.get_rng_state()
    after = _outside()
    changed = [name for name, value in after.items() if value is not outside.get(name)]
    return before, train(native), changed, states


def test_nothing_is_left_behind(two: RankPool) -> None:
    for layout in (TP, INTERLEAVED, ZERO1):
        for before, after, changed, (state, later) in two.run(_before_and_after, layout):
            assert same(after, before), "our own engine computes something else after theirs"
            assert not changed
            assert torch.equal(state, later), "random numbers were drawn"


def _in_turns(layouts: tuple[Layout, ...]) -> tuple[list[Trained], list[Trained]]:
    experiments = [experiment_of(layout, "megatron") for layout in layouts]
    alone = [train(experiment) for experiment in experiments]
    engines = [build(experiment) for experiment in experiments]
    found = [Trained([], [], {}) for _ in engines]
    for step in range(experiments[0].training.steps):
        for engine, experiment, trained in zip(engines, experiments, found, strict=True):
            take(engine, experiment, trained, step)
    return alone, [finish(engine, trained) for engine, trained in zip(engines, found, strict=True)]


def test_engines_that_take_turns(two: RankPool) -> None:
    """Each has its own groups, buffers and stages, though the library has room for one set in a process."""
    for alone, turns in two.run(_in_turns, (TP, INTERLEAVED, ZERO1)):
        assert all(same(found, expected) for found, expected in zip(turns, alone, strict=True))


def _kept(layout: Layout, precision: str) -> int:
    experiment = experiment_of(replace(layout, precision=precision), "megatron")
    engine = build(experiment)
    take(engine, experiment, Trained([], [], {}), 0)
    tensors = [parameter for chunk in engine.models for parameter in chunk.parameters()]
    tensors += [buffer.grad_data for chunk in engine.chunks for buffer in chunk.buffers]
    alive = [weakref.ref(tensor) for tensor in tensors]
    del engine, tensors
    gc.collect()
    return sum(reference() is not None for reference in alive)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", [TP, INTERLEAVED, ZERO1], ids=["tp", "interleaved", "zero1"])
def test_memory_of_an_engine_that_is_gone_is_free(two: RankPool, layout: Layout, precision: str) -> None:
    assert two.run(_kept, layout, precision) == [0, 0]
