"""Who can execute a layout: this suite's own step, or a library beside it, and what each of those cannot run."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from repro.config.errors import ConfigError
from repro.config.layout import Layout
from repro.config.operator_set import OperatorSet
from repro.config.training import Training

NATIVE = "native"


class Limit(NamedTuple):
    """Values that a key of layout or training may have, all others being what the engine has no counterpart of."""

    key: str
    allowed: tuple[Any, ...]


_NO_PIPELINE = Limit("pp", (1,))
_CONSTANT_BUFFERS = Limit("cb", (True,))
_NO_DEFRAGMENTATION = Limit("md", (False,))
_OVERLAPPED = Limit("overlap", (True,))
_REDUCED_AND_SCATTERED = Limit("zero1_reduce", ("reduce-scatter",))
_VIEWS = Limit("gradient_as_bucket_view", (True,))

ENGINES: dict[str, tuple[Limit, ...]] = {
    NATIVE: (),
    "torch": (
        Limit("tp", (1,)),
        _NO_PIPELINE,
        Limit("precision", ("fp32",)),
        _CONSTANT_BUFFERS,
        _NO_DEFRAGMENTATION,
        _OVERLAPPED,
    ),
    "deepspeed": (
        _NO_PIPELINE,
        Limit("sp", (False,)),
        _CONSTANT_BUFFERS,
        _VIEWS,
    ),
    "megatron": (
        Limit("zero", (0, 1)),
        Limit("schedule", ("1f1b", "interleaved")),
        Limit("scatter_gather", (False,)),
        Limit("tp_overlap", (True,)),
        _CONSTANT_BUFFERS,
        _NO_DEFRAGMENTATION,
        _REDUCED_AND_SCATTERED,
        _VIEWS,
        Limit("pa_cpu", (False,)),
        Limit("kernels", (OperatorSet.FUSED,)),
        Limit("dropout", (0,)),
        Limit("attention_dropout", (0,)),
    ),
}
"""By name: `native`; `torch` (DDP, ZeroRedundancyOptimizer, FSDP2); `deepspeed`; `megatron` (megatron-core)."""


def check(engine: str, layout: Layout, training: Training) -> None:
    """Raise `ConfigError` for a layout or a training that the engine has nothing to execute with."""
    for key, allowed in ENGINES[engine]:
        where = "layout" if hasattr(layout, key) else "training"
        value = getattr(layout if where == "layout" else training, key)
        words = [right if isinstance(right, str) else f"{key} = {right}".lower() for right in allowed]
        if value not in allowed:
            raise ConfigError(key, value, f"{' or '.join(words)} with engine {engine}", where=where)
    if engine == "megatron" and layout.chunks > 1 and layout.pp == 2 and not layout.overlap:
        # Its batch of messages has two to and two from the same stage, which are then taken for each other.
        right = "true with engine megatron, pp = 2 and schedule = interleaved"
        raise ConfigError("overlap", layout.overlap, right, where="layout")
    if engine == "deepspeed" and layout.md and not layout.pa:
        # Its contiguous buffers are of partitioned checkpoints; gradients always have one.
        raise ConfigError("md", layout.md, "false, or pa = true, with engine deepspeed", where="layout")
    if (
        engine == "deepspeed"
        and layout.precision == "fp16"
        and not math.log2(training.loss_scale).is_integer()
    ):
        raise ConfigError(
            "loss_scale", training.loss_scale, "a power of 2 with engine deepspeed", where="training"
        )
