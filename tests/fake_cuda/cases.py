"""Cases for the fake device: layouts, layers and operator sets, and the process that runs `audit` on many cases."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.test_architectures import BLOOM, FALCON, LLAMA, NEOX

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COMPILER = shutil.which("g++")

needs_compiler = pytest.mark.skipif(
    COMPILER is None or torch.version.cuda is not None,
    reason="needs g++ and a torch without CUDA, whose runtime tests/fake_cuda/runtime.cpp replaces",
)

Answers = dict[str, dict[str, Any]]
"""Output line of the audit, by case name."""

LAYERS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "neox": NEOX,
    "bloom": BLOOM,
    "falcon": FALCON,
    "biased": {**LLAMA, "biases": "all", "norm": "layer"},
    "plain": {"biases": "none", "positions": "alibi", "kv_heads": 2},
}

SETS = ["fused", "reference", "softmax", "unfused"]
SETS += ["fused-2024", "fused-2026", "megatron-2025", "torchtitan-2024"]
INTERLEAVED = {"pp": 2, "schedule": "interleaved", "chunks": 2, "scatter_gather": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"global_batch": 4},
    "recompute": {"recompute": True},
    "zero1": {"dp": 2, "zero": 1},
    "zero1-2020": {"dp": 2, "zero": 1, "zero1_reduce": "all-reduce", "overlap": False},
    "zero2-no-cb": {"dp": 2, "zero": 2, "cb": False},
    "zero3": {"dp": 2, "zero": 3, "recompute": True},
    "zero3-2021": {"dp": 2, "zero": 3, "zero3_gather": "parameter"},
    "pa": {"tp": 2, "dp": 2, "zero": 2, "recompute": True, "pa": True, "md": True},
    "pa-cpu": {"tp": 2, "recompute": True, "pa": True, "pa_cpu": True},
    "pa-cpu-md": {"tp": 2, "sp": True, "recompute": True, "pa_cpu": True, "md": True},
    "sp": {"tp": 2, "sp": True},
    "cp": {"cp": 2, "dp": 2, "zero": 1},
    "pp": {"pp": 2, "dp": 2, "zero": 1, "global_batch": 8},
    "interleaved": {**INTERLEAVED, "tp": 2, "global_batch": 4},
    "fp32-gradients": {"dp": 2, "zero": 2, "recompute": True, "md": True, "grad_dtype": "fp32"},
    "ddp-2019": {"dp": 2, "gradient_as_bucket_view": False, "overlap": False},
}
"""Layout keys in addition to the micro-batch of 2."""


def case(
    name: str = "gpt2",
    layout: str = "alone",
    precision: str = "bf16",
    kernels: str = "fused",
    *,
    nvrtc: bool = True,
    dropout: float = 0.1,
    layers: int = 1,
) -> dict[str, Any]:
    """Return a case of the audit; only operator sets without flash attention drop attention weights."""
    attention_dropout = dropout if kernels in ("softmax", "torchtitan-2024", "unfused") else 0.0
    layout_of = LAYOUTS[layout]
    layers = layout_of["pp"] * layout_of.get("chunks", 1) if "pp" in layout_of else layers
    words = [name, layout, precision, kernels, f"{dropout}", f"{layers}", *([] if nvrtc else ["no-nvrtc"])]
    return {
        "name": "-".join(words),
        "layout": {"micro_batch": 2, **layout_of, "precision": precision, "kernels": kernels},
        "model": {**LAYERS[name], "layers": layers},
        "training": {"dropout": dropout, "attention_dropout": attention_dropout},
        "kernels": nvrtc,
        "fault": "",
    }


QUICK = [
    case(dropout=0.0),
    case(dropout=0.0, layers=2),
    case(kernels="reference", dropout=0.0),
    case(precision="fp16", kernels="softmax", nvrtc=False),
    case(kernels="unfused", dropout=0.0),
    case("llama", "zero3", nvrtc=False),
    case("bloom", "pp"),
    case(layout="fp32-gradients"),
    case("neox", "pa-cpu", "fp16"),
]
"""Cases of the tests that are not slow."""

ADAMW = {
    **case(kernels="reference", layers=2),
    "name": "AdamW converts 2**13 gradient elements to fp32 at once",
    "fault": "import repro.kernels.adamw as m; m.DEVICE_CHUNK = 2**13",
}


def compile_runtime(folder: Path) -> Path:
    """Compile the replacement for CUDA's runtime and return its path."""
    torch_home, library = Path(torch.__file__).parent, folder / "runtime.so"
    options = [f"-I{torch_home / 'include'}", f"-L{torch_home / 'lib'}", f"-Wl,-rpath,{torch_home / 'lib'}"]
    command = [COMPILER or "g++", "-std=c++20", "-O0", "-w", "-fPIC", "-shared", str(HERE / "runtime.cpp")]
    done = subprocess.run(
        [*command, "-o", str(library), *options, "-lc10", "-ltorch_cpu"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:3000]
    return library


def audit(runtime: Path, cases: Sequence[dict[str, Any]]) -> Answers:
    """Run the audit in a separate process and return its answers."""
    command = [sys.executable, "-m", "tests.fake_cuda.audit", str(runtime)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    lines = "".join(json.dumps(each) + "\n" for each in cases)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}
