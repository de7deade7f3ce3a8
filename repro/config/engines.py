"""Who can execute a layout: this suite's own step, or a library beside it, and what each of those cannot run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from repro.config.errors import ConfigError
from repro.config.layout import Layout
from repro.config.model import Model
from repro.config.operator_set import OperatorSet
from repro.config.training import Training

NATIVE = "native"


class Limit(NamedTuple):
    """Values that a key of layout or training may have, all others being what the engine has no counterpart of."""

    key: str
    allowed: tuple[Any, ...]


class Combination(NamedTuple):
    """A value that the engine refuses beside others, and what would be right."""

    key: str
    refused: Callable[[Layout, Training], bool]
    right: str


_NO_CONTEXT = Limit("cp", (1,))
_NO_PIPELINE = Limit("pp", (1,))
_CONSTANT_BUFFERS = Limit("cb", (True,))
_NO_DEFRAGMENTATION = Limit("md", (False,))
_OVERLAPPED = Limit("overlap", (True,))
_REDUCED_AND_SCATTERED = Limit("zero1_reduce", ("reduce-scatter",))
_BY_BLOCK = Limit("zero3_gather", ("block",))
_NO_OFFLOAD = Limit("offload_optimizer", (False,))
_VIEWS = Limit("gradient_as_bucket_view", (True,))

ENGINES: dict[str, tuple[Limit, ...]] = {
    NATIVE: (_NO_OFFLOAD,),
    "torch": (
        _NO_CONTEXT,
        Limit("scatter_gather", (False,)),
        Limit("tp_overlap", (True,)),
        _CONSTANT_BUFFERS,
        _NO_DEFRAGMENTATION,
        _OVERLAPPED,
        Limit("pa", (False,)),
        Limit("pa_cpu", (False,)),
        _BY_BLOCK,
        _NO_OFFLOAD,
        Limit("kernels", (OperatorSet.FUSED,)),
    ),
    "deepspeed": (
        _NO_CONTEXT,
        _NO_PIPELINE,
        _BY_BLOCK,
        Limit("sp", (False,)),
        _CONSTANT_BUFFERS,
        _VIEWS,
    ),
    "megatron": (
        _NO_CONTEXT,
        Limit("zero", (0, 1)),
        Limit("schedule", ("1f1b", "interleaved")),
        Limit("scatter_gather", (False,)),
        Limit("tp_overlap", (True,)),
        _CONSTANT_BUFFERS,
        _NO_DEFRAGMENTATION,
        _REDUCED_AND_SCATTERED,
        _VIEWS,
        Limit("pa_cpu", (False,)),
        _NO_OFFLOAD,
        Limit("kernels", (OperatorSet.FUSED,)),
        Limit("dropout", (0,)),
        Limit("attention_dropout", (0,)),
    ),
}
"""By name: `native`; `torch` (DDP, ZeroRedundancyOptimizer, FSDP2, DTensor, its pipelines); `deepspeed`; `megatron`."""


def _beside(layout: Layout) -> bool:
    """Whether data parallelism has something beside it."""
    return layout.tp > 1 or layout.pp > 1


COMBINATIONS: dict[str, tuple[Combination, ...]] = {
    "torch": (
        # ZeroRedundancyOptimizer knows nothing of DTensors.
        Combination(
            "zero",
            lambda layout, _: layout.zero == 1 and layout.dp > 1 and _beside(layout),
            "0, 2 or 3 beside tp or pp",
        ),
        # There it is FSDP2's machinery that sums gradients, which knows no buckets.
        Combination(
            "gradient_as_bucket_view",
            lambda layout, _: (
                not layout.gradient_as_bucket_view and (_beside(layout) or layout.precision != "fp32")
            ),
            "true in 16 bits and beside tp or pp",
        ),
        Combination(
            "global_batch",
            lambda layout, _: layout.schedule == "1f1b" and layout.accumulation < layout.pp,
            "at least as many micro-batches as stages",
        ),
        # GradScaler halves the scale at the first overflow.
        Combination(
            "loss_scale_hysteresis",
            lambda layout, training: layout.precision == "fp16" and training.loss_scale_hysteresis != 1,
            "1 in fp16",
        ),
    ),
    "deepspeed": (
        # Its contiguous buffers are of partitioned checkpoints; gradients always have one.
        Combination("md", lambda layout, _: layout.md and not layout.pa, "false, or pa = true,"),
        Combination(
            "offload_optimizer",
            lambda layout, _: layout.offload_optimizer and not layout.zero,
            "false, or zero = 1, 2 or 3,",
        ),
        Combination(
            "loss_scale",
            lambda layout, training: (
                layout.precision == "fp16" and not math.log2(training.loss_scale).is_integer()
            ),
            "a power of 2",
        ),
    ),
    "megatron": (
        # Its batch of messages has two to and two from the same stage, which are then taken for each other.
        Combination(
            "overlap",
            lambda layout, _: layout.chunks > 1 and layout.pp == 2 and not layout.overlap,
            "true if pp = 2 and schedule = interleaved",
        ),
    ),
}
"""By engine: what it runs in general, but not together."""


OWN_MODEL = ("torch", "megatron")
"""Engines that run a GPT-2 of their own; `deepspeed` runs the suite's module, whatever its layers are."""


def check(engine: str, layout: Layout, training: Training, model: Model) -> None:
    """Raise `ConfigError` for a layout, a training or a model that the engine has nothing to execute with."""
    for key, value in model.departures().items() if engine in OWN_MODEL else ():
        right = f"as in GPT-2 with engine {engine}, whose model is one"
        raise ConfigError(key, value, right, where="model")
    if engine == "deepspeed" and layout.tp > model.key_heads:
        right = f"at most kv_heads = {model.key_heads} with engine {engine}, which does not add gradients up over tp"
        raise ConfigError("tp", layout.tp, right, where="layout")

    def refuse(key: str, right: str) -> None:
        where, of = ("layout", layout) if hasattr(layout, key) else ("training", training)
        raise ConfigError(key, getattr(of, key), f"{right} with engine {engine}", where=where)

    for key, allowed in ENGINES[engine]:
        if getattr(layout if hasattr(layout, key) else training, key) not in allowed:
            words = [right if isinstance(right, str) else str(right).lower() for right in allowed]
            refuse(key, " or ".join(words))
    for key, refused, right in COMBINATIONS.get(engine, ()):
        if refused(layout, training):
            refuse(key, right)
