"""Benchmark of the checks in `repro.parallelize`: steps with and without checks alternate on two gloo ranks.

    make benchmarks

Checks: equal units on all ranks, refused reads, outputs of modules inside blocks, changed modules and gradients, and
the agreement of ranks at a step. Model: fp32, 6 transformer layers of width 128, 64 tokens x 4 per rank. The row is
the step with checks. The extra information has the quartiles of the ratio of adjacent steps with and without checks,
in CPU seconds of this rank, because wall time on a shared machine includes other processes.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import repro
from repro.config import Layout
from repro.parallel.zero.unshard import ParameterUnsharder
from repro.wrap.gradients import UserGradients
from repro.wrap.loop import StepAgreement
from repro.wrap.refusals import UnchangedModuleCheck
from tests.pool import RankPool

WIDTH, LAYERS = 128, 6
TRAINED: dict[tuple[int, bool], Any] = {}
"""Module and optimizer by (ZeRO stage, checked); retained in a rank between calls."""


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Disable all checks inside the block, and permanently for modules that are wrapped inside the block."""
    with contextlib.ExitStack() as stack:
        for kind in (UnchangedModuleCheck, UserGradients):
            stack.enter_context(mock.patch.object(kind, "check", return_value=None))
        stack.enter_context(mock.patch.object(StepAgreement, "reach", return_value=set()))
        stack.enter_context(mock.patch.object(ParameterUnsharder, "enable_checks", return_value=None))
        yield


def step(zero: int, checked: bool) -> float:
    """Return the CPU seconds of a step on this rank; the first call builds the module."""
    with contextlib.nullcontext() if checked else unchecked():
        if (zero, checked) not in TRAINED:
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
            module: nn.Module = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters())
            TRAINED[zero, checked] = repro.parallelize(module, optimizer, Layout(dp=2, zero=zero))
        module, optimizer = TRAINED[zero, checked]
        x = torch.ones(4, 64, WIDTH)
        begin = time.process_time()
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begin


def ratios(zero: int, pairs: int) -> list[float]:
    """Return the ratios, minus 1, of steps with and without checks; the order of each pair alternates."""
    found = []
    for i in range(pairs):
        seconds = {checked: step(zero, checked) for checked in (bool(i % 2), not i % 2)}
        found.append(seconds[True] / seconds[False] - 1)
    return found


@pytest.mark.parametrize("zero", range(4))
def test_step_with_all_checks(benchmark: Any, two: RankPool, zero: int) -> None:
    two.run(ratios, zero, 3)
    low, median, high = statistics.quantiles(two.run(ratios, zero, 20)[0], n=4)
    benchmark.group = "step with all checks, two ranks"
    benchmark.extra_info["cost"] = f"{median:+.1%} ({low:+.1%} to {high:+.1%})"
    benchmark.pedantic(two.run, args=(step, zero, True), rounds=8, iterations=1)
