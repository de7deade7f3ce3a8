"""What the state of a training consists of, named as in the model that nothing splits.

Per element of a parameter: the fp32 weight that the optimizer updates, and Adam's two moments.  For the whole:
the optimizer's count of steps, and the loss scaler's three numbers.  Everything else follows from the step:
the learning rate, the samples (`repro.model.data.stream`) and the keys of dropout
(`repro.model.gpt.BatchPosition`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from repro.engines.native.checkpoint.region import Rectangle, matrix_rows, rectangles
from repro.engines.native.engine import NativeEngine
from repro.engines.native.part import ModelPart
from repro.parallel.zero.flat_buffer import Bucket

STATES = ("weight", "moment1", "moment2")
"""fp32 each."""
_SCALER = ("scale", "good_steps", "tolerance")


@dataclass(frozen=True)
class Fragment:
    """A rectangle of one parameter, and where this rank has its states."""

    name: str
    """In the model."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    rows: int
    """Rows of the whole parameter as a matrix."""
    rectangle: Rectangle
    states: tuple[Tensor, ...]
    """A flat fp32 view [rectangle.size] for each of `STATES`."""


def fragments(engine: NativeEngine, *, owned: bool) -> Iterator[Fragment]:
    """What this rank's optimizer updates; `owned`: the part of it that this rank writes.

    What several ranks hold is written by one of them: duplicates by the first of tp, the tied embedding by the
    first stage, and of stage 0's replicas each writes an equal share.
    """
    moments = iter(engine.optimizer.moments)
    for part in engine.parts:
        for bucket in part.sharded.buckets:
            first, second = next(moments)
            yield from _of_bucket(engine, part, bucket, (bucket.master, first, second), owned)


def _of_bucket(
    engine: NativeEngine, part: ModelPart, bucket: Bucket, states: tuple[Tensor, ...], owned: bool
) -> Iterator[Fragment]:
    tp, sharded = engine.mesh.tp, part.sharded
    splits, slots = part.splits(), {slot.index: slot for slot in bucket.plan.slots}
    pieces, base = bucket.pieces(), 0
    if owned and not bucket.stage:
        pieces, base = bucket.plan.pieces(bucket.group.rank), bucket.group.rank * bucket.plan.shard
    for index, first, last, place in pieces:
        tag = slots[index].tag
        if owned and ((tag.duplicate and tp.rank) or (tag.tied and engine.mesh.pp.rank)):
            continue
        name = part.name_in_model(sharded.names[index])
        local, split = sharded.shapes[index], splits[name]
        shape = tuple(n * tp.size if d == split else n for d, n in enumerate(local))
        rows = matrix_rows(shape, split)
        width = local.numel() // rows
        left = 0 if split is None else tp.rank * width
        for rectangle, before in rectangles(first, last, left, width):
            start = base + place + before
            here = tuple(state[start : start + rectangle.size] for state in states)
            yield Fragment(name, shape, rows, rectangle, here)


def scalars(engine: NativeEngine) -> dict[str, Any]:
    """Optimizer steps taken (skipped ones do not count) and, in fp16, the loss scaler's numbers."""
    scaler = engine.scaler
    return {
        "optimizer_steps": float(engine.optimizer.step_count),
        "scaler": None if scaler is None else {key: float(getattr(scaler, key)) for key in _SCALER},
    }


def restore(
    engine: NativeEngine, numbers: dict[str, Any], read: Callable[[str, str, Rectangle, Tensor], None]
) -> None:
    """Give a new engine the state that was written; afterwards every rank has its parameters.

    `numbers` are `scalars`; `read` fills a flat fp32 tensor with (parameter, state, rectangle).
    """
    with torch.no_grad():
        for fragment in fragments(engine, owned=False):
            for state, tensor in zip(STATES, fragment.states, strict=True):
                read(fragment.name, state, fragment.rectangle, tensor)
        for bucket in engine.buckets:
            if bucket.master is not bucket.shard:
                bucket.shard.copy_(bucket.master)
        engine.optimizer.step_count.fill_(numbers["optimizer_steps"])
        if engine.scaler is not None:
            for key, value in numbers["scaler"].items():
                getattr(engine.scaler, key).fill_(value)
        for part in engine.parts:
            part.sharded.all_gather_params()
    engine.synchronize()
