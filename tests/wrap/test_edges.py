"""repro.parallelize where modules and passes are unusual: it trains as one process does."""

from __future__ import annotations

from functools import partial

import pytest
from torch import nn

from tests.pool import RankPool
from tests.wrap.edge_models import (
    STAGES,
    Containers,
    DataDependent,
    Plain,
    Reentrant,
    Routed,
    Segments,
    abandoned,
    after_failure,
    alone,
    assert_same,
    balanced,
    checkpointed,
    evaluate_between,
    layout_of,
    nothing,
    train,
)


@STAGES
@pytest.mark.parametrize("kind", [DataDependent, Reentrant, Segments, Containers])
def test_trains_as_one_process_does(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, layout_of(zero)), alone(kind))


@STAGES
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_whole_module_under_a_checkpoint(two: RankPool, reentrant: bool, zero: int) -> None:
    found = two.run(train, Plain, layout_of(zero), partial(checkpointed, reentrant))
    assert_same(found, alone(Plain))


@STAGES
def test_losses_that_blocks_keep(two: RankPool, zero: int) -> None:
    """Also where the parameters that they are made of come late."""
    for late in (False, True):
        found = two.run(train, Routed, layout_of(zero), balanced, nothing, late)
        assert_same(found, alone(Routed, balanced))


@STAGES
def test_training_goes_on_after_a_backward_pass_that_failed(two: RankPool, zero: int) -> None:
    assert_same(two.run(train, Plain, layout_of(zero), after_failure), alone(Plain))


@STAGES
@pytest.mark.parametrize("kind", [Reentrant, Segments])
def test_reentrant_checkpoints_and_accumulation(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, layout_of(zero, 2)), alone(kind))


@STAGES
def test_evaluation_between_forward_and_backward(two: RankPool, zero: int) -> None:
    assert_same(two.run(train, Plain, layout_of(zero), evaluate_between), alone(Plain))


@STAGES
@pytest.mark.parametrize("kind", [Plain, Reentrant])
def test_a_forward_pass_without_a_backward_pass(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, layout_of(zero), abandoned), alone(kind))
