"""Every operator with its CUDA binding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from repro.kernels.cuda import adamw, cross_entropy, dropout, gelu, glu, layernorm, norm, rope, softmax

BINDINGS: dict[str, Callable[..., Any]] = {
    "adamw_": adamw.adamw_,
    "norm_squared": norm.norm_squared,
    "layer_norm": layernorm.layer_norm,
    "layer_norm_backward": layernorm.layer_norm_backward,
    "rms_norm": layernorm.rms_norm,
    "rms_norm_backward": layernorm.rms_norm_backward,
    "swiglu": glu.swiglu,
    "swiglu_backward": glu.swiglu_backward,
    "rotary": rope.rotary,
    "bias_gelu": gelu.bias_gelu,
    "bias_gelu_backward": gelu.bias_gelu_backward,
    "bias_dropout_residual": dropout.bias_dropout_residual,
    "bias_dropout_residual_backward": dropout.bias_dropout_residual_backward,
    "causal_softmax": softmax.causal_softmax,
    "causal_softmax_backward": softmax.causal_softmax_backward,
    "cross_entropy_max": cross_entropy.cross_entropy_max,
    "cross_entropy_sums": cross_entropy.cross_entropy_sums,
    "cross_entropy_backward_": cross_entropy.cross_entropy_backward_,
}
