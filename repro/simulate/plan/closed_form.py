"""Parameters and model states of each pipeline role in closed form, and the printed names of memory categories.

The states are those of 1910.02054 sec. 3.1 and 5. The parameters are those of `repro.model.counts`, split over tp and a
pipeline as in 1909.08053 sec. 3. Padding of shards is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from repro.config import Layout, Model
from repro.model import counts
from repro.model.counts import K

STATES = ("parameters", "gradients", "optimizer")
"""Categories of model states, named as in `repro.parallel.storage`."""
FIRST, MIDDLE, LAST, ALL = "first", "middle", "last", "all"


def state_bytes(parameters: float, layout: Layout) -> dict[str, float]:
    """Return the bytes of a rank's model states under ZeRO. `parameters`: their number before partitioning."""
    parameter, optimizer = (4, 8) if layout.precision == "fp32" else (2, K)
    whole = dict(zip(STATES, (parameter, layout.grad_bytes, optimizer), strict=True))
    split = {0: (), 1: STATES[2:], 2: STATES[1:], 3: STATES}[layout.zero]
    return {key: parameters * size / (layout.copies if key in split else 1) for key, size in whole.items()}


@cache
def _layer(model: Model, tp: int) -> float:
    """Return the number of parameters of one transformer layer on one tensor-parallel rank.

    Tensor parallelism splits matrices and biases, except biases of row-parallel matrices. If there are fewer key heads
    than ranks, all ranks have the parameters of all keys and values.
    """
    parts = counts.parameters_by_part(replace(model, layers=1))
    whole = counts.count_row_biases(model)
    whole += counts.count_keys_and_values(model) if tp > model.key_heads else 0
    return (parts["attention"] + parts["mlp"] - whole) / tp + whole + counts.count_layer_norms(model)


def stage_parameters(model: Model, layout: Layout) -> dict[str, float]:
    """Return a rank's number of parameters in the first and the last pipeline stage (key `all` without a pipeline)."""
    tp, per_stage = layout.tp, model.layers / layout.pp
    tokens, norm = model.vocab * model.hidden / tp, counts.count_norm(model)
    layers = per_stage * _layer(model, tp)
    first = (
        tokens + counts.parameters_by_part(model).get("position_embedding", 0) + model.embedding_norm * norm
    )
    if layout.pp == 1:
        return {ALL: layers + first + norm + (0 if model.tied else tokens)}
    return {FIRST: layers + first, LAST: layers + tokens + norm}


def suggested_width(limit: int, gpus_per_replica: int, layout: Layout) -> int:
    """Return a hidden width for which the largest model that fits has about width/64 layers.

    The ZeRO paper has such shapes (Table 4). The states of 12 l h^2 parameters (l = h/64) on `gpus_per_replica` devices
    take `limit` bytes. The width is rounded so that every power of two up to 16 divides it into heads of 128.
    """
    per_parameter = sum(state_bytes(1.0, layout).values()) / gpus_per_replica
    width = (64 * limit / per_parameter / 12) ** (1 / 3)
    step = 2048 if width >= 8192 else 1024 if width >= 3072 else 256 if width >= 512 else 64
    return max(64, round(width / step) * step)


TERMS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "checkpoints": "activation checkpoints",
    "communication": "communication buffers",
    "other": "temporary tensors",
}
"""Printed name of each memory category of `repro.parallel.storage`. Temporary tensors are gradients of activations,
recomputed activations and unscaled gradients."""
FRAGMENTATION = "fragmentation"


def largest_term(by_category: Mapping[str, int]) -> str:
    """Return the printed name of the memory category with the most live bytes."""
    return TERMS[max(TERMS, key=lambda category: by_category.get(category, 0))]
