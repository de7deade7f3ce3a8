"""The DeepSpeed configuration that a layout and a training stand for.

What they leave open has DeepSpeed's own default, but for four sizes of stage 3.  Those are numbers of elements that
fit models of tens of billions of parameters; a small model would be gathered once, whole, and stay so.
"""

from __future__ import annotations

import math
from typing import Any

from repro.config import Layout, Model, Training
from repro.model import counts
from repro.parallel.storage import DTYPES

_PERSISTED_PER_HIDDEN = 10
"""A parameter of up to this many times the hidden size stays whole: what Transformers' `auto` sets, and of a model of
10 000 hidden units DeepSpeed's default of 1e5."""


def configuration(model: Model, layout: Layout, training: Training) -> dict[str, Any]:
    """What `deepspeed.initialize` gets as `config`."""
    found: dict[str, Any] = {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "gradient_clipping": training.clip,
        "zero_optimization": _zero(model, layout),
    }
    if layout.precision == "fp16":
        found["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": int(math.log2(training.loss_scale)),
            "loss_scale_window": training.loss_scale_window,
            "hysteresis": training.loss_scale_hysteresis,
            "min_loss_scale": 1,
        }
    elif layout.precision == "bf16":
        found["bf16"] = {"enabled": True}
    if layout.offload_optimizer:
        # With torch's AdamW: DeepSpeed's own for CPUs is compiled where it is used.
        found["zero_force_ds_cpu_optimizer"] = False
    if layout.recompute:
        found["activation_checkpointing"] = {
            "partition_activations": layout.pa,
            "cpu_checkpointing": layout.pa_cpu,
            "contiguous_memory_optimization": layout.md,
            "number_checkpoints": model.layers,
        }
    return found


def _zero(model: Model, layout: Layout) -> dict[str, Any]:
    # It sets whole buckets aside, two of them with overlap; a small model does not fill what a large one does.
    elements = min(layout.bucket_bytes // DTYPES[layout.precision].itemsize, counts.total_parameters(model))
    elements += elements % 2  # DeepSpeed asks for an even number
    found: dict[str, Any] = {
        "stage": layout.zero,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
        "overlap_comm": layout.overlap,
        "reduce_scatter": layout.zero1_reduce == "reduce-scatter",
    }
    if layout.offload_optimizer:
        found["offload_optimizer"] = {"device": "cpu"}
    if layout.zero == 3:
        # What stage 3 of a layout says: a block ahead, none kept between its forward and its backward pass.  Without a
        # limit of what is live, every module of the pass gathers a further block ahead.
        block = _block(model) // layout.tp
        found["stage3_prefetch_bucket_size"] = block
        parts = counts.parameters_by_part(model)
        ends = parts["token_embedding"] // layout.tp + parts.get("position_embedding", 0)
        found["stage3_max_live_parameters"] = 2 * block + ends
        found["stage3_max_reuse_distance"] = 0
        found["stage3_param_persistence_threshold"] = _PERSISTED_PER_HIDDEN * model.hidden
    return found


def _block(model: Model) -> int:
    """Elements of the matrices of one block, all tp ranks together."""
    inner = 2 * (model.heads + model.key_heads) * model.head_width
    return model.hidden * (inner + model.mlp_matrices * model.ffn_width)
