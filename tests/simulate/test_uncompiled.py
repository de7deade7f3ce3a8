"""A trace does without torch's compiler, whose import takes longer than most traces, and leaves it as it is."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from repro import models
from repro.config import Experiment, Layout
from repro.simulate.trace import roles, trace

layout = Layout(tp=2, dp=2, zero=2, precision="fp16", recompute=True, micro_batch=1, global_batch=2)
experiment = Experiment(name="x", model=models.load("tiny-parity"), layout=layout)
(role,) = roles(experiment)
before = trace(experiment, role)
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert torch._dynamo.disable(len) is not len, "the real one"
after = trace(experiment, role)
assert sys.modules["torch._dynamo"] is torch._dynamo
assert after.events == before.events
"""


def test_it_is_neither_imported_nor_replaced() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)
