"""Configurations of megatron-core for an experiment, with the library's recommendations."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from repro.config import Experiment
from repro.engines.frameworks.rules import load_framework
from repro.engines.frameworks.table import settings_of
from repro.parallel.storage import DTYPES


def transformer_config(experiment: Experiment, device: torch.device, timers: Any) -> TransformerConfig:
    """Return the configuration of the model and its tensor and pipeline parallelism.

    On CUDA the library compiles (`jit_fuser`) bias and GELU, bias and residual, and the loss; on CPUs torch's operators
    run. The matrix product does not accumulate gradients (`gradient_accumulation_fusion`), which needs APEX.
    """
    layout = experiment.layout
    interleaved, fuse = layout.chunks > 1, device.type == "cuda"
    return TransformerConfig(
        **_options(TransformerConfig, experiment),
        activation_func=F.gelu if fuse else partial(F.gelu, approximate="tanh"),
        bias_activation_fusion=fuse,  # the fused form is tanh too
        bias_dropout_fusion=fuse,
        cross_entropy_loss_fusion=fuse,
        # Without `perform_initialization` the library does not mark the parameters that tp splits, and its norm counts
        # only the first tp rank's part of them (upstream 4084).
        perform_initialization=True,
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        # Float16Module rounds the loaded weights.
        params_dtype=torch.float32,
        pipeline_dtype=DTYPES[layout.precision],
        virtual_pipeline_model_parallel_size=layout.chunks if interleaved else None,
        overlap_p2p_comm=interleaved and layout.overlap,
        batch_p2p_comm=not (interleaved and layout.overlap),
        deallocate_pipeline_outputs=layout.pp > 1,
        gradient_accumulation_fusion=False,
        barrier_with_L1_time=False,
        timers=timers,
    )


def _options(kind: type, experiment: Experiment) -> dict[str, Any]:
    """Return the options of Megatron-LM's command line that a configuration of the library has as fields."""
    names = {field.name for field in fields(kind)}
    options = load_framework("megatron").options_of(settings_of(experiment))
    return {name: value for name, value in options.items() if name in names}


def _keep(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight without an initialisation."""
    return weight


def data_parallel_config(experiment: Experiment) -> DistributedDataParallelConfig:
    """Return the configuration of gradient buffers; as in the library's script, bf16 gradients are summed in fp32."""
    layout = experiment.layout
    in_fp32 = layout.precision != "fp16" or layout.grad_dtype == "fp32"
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=in_fp32,
        overlap_grad_reduce=layout.overlap and layout.dp > 1,
        overlap_param_gather=overlaps_gather(experiment),
        use_distributed_optimizer=layout.zero == 1,
        # The library counts elements.
        bucket_size=max(1, layout.bucket_bytes // (4 if in_fp32 else 2)),
    )


def overlaps_gather(experiment: Experiment) -> bool:
    """Return whether the gather of updated parameters overlaps with the next forward pass."""
    layout = experiment.layout
    return layout.zero == 1 and layout.dp > 1 and layout.overlap and layout.gather_overlap


def optimizer_config(experiment: Experiment) -> OptimizerConfig:
    """Return the configuration of AdamW, clipping and the loss scale; each step sets the learning rate."""
    layout, training = experiment.layout, experiment.training
    shared = _options(OptimizerConfig, experiment)
    # Infinity computes the norm without changing a gradient.
    shared |= {
        "clip_grad": training.clip or float("inf"),
        "overlap_param_gather": overlaps_gather(experiment),
    }
    return OptimizerConfig(
        optimizer="adam", params_dtype=DTYPES[layout.precision], min_loss_scale=1.0, **shared
    )


def non_default_settings(configuration: Any) -> dict[str, Any]:
    """Return the settings that differ from their defaults, as JSON data without functions and groups."""
    found = {}
    for field in fields(configuration):
        value = getattr(configuration, field.name, None)
        value = str(value) if isinstance(value, torch.dtype) else value
        if isinstance(value, (bool, int, float, str)) and value != field.default:
            found[field.name] = value
    return found
