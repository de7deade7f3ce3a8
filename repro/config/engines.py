"""Checks that a training engine supports an experiment's settings, and the settings that reproduce published software.

A layout can name such software with the key `software` (defined in `software.toml`) instead of listing its settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from repro.config.enums import OperatorSet
from repro.config.errors import ConfigError, require, unknown_name_hint
from repro.config.files import read_toml
from repro.config.layout import SELECTIVE, Layout
from repro.config.model import Model
from repro.config.training import Training

NATIVE = "native"
FUSED_HEAD_MULTIPLE = 8
"""Required divisor of an attention head's width for fused 16-bit attention before compute capability 8.0, where torch
has only xFormers' kernel (`minimum_gemm_alignment` in `sdp_utils.cpp`). From 8.0 on, FlashAttention pads heads."""


class Combination(NamedTuple):
    """Rule by which a training engine refuses a setting in combination with others: key, test and valid values."""

    key: str
    refused: Callable[[Layout, Training], bool]
    right: str


ENGINES: dict[str, dict[str, list[Any]]] = read_toml(Path(__file__).with_suffix(".toml"))
"""Supported values of layout and training settings, by engine and key; all values of a key that is not listed."""


class Software(NamedTuple):
    """Training software of a published report, and the settings with which the native engine reproduces it."""

    title: str
    source: str
    layout: dict[str, Any]
    """Layout settings of the software at every ZeRO stage. `bucket_elements` is a pair (constant, number per
    replica). A gradient bucket has max(constant, number * replicas) elements."""
    stages: dict[str, dict[str, Any]]
    """Additional layout settings by ZeRO stage, for each stage that the software supported."""


SOFTWARE: dict[str, Software] = {
    name: Software(**table) for name, table in read_toml(Path(__file__).with_name("software.toml")).items()
}
"""Training software of the published reports, by name such as `megatron-2019`."""


def find_software(name: str) -> Software:
    """Return the title and settings of the published software `name`; raise `ConfigError` if the name is unknown."""
    hint = unknown_name_hint(str(name), tuple(SOFTWARE), "software")
    require(str(name) in SOFTWARE, "software", name, says=hint)
    return SOFTWARE[name]


def describe_software(name: str) -> str:
    """Return one line of text with the layout settings that reproduce a published software, and its title."""
    known = find_software(name)
    tables = {"": known.layout} | {f"ZeRO {stage} ": table for stage, table in known.stages.items() if table}
    texts = (
        label + ", ".join(f"{key} = {str(value).lower()}" for key, value in table.items())
        for label, table in tables.items()
    )
    return f"software {name} sets {'; '.join(texts)} ({known.title})"


