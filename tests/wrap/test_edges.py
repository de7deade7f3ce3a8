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
    LossFn,
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
    loss_fn,
    reference,
    routed_loss,
    train,
    unused_forward,
)


@STAGES
@pytest.mark.parametrize(
    ("kind", "loss_of", "pieces"),
    [
        *((kind, loss_fn, 1) for kind in (DataDependent, Containers)),
        *((kind, loss_fn, pieces) for kind in (Reentrant, Segments) for pieces in (1, 2)),
        *((Plain, partial(full_checkpoint, reentrant), 1) for reentrant in (False, True)),
        *((Plain, loss_of, 1) for loss_of in (evaluation_before_backward, failed_backward, unused_forward)),
        (Reentrant, unused_forward, 1),
    ],
)
def test_unusual_modules_and_passes_train_like_one_process(
    two: RankPool, kind: type[nn.Module], loss_of: LossFn, pieces: int, zero: int
) -> None:
    """Every loss function equals `loss_fn`, apart from additional passes or checkpoints."""
    assert_same(two.run(train, kind, layout_of(zero, pieces), loss_of), reference(kind))


@STAGES
def test_auxiliary_losses_of_blocks_train_like_one_process(two: RankPool, zero: int) -> None:
    """The result does not depend on when rank 1 sends its updated parameters."""
    for late in (False, True):
        found = two.run(train, Routed, layout_of(zero), routed_loss, do_nothing, late)
        assert_same(found, reference(Routed, routed_loss))
