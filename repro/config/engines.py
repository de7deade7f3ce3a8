"""Who can execute a layout: this suite's own step, or a library beside it, and what each of those cannot run."""

from __future__ import annotations

from typing import Any, NamedTuple

from repro.config.errors import require
from repro.config.layout import Layout

NATIVE = "native"


class Limit(NamedTuple):
    """Values that a key of a layout may have, all others being what the engine has no counterpart of."""

    key: str
    allowed: tuple[Any, ...]


_NO_PIPELINE = Limit("pp", (1,))
_BLOCKS_ALIKE = Limit("stage_layers", ((),))
_CONSTANT_BUFFERS = Limit("cb", (True,))
_NO_DEFRAGMENTATION = Limit("md", (False,))
_OVERLAPPED = Limit("overlap", (True,))
_REDUCED_AND_SCATTERED = Limit("zero1_reduce", ("reduce-scatter",))
_VIEWS = Limit("gradient_as_bucket_view", (True,))
_CHECKPOINTS_WHOLE = (Limit("pa", (False,)), Limit("pa_cpu", (False,)))

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
        _CONSTANT_BUFFERS,
        _REDUCED_AND_SCATTERED,
        _VIEWS,
    ),
    "megatron": (
        Limit("zero", (0, 1)),
        Limit("schedule", ("1f1b", "interleaved")),
        _BLOCKS_ALIKE,
        _CONSTANT_BUFFERS,
        _NO_DEFRAGMENTATION,
        _REDUCED_AND_SCATTERED,
        _VIEWS,
        *_CHECKPOINTS_WHOLE,
    ),
}
"""By name: `native`; `torch` (DDP, ZeroRedundancyOptimizer, FSDP2); `deepspeed`; `megatron` (megatron-core)."""


def check(engine: str, layout: Layout) -> None:
    """Raise `ConfigError` for a layout that the engine has nothing to execute with."""
    for key, allowed in ENGINES[engine]:
        value = getattr(layout, key)
        words = [right if isinstance(right, str) else f"{key} = {right}".lower() for right in allowed]
        require(value in allowed, key, value, f"{' or '.join(words)} with engine {engine}")