def with_software(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout settings `given`, completed by the settings of the software that their key `software` names."""
    keys = dict(given)
    name = keys.pop("software", None)
    if name is None:
        return keys
    found, degrees = (
        find_software(name),
        {key: keys.get(key, getattr(Layout, key)) for key in ("zero", "dp", "cp")},
    )
    for key, degree in degrees.items():
        require(type(degree) is int, key, degree, "an integer")
    zero, dp, cp = degrees.values()
    right = f"a ZeRO stage that software {name} has: {', '.join(found.stages)}"
    require(str(zero) in found.stages, "zero", zero, right)
    settings = found.layout | found.stages[str(zero)]
    if dp * cp == 1:
        settings.pop("gradient_as_bucket_view", None)
    settings |= keys
    constant, per_replica = settings.pop("bucket_elements", (0, 0))
    if constant and dp * cp > 1 and zero != 3:  # ZeRO stage 3 and single replicas have no buckets
        wide = "fp32" in (settings.get("grad_dtype"), settings.get("precision", "fp32"))
        settings.setdefault("bucket_bytes", max(constant, per_replica * dp) * (4 if wide else 2))
    return settings


def _has_model_parallelism(layout: Layout) -> bool:
    """Return whether a layout has tensor or pipeline parallelism."""
    return layout.tp > 1 or layout.pp > 1


COMBINATIONS: dict[str, tuple[Combination, ...]] = {
    NATIVE: (
        Combination(
            "recompute",
            lambda layout, training: (
                layout.recompute == SELECTIVE
                and not (layout.kernels.writes_scores or training.attention_dropout)
            ),
            "none or block, since fused attention stores no scores to recompute (use kernels = softmax or unfused),",
        ),
    ),
    "torch": (
        # ZeRO stage 1 uses torch's ZeroRedundancyOptimizer, which does not support the DTensors of tp and pp.
        Combination(
            "zero",
            lambda layout, _: layout.zero == 1 and layout.dp > 1 and _has_model_parallelism(layout),
            "ZeRO stage 0, 2 or 3 with tp or pp",
        ),
        # In 16-bit training, or with tp or pp, FSDP2 reduces gradients. Unlike DDP, FSDP2 has no gradient buckets.
        Combination(
            "gradient_as_bucket_view",
            lambda layout, _: (
                not layout.gradient_as_bucket_view
                and (_has_model_parallelism(layout) or layout.precision != "fp32")
            ),
            "true in 16-bit training and with tp or pp",
        ),
        Combination(
            "global_batch",
            lambda layout, _: layout.schedule == "1f1b" and layout.accumulation < layout.pp,
            "at least as many micro-batches as stages",
        ),
        # torch's GradScaler halves the loss scale at the first overflow, so that its hysteresis is always 1.
        Combination(
            "loss_scale_hysteresis",
            lambda layout, training: layout.precision == "fp16" and training.loss_scale_hysteresis != 1,
            "1 in fp16",
        ),
    ),
    "deepspeed": (
        # M_D of the ZeRO paper (key `md`) preallocates buffers. In DeepSpeed, `md` concerns activation checkpoints
        # (P_a) alone, because gradients always have a preallocated buffer.
        Combination("md", lambda layout, _: layout.md and not layout.pa, "false (true requires pa = true)"),
        Combination(
            "offload_optimizer",
            lambda layout, _: layout.offload_optimizer and not layout.zero,
            "false (true requires zero = 1, 2 or 3)",
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
        # With two stages, next and previous stage are the same rank; Megatron-core confuses its batched messages.
        Combination(
            "overlap",
            lambda layout, _: layout.chunks > 1 and layout.pp == 2 and not layout.overlap,
            "true (overlapped communication) if pp = 2 and schedule = interleaved",
        ),
    ),
}
"""Combinations of settings that a training engine refuses although it supports each setting alone, by engine."""


GPT2_ENGINES = ("torch", "megatron")
"""Training engines that run only their own GPT-2; `native` and `deepspeed` run every model of `repro.model`."""


def check_engine(engine: str, layout: Layout, training: Training, model: Model) -> None:
    """Raise `ConfigError` for a layout, a training or a model that the training engine cannot execute."""
    for key, value in model.departures().items() if engine in GPT2_ENGINES else ():
        right = f"the value of GPT-2, the only model of engine {engine}"
        raise ConfigError(key, value, right, where="model")
    if engine == "deepspeed" and layout.tp > model.key_heads:
        right = f"at most kv_heads = {model.key_heads} with engine {engine}, which replicates no key heads"
        raise ConfigError("tp", layout.tp, right, where="layout")

    def refuse(key: str, right: str) -> None:
        where, part = ("layout", layout) if hasattr(layout, key) else ("training", training)
        raise ConfigError(key, getattr(part, key), f"{right} with engine {engine}", where=where)

    for key, allowed in ENGINES[engine].items():
        if getattr(layout if hasattr(layout, key) else training, key) not in allowed:
            words = [right if isinstance(right, str) else str(right).lower() for right in allowed]
            refuse(key, " or ".join(words))
    for key, refused, right in COMBINATIONS.get(engine, ()):
        if refused(layout, training):
            refuse(key, right)


def capture_obstacle(layout: Layout, training: Training) -> str:
    """Return why engine `native` cannot capture a micro-batch's passes in CUDA graphs; an empty text if it can."""
    if layout.world > 1:
        return "CUDA graphs of this engine do not include collectives between ranks"
    if layout.kernels.plain and (training.dropout or training.attention_dropout):
        return "dropout by torch's operators needs a new seed from the host for every micro-batch"
    if layout.pa_cpu:
        return "activation checkpoints are copied to host memory on another CUDA stream"
    return ""


def check_layout_fits(layout: Layout, model: Model, seq: int) -> None:
    """Raise `ConfigError` unless the parallel degrees of `layout` divide the sizes of `model` and the sequence."""
    for key, what in (("heads", "heads"), ("ffn_width", "ffn"), ("vocab", "vocab")):
        size = getattr(model, key)
        require(size % layout.tp == 0, "tp", layout.tp, f"a divisor of {what} = {size} ({model.name})")
    keys = model.key_heads
    what = f"a divisor or a multiple of kv_heads = {keys} ({model.name})"
    require(keys % layout.tp == 0 or layout.tp % keys == 0, "tp", layout.tp, what)
    other = next(iter(model.departures()), "")
    later = ", ".join(each for each in OperatorSet if each is not OperatorSet.UNFUSED)
    what = f"one of {later}, since operators of 2019 do not support {other} = {getattr(model, other, '')}"
    require(not other or layout.kernels is not OperatorSet.UNFUSED, "kernels", layout.kernels, what)
    ranks, names = (layout.cp * layout.tp, "cp x tp") if layout.cp > 1 else (layout.tp, "tp")
    says = f"needs {names} = {ranks} to divide seq = {seq}"
    require(not layout.sp or seq % ranks == 0, "sp", layout.sp, says=says)
    parts = layout.pp * layout.chunks
    what = f"layers = {model.layers} ({model.name})"
    product = f"the product pp * chunks = {parts} " if layout.chunks > 1 else ""
    if layout.stage_layers:
        total = sum(layout.stage_layers)
        right = f"numbers of layers whose sum is {what}, not {total}"
        require(total == model.layers, "stage_layers", list(layout.stage_layers), right)
        return
    require(parts <= model.layers, "pp", layout.pp, says=f"{product}must be at most {what}")
    says = f"{product}must be a divisor of {what}, or stage_layers must list {parts} numbers with this sum"
    require(model.layers % parts == 0, "pp", layout.pp, says=says)


def unfused_attention_note(model: Model, layout: Layout, capability: str) -> str:
    """Return a warning if torch has no fused attention for the width of the model's heads; otherwise an empty text.

    `capability`: CUDA compute capability of the device, such as `7.0`; empty without CUDA.
    """
    other = (
        layout.kernels.writes_scores
        or layout.precision == "fp32"
        or model.head_width % FUSED_HEAD_MULTIPLE == 0
    )
    if other or not capability or float(capability) >= 8:
        return ""
    return (
        f"Attention heads of width {model.head_width} are not a multiple of {FUSED_HEAD_MULTIPLE}, so torch cannot "
        f"fuse attention on compute capability {capability}. Predictions omit the memory of attention scores."
    )


def has_fused_softmax(samples: int, heads: int, s: int) -> bool:
    """Return whether Megatron-LM's fused scale, mask and softmax supports scores [samples, heads, s, s] of a rank.

    A thread block computes four score matrices [s, s] (`megatron/model/fused_softmax.py` at 44bfcb32).
    """
    return samples * heads % 4 == 0 and s % 4 == 0 and s <= 2048
