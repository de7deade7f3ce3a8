"""CUDA bindings of all operators, and their registration for tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from repro.kernels import (
    adamw,
    column_sums,
    cross_entropy,
    dropout,
    gelu,
    glu,
    layernorm,
    norm,
    rope,
    softmax,
)

Binding = Callable[..., Any]

BINDINGS: dict[str, Binding] = {
    "adamw_": adamw.launch_adamw_,
    "norm_squared": norm.launch_norm_squared,
    "layer_norm": layernorm.launch_layer_norm,
    "layer_norm_backward": layernorm.launch_layer_norm_backward,
    "rms_norm": layernorm.launch_rms_norm,
    "rms_norm_backward": layernorm.launch_rms_norm_backward,
    "swiglu": glu.launch_swiglu,
    "swiglu_backward": glu.launch_swiglu_backward,
    "rotary": rope.launch_rotary,
    "bias_gelu": gelu.launch_bias_gelu,
    "bias_gelu_backward": gelu.launch_bias_gelu_backward,
    "bias_dropout_residual": dropout.launch_bias_dropout_residual,
    "bias_dropout_residual_backward": dropout.launch_bias_dropout_residual_backward,
    "causal_softmax": softmax.launch_causal_softmax,
    "causal_softmax_backward": softmax.launch_causal_softmax_backward,
    "cross_entropy_max": cross_entropy.launch_cross_entropy_max,
    "cross_entropy_sums": cross_entropy.launch_cross_entropy_sums,
    "cross_entropy_backward_": cross_entropy.launch_cross_entropy_backward_,
    "sum_rows": column_sums.launch_sum_rows,
}


@contextmanager
def registered_for_cpu(implementation_of: Callable[[str, Binding], Callable[..., Any]]) -> Iterator[None]:
    """Run `implementation_of(name, binding)` instead of torch's operators for tensors on the CPU."""
    library = torch.library.Library("repro", "IMPL")
    for name, binding in BINDINGS.items():
        library.impl(name, implementation_of(name, binding), "CPU", allow_override=True)
    yield
    library._destroy()
