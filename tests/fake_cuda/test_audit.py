"""The step asks nothing of CUDA's operators that they refuse: precisions, operator sets, fallbacks and layers.

No GPU runs it: tensors are fake ones of the device "cuda" (see `audit`), and the rules are those of `rules`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.test_architectures import BLOOM, FALCON, LLAMA, NEOX

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COMPILER = shutil.which("g++")

pytestmark = pytest.mark.skipif(
    COMPILER is None or torch.version.cuda is not None,
    reason="needs g++, and a torch without CUDA for which tests/fake_cuda/runtime.cpp can stand in",
)

GPT2: dict[str, Any] = {"layers": 1}
LAYERS = {"gpt2": GPT2}
for _name, _keys in {"llama": LLAMA, "neox": NEOX, "bloom": BLOOM, "falcon": FALCON}.items():
    LAYERS[_name] = {**GPT2, **_keys}
LAYERS["biased"] = {**LAYERS["llama"], "biases": "all", "norm": "layer"}
LAYERS["plain"] = {**GPT2, "biases": "none", "positions": "alibi", "kv_heads": 2}

ALONE: dict[str, Any] = {"micro_batch": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {**ALONE, "global_batch": 4},
    "recompute": {**ALONE, "recompute": True},
    "zero1": {**ALONE, "dp": 2, "zero": 1},
    "zero1-2020": {**ALONE, "dp": 2, "zero": 1, "zero1_reduce": "all-reduce", "overlap": False},
    "zero2-no-cb": {**ALONE, "dp": 2, "zero": 2, "cb": False},
    "zero3": {**ALONE, "dp": 2, "zero": 3, "recompute": True},
    "zero3-2021": {**ALONE, "dp": 2, "zero": 3, "zero3_gather": "parameter"},
    "pa": {**ALONE, "tp": 2, "dp": 2, "zero": 2, "recompute": True, "pa": True, "md": True},
    "pa-cpu": {**ALONE, "tp": 2, "recompute": True, "pa": True, "pa_cpu": True},
    "pa-cpu-md": {**ALONE, "tp": 2, "sp": True, "recompute": True, "pa_cpu": True, "md": True},
    "sp": {**ALONE, "tp": 2, "sp": True},
    "pp": {**ALONE, "pp": 2, "dp": 2, "zero": 1, "global_batch": 8},
    "interleaved": {
        **ALONE,
        "pp": 2,
        "schedule": "interleaved",
        "tp": 2,
        "chunks": 2,
        "scatter_gather": True,
        "global_batch": 4,
    },
    "ddp-2019": {**ALONE, "dp": 2, "gradient_as_bucket_view": False, "overlap": False},
}


def case(
    name: str = "gpt2",
    layout: str = "alone",
    precision: str = "bf16",
    kernels: str = "fused",
    *,
    nvrtc: bool = True,
) -> dict[str, Any]:
    """One run of the audit; GPT-2's sets of operators also drop attention weights."""
    drop = 0.1 if kernels in ("softmax", "unfused") else 0.0
    model = {**LAYERS[name], **({"layers": 4} if "pp" in LAYOUTS[layout] else {})}
    return {
        "name": f"{name}-{layout}-{precision}-{kernels}{'' if nvrtc else '-no-nvrtc'}",
        "layout": {**LAYOUTS[layout], "precision": precision, "kernels": kernels},
        "model": model,
        "training": {"attention_dropout": drop},
        "kernels": nvrtc,
        "fault": "",
    }


QUICK = [
    case(precision="fp16"),
    case(precision="fp32", kernels="reference"),
    case(precision="bf16", kernels="reference"),
    case(precision="fp16", kernels="softmax", nvrtc=False),
    case(precision="bf16", kernels="unfused"),
    case("llama", "zero3", nvrtc=False),
    case("bloom", "pp"),
    case("neox", "pa-cpu", "fp16"),
]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for CUDA's runtime, compiled."""
    torch_home, library = Path(torch.__file__).parent, tmp_path_factory.mktemp("fake_cuda") / "runtime.so"
    places = [f"-I{torch_home / 'include'}", f"-L{torch_home / 'lib'}", f"-Wl,-rpath,{torch_home / 'lib'}"]
    command = [COMPILER or "g++", "-std=c++20", "-O0", "-w", "-fPIC", "-shared", str(HERE / "runtime.cpp")]
    done = subprocess.run(
        [*command, "-o", str(library), *places, "-lc10", "-ltorch_cpu"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:3000]
    return library


FAULTS = {
    "layer norm's weights are wide": (
        "import repro.kernels.layernorm as m; m._weight_dtype = lambda x: torch.float32",
        case(kernels="reference"),
        "native_layer_norm on bfloat16 and float32",
    ),
    "a weight is of another dtype": (
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
    "the loss is looked at": (
        "import repro.models.gpt as m; f = m.GPT.forward\n"
        "def forward(self, *a):\n    y = f(self, *a); y.item(); return y\nm.GPT.forward = forward",
        case(),
        "_local_scalar_dense waits for the device",
    ),
    "checkpoints wait in pageable memory": (
        "import repro.parallel.storage as m\n"
        "m.empty_on_host = lambda n, like, c: m.mark(torch.empty(n, dtype=like.dtype), c)",
        case("gpt2", "pa-cpu"),
        "copy_ between the device and pageable memory",
    ),
    "a message is no piece of memory": (
        "import repro.parallel.comm as m; r = m.Group.all_reduce\n"
        "m.Group.all_reduce = lambda self, t, op, purpose: r(self, t.expand(2, *t.shape), op, purpose)",
        case("gpt2", "pp"),
        "a message on cuda, contiguous: False",
    ),
}


WIDE = case(kernels="reference")
WIDE |= {"name": "wide", "model": {**GPT2, "hidden": 2048, "heads": 16}}


@pytest.fixture(scope="module")
def audited(runtime: Path) -> dict[str, dict[str, Any]]:
    """What the audit says of each case, all in one process: importing torch on the stand-in costs more than a case."""
    faulty = [{**where, "name": fault, "fault": change} for fault, (change, where, _) in FAULTS.items()]
    cases = [*QUICK, *faulty, WIDE]
    command = [sys.executable, "-m", "tests.fake_cuda.audit", str(runtime)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    lines = "".join(json.dumps(each) + "\n" for each in cases)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


def test_nothing_is_asked_that_cuda_refuses(audited: dict[str, dict[str, Any]]) -> None:
    for each in QUICK:
        found = audited[each["name"]]
        assert found["broken"] == [], each["name"]
        expected = ["cuda"] if each["kernels"] else ["torch: no NVRTC"]
        assert found["ran"] in (
            expected,
            [] if each["layout"]["kernels"] == "reference" else expected,
        )


def test_faults_are_found(audited: dict[str, dict[str, Any]]) -> None:
    for fault, (_, _, said) in FAULTS.items():
        broken = audited[fault]["broken"]
        assert any(said in each for each in broken), (fault, broken)


def test_torchs_adamw_has_few_calls(audited: dict[str, dict[str, Any]]) -> None:
    """A baseline of a call for every 2**20 elements would flatter our kernel by a tenth of a step."""
    answer = audited["wide"]
    assert answer["broken"] == []
    # Two steps over a bucket each of matrices and of vectors; 12 h^2 + V h + ... = 51 M elements in pieces of 2**24.
    assert 0 < answer["updates"] <= 2 * (51_000_000 // 2**24 + 8)
