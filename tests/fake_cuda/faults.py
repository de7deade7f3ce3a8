"""Faults that the audit must detect: Python code that injects the fault, the audited case, and the expected text."""

from __future__ import annotations

from typing import Any

from tests.fake_cuda.cases import case

FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "layer norm weights are fp32": (
        "import repro.kernels.layernorm as m; m._weight_dtype = lambda x: torch.float32",
        case(kernels="reference"),
        "native_layer_norm on bfloat16 and float32",
    ),
    "a linear weight has another dtype": (
        "import repro.parallel.tensor as m; r = m.row_products\n"
        "m.row_products = lambda x, weight: r(x, weight.float())",
        case(),
        "mm on bfloat16 and float32",
    ),
    "tokens stay on the host": (
        "import repro.parallel.tensor as m; e = m.embed; m.embed = lambda t, w, tp: e(t.cpu(), w, tp)",
        case(),
        "embedding on tensors of cpu and cuda",
    ),
    "tokens come from pageable memory": (
        "from torch._subclasses.fake_tensor import FakeTensor; FakeTensor.pin_memory = lambda self: self",
        case(),
        "copy_ between the device and pageable memory",
    ),
    "an argument of the norm changes in every pass": (
        "import itertools, repro.model.layer as m; c = itertools.count(); f = m.normalised\n"
        "m.normalised = lambda x, *a: f(x + next(c), *a)",
        case(dropout=0.0),
        "aten.add",
    ),
    "the host reads the loss": (
        "import repro.model.gpt as m; f = m.GPT.forward\n"
        "def forward(self, *a):\n    y = f(self, *a); y.item(); return y\nm.GPT.forward = forward",
        case(),
        "_local_scalar_dense waits for the device",
    ),
    "checkpoints are in pageable host memory": (
        "import repro.parallel.storage as m\n"
        "m.empty_on_host = lambda n, like, c: m.mark(torch.empty(n, dtype=like.dtype), c)",
        case("gpt2", "pa-cpu"),
        "copy_ between the device and pageable memory",
    ),
    "a collective's tensor is not contiguous": (
        "import repro.parallel.comm as m; r = m.Group.all_reduce\n"
        "m.Group.all_reduce = lambda self, t, op, purpose: r(self, t.expand(2, *t.shape), op, purpose)",
        case("gpt2", "pa-cpu"),
        "collective on a cuda tensor, contiguous: False",
    ),
}

CASES = [{**audited, "name": fault, "fault": code} for fault, (code, audited, _) in FAULTS.items()]
