"""The fused operators `repro::*`, which all training strategies share, for CPU, CUDA and meta tensors.

A module holds one operator with its backward pass, shape function, cost formula, CUDA binding and `reference`, which
computes the same result with plain torch operators.
"""

from repro.kernels.adamw import adamw_
from repro.kernels.attention import causal_attention
from repro.kernels.column_sums import sum_rows
from repro.kernels.cross_entropy import cross_entropy_backward_, cross_entropy_max, cross_entropy_sums
from repro.kernels.cuda.device import ran
from repro.kernels.dropout import bias_dropout_residual
from repro.kernels.families import cost
from repro.kernels.gelu import bias_gelu
from repro.kernels.glu import swiglu
from repro.kernels.layernorm import layer_norm
from repro.kernels.norm import norm_squared
from repro.kernels.random import derive_key, device_key, keep_mask, normal, normal_at, uniform_bits
from repro.kernels.rmsnorm import rms_norm
from repro.kernels.rope import rotary
from repro.kernels.softmax import causal_softmax

__all__ = [
    "adamw_",
    "bias_dropout_residual",
    "bias_gelu",
    "causal_attention",
    "causal_softmax",
    "cost",
    "cross_entropy_backward_",
    "cross_entropy_max",
    "cross_entropy_sums",
    "derive_key",
    "device_key",
    "keep_mask",
    "layer_norm",
    "norm_squared",
    "normal",
    "normal_at",
    "ran",
    "rms_norm",
    "rotary",
    "sum_rows",
    "swiglu",
    "uniform_bits",
]
