"""Program of the step `facts`: machine, driver, packages, their places, and the kit, as one JSON file."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from repro.launch.doctor.gpu import unusable_reason
from repro.launch.gpu_day.steps import CHECKOUT
from repro.measure.provenance import KIT_FILE, provenance
from repro.util.files import write_json
from repro.util.processes import available_bytes, usable_cores

MODULES = ("repro", "repro.kernels", "pydantic", "scipy", "submitit", "pyroute2", "torch", "transformers")
"""Modules whose places show which of them come from the kit."""
QUERY_TIMEOUT_S = 20.0


def facts() -> dict[str, Any]:
    """Return the facts as plain JSON data."""
    kit = CHECKOUT / KIT_FILE
    return {
        "provenance": provenance(),
        "kit": json.loads(kit.read_text(encoding="utf-8")) if kit.is_file() else None,
        "modules": {name: _place(name) for name in MODULES},
        "cores": usable_cores(),
        "available_bytes": available_bytes(),
        "gpu_unusable": unusable_reason(torch),
        "tools": {name: shutil.which(name) for name in ("compute-sanitizer", "nvcc", "gcc", "ncu", "nsys")},
        "nvidia_smi": _output("nvidia-smi", "-q", "-d", "CLOCK,POWER,PERFORMANCE,TEMPERATURE,MEMORY"),
        "topology": _output("nvidia-smi", "topo", "-m"),
    }


def _place(name: str) -> str:
    """Return the file of a module, or the reason why it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return f"not importable: {error}"
    return str(module.__file__ or next(iter(module.__path__), ""))


def _output(*command: str) -> str:
    """Return the output of a command; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    found = facts()
    write_json(Path(sys.argv[1]), found)
    print(json.dumps(found["modules"], indent=1))
