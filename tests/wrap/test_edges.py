"""Tests of `repro.parallelize` with unusual modules and passes: training matches a single process."""

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
    assert_same,
    do_nothing,
    evaluation_before_backward,
    failed_backward,
    full_checkpoint,
    layout_of,
    reference,
    routed_loss,
    train,
    unused_forward,
)


@STAGES
@pytest.mark.parametrize("kind", [DataDependent, Reentrant, Segments, Containers])
def test_unusual_module_trains_like_one_process(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, layout_of(zero)), reference(kind))


@STAGES
@pytest.mark.parametrize("reentrant", [False, True])
def test_module_in_one_checkpoint_trains_like_one_process(two: RankPool, reentrant: bool, zero: int) -> None:
    found = two.run(train, Plain, layout_of(zero), partial(full_checkpoint, reentrant))
    assert_same(found, reference(Plain))


@STAGES
def test_auxiliary_losses_of_blocks_train_like_one_process(two: RankPool, zero: int) -> None:
    """The result does not depend on when rank 1 sends its updated parameters."""
    for late in (False, True):
        found = two.run(train, Routed, layout_of(zero), routed_loss, do_nothing, late)
        assert_same(found, reference(Routed, routed_loss))


@STAGES
def test_training_continues_after_a_failed_backward_pass(two: RankPool, zero: int) -> None:
    assert_same(two.run(train, Plain, layout_of(zero), failed_backward), reference(Plain))


@STAGES
@pytest.mark.parametrize("kind", [Reentrant, Segments])
def test_checkpoints_support_gradient_accumulation(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, layout_of(zero, 2)), reference(kind))


@STAGES
def test_evaluation_before_backward_does_not_change_training(two: RankPool, zero: int) -> None:
    assert_same(two.run(train, Plain, layout_of(zero), evaluation_before_backward), reference(Plain))


@STAGES
@pytest.mark.parametrize("kind", [Plain, Reentrant])
def test_unused_forward_pass_changes_no_parameter(two: RankPool, kind: type[nn.Module], zero: int) -> None:
    assert_same(two.run(train, kind, layout_of(zero), unused_forward), reference(kind))
