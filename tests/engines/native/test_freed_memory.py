"""Test that an ended experiment frees its tensors, so that the next experiment can use their memory."""

from __future__ import annotations

import gc

import pytest
import torch

from repro.config import Layout
from tests.engines.runs import result_of
from tests.training import tiny

LAYOUTS = {f"ZeRO {zero}": Layout(global_batch=2, zero=zero, precision="bf16") for zero in range(4)}
LAYOUTS["recomputed"] = Layout(micro_batch=2, zero=2, recompute=True, md=True)


def count_tensors() -> int:
    gc.collect()
    return sum(type(each) in (torch.Tensor, torch.nn.Parameter) for each in gc.get_objects())


@pytest.mark.parametrize("name", LAYOUTS)
def test_ended_experiment_frees_all_tensors(name: str) -> None:
    before = count_tensors()
    result_of(tiny(LAYOUTS[name], steps=3, untimed_steps=1))
    assert count_tensors() <= before
