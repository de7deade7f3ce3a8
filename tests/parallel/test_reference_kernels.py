"""Tests that a layout with `kernels = "reference"` trains the same model without the operators of `kernels/`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from repro.config import Layout
from repro.engines import build_engine
from repro.parallel import mesh as meshes
from repro.simulate.memory.live_bytes import measure_live_bytes
from repro.simulate.trace.roles import roles, trace
from tests.parallel.test_parity import BATCH, DROPOUT, alone, assert_same
from tests.training import micro_batches, tiny, train


@pytest.mark.parametrize(
    ("precision", "training"), [("fp32", DROPOUT), ("bf16", {}), ("fp16", {})], ids=["fp32", "bf16", "fp16"]
)
def test_reference_kernels_equal_the_fused_kernels(precision: str, training: dict[str, float]) -> None:
    """Results are equal bit by bit, since both run the same code on a CPU."""
    layout = Layout(micro_batch=BATCH, precision=precision, kernels="reference")
    assert_same([train(tiny(layout, **training))], alone(precision, **training), 0.0, 0.0)


class OperatorCounts(TorchDispatchMode):
    """Dispatch mode that counts the calls of the project's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if str(func).startswith("repro."):
            self.calls[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def test_two_layouts_in_one_process_run_their_own_kernels() -> None:
    """The steps of both layouts alternate, as in a comparison of experiments."""
    engines: dict[str, Any] = {}
    for kernels in ("fused", "reference"):
        experiment = tiny(Layout(micro_batch=2, kernels=kernels), **DROPOUT)
        engines[kernels] = build_engine(experiment, meshes.single_rank_mesh(), torch.device("cpu"))
    for step in range(2):
        for kernels, engine in engines.items():
            with OperatorCounts() as counts:
                engine.step(micro_batches(experiment, 0, step), lambda phase: None)
            fused = {"adamw_", "norm_squared", "layer_norm_backward", "bias_gelu", "cross_entropy_backward_"}
            if kernels == "reference":
                assert not counts.calls
            else:
                assert fused | {"bias_dropout_residual_backward"} <= set(counts.calls)


def test_simulated_step_of_reference_kernels_has_torchs_operators() -> None:
    """The simulator predicts memory and time from the temporaries and bytes of these operators."""
    nbytes: dict[str, int] = {}
    for kernels in ("fused", "reference"):
        experiment = tiny(Layout(micro_batch=2, precision="bf16", kernels=kernels), **DROPOUT)
        found = trace(experiment, roles(experiment)[0])
        names = {operator.name for _, operator in found.operators() if operator.name.startswith("repro.")}
        # torch's fused AdamW has no shape function. Its substitute also makes one pass over memory.
        assert (names == {"repro.adamw_"}) is (kernels == "reference")
        nbytes[kernels] = sum(n * (operator.read + operator.written) for n, operator in found.operators())
        assert measure_live_bytes(found.events).peak_bytes > 0
    assert nbytes["reference"] > nbytes["fused"]
