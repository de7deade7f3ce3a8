"""Tests that ranks and traces do not import torch's compiler, whose import takes longer than most traces."""

from __future__ import annotations

import subprocess
import sys

import pytest

TORCH = """
import sys, torch
from repro.measure.memory import MemoryTracker
with MemoryTracker():
    torch.ones(2).add_(torch.empty(2))
assert "torch._dynamo" not in sys.modules

from repro.config import models
from repro.config import Experiment, Layout
from repro.simulate.trace.roles import roles, trace

layout = Layout(tp=2, dp=2, zero=2, precision="fp16", recompute=True, micro_batch=1, global_batch=2)
experiment = Experiment(name="x", model=models.load_model("tiny-parity"), layout=layout)
(role,) = roles(experiment)
before = trace(experiment, role)
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert torch._dynamo.disable(len) is not len, "the real one"
after = trace(experiment, role)
assert sys.modules["torch._dynamo"] is torch._dynamo
assert after.events == before.events
"""
RECORDS = """
import sys
from repro.config import systems
from repro.config import OperatorSet
from repro.simulate.record import simulation_facts
assert all(simulation_facts(systems.load_system_file("selene"), kernels).numbers for kernels in OperatorSet)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("code", [TORCH, RECORDS], ids=["torch", "records"])
def test_compiler_and_torch_are_not_imported(code: str) -> None:
    """The memory tracker and traces need no compiler; the check of a simulated record's age needs no torch."""
    subprocess.run([sys.executable, "-c", code], check=True)
