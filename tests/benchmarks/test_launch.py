"""Microseconds of our own Python for a call of each kernel: operator, binding, arguments, with a driver that does
nothing.  On a GPU the driver adds its own 2 to 4; the issue's bound for both is 10."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from repro.kernels.cuda import (
    adamw,
    cross_entropy,
    dispatch,
    dropout,
    gelu,
    layernorm,
    norm,
    packing,
    softmax,
)
from tests.kernels.fake_driver import install
from tests.kernels.test_operators import samples

pytestmark = pytest.mark.benchmarks

BINDINGS: dict[str, Callable[..., Any]] = {
    "adamw_": adamw.adamw_,
    "norm_squared": norm.norm_squared,
    "layer_norm": layernorm.layer_norm,
    "layer_norm_backward": layernorm.layer_norm_backward,
    "add_layer_norm": layernorm.add_layer_norm,
    "add_layer_norm_backward": layernorm.add_layer_norm_backward,
    "bias_gelu": gelu.bias_gelu,
    "bias_gelu_backward": gelu.bias_gelu_backward,
    "bias_dropout_residual": dropout.bias_dropout_residual,
    "bias_dropout_residual_backward": dropout.bias_dropout_residual_backward,
    "causal_softmax": softmax.causal_softmax,
    "causal_softmax_backward": softmax.causal_softmax_backward,
    "cross_entropy_max": cross_entropy.cross_entropy_max,
    "cross_entropy_sums": cross_entropy.cross_entropy_sums,
    "cross_entropy_backward_": cross_entropy.cross_entropy_backward_,
    "pack": packing.pack,
    "unpack": packing.unpack,
}


@pytest.mark.parametrize("name", BINDINGS)
def test_call(benchmark: BenchmarkFixture, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark.group = "launch"
    driver = install(monkeypatch)
    driver.keep = False
    call = dispatch.chooser(name, BINDINGS[name], pytest.fail)
    arguments = samples(torch.bfloat16)[name]
    benchmark(call, *arguments)
