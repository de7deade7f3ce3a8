"""Provide sample arguments of every command, and the folder in which the samples run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from repro.accuracy.calibrate.document import toml_text as toml
from repro.config import suites, systems
from repro.launch.simulated import simulate_experiment
from repro.results.store import Store
from tests.accuracy.twins.conftest import tables
from tests.report import synthetic

SUITES = Path(__file__).parents[2] / "suites"
ONE_STEP = "--model tiny.toml --system dgx2"
SAMPLES = {
    "run": [
        f"run {SUITES / 'smoke.toml'} --dry-run --results store",
        f"run {SUITES / 'zero_throughput.toml'} --dry-run --results store",
        f"run {SUITES / 'again.toml'} --dry-run --evidence simulated --system dgx-h100 --results store",
    ],
    "results": ["results smoke --results store"],
    "init": ["init mine-{width}.toml"],
    "doctor": ["doctor --results store"],
    "gpu-day": ["gpu-day --dry-run", "gpu-day --dry-run --minutes 60"],
    "submit": [f"submit {SUITES / 'smoke.toml'} --profile lab --dry-run --results store"],
    "claims": [
        "claims --results store",
        "claims zero-fig2-throughput --results store",
        "claims --system dgx-h100 --results store",
    ],
    "models": ["models", "models gpt2-1.5b"],
    "systems": ["systems", "systems dgx2", "systems here.toml"],
    "compare": ["compare store store"],
    "schedule": [
        "schedule --pp 4 --micro-batches 8",
        "schedule --pp 4 --micro-batches 8 --chunks 2",
        "schedule --pp 64 --micro-batches 64",
    ],
    "simulate": [f"simulate {ONE_STEP} --gpus 4 --tp 2 --pp 2 --zero 1"],
    "fit": [f"fit {ONE_STEP} --gpus 2 --micro-batch 1 --memory-limit 1440MB"],
    "plan": [
        f"plan {ONE_STEP} --gpus 4 --tp 2 --pp 2 --micro-batch 1 --recompute --top 3",
        f"plan {ONE_STEP} --gpus 4 --map --zero 1 --micro-batch 1",
        f"plan {ONE_STEP},selene,dgx-h100 --gpus 4 --tokens 1e12 --rank-by cost --price-per-gpu-hour 1,2,3 --recompute",
    ],
    "twin": ["twin deepspeed_lowbw/lowbw-megatron --machine here.toml"],
    "validate": ["validate --results store", "validate --unknowns --results store"],
    "lab check": ["lab check"],
    "lab status": ["lab status"],
    "lab down": ["lab down"],
}
"""Sample arguments by command; `{width}` is replaced by a text that differs between runs."""
SLOW = ("claims", "twin", "plan", "simulate", "fit", "compare", "validate", "run")
"""Commands whose samples take seconds: they trace steps or judge the ledger."""
EXEMPT = {
    **dict.fromkeys(("status", "logs", "cancel", "collect"), "needs a submission to SLURM"),
    **dict.fromkeys(("lab up", "lab exec"), "creates or needs an emulated network"),
    **dict.fromkeys(("report", "export", "artifact", "export-weights"), "writes files"),
    "evaluate": "needs weights",
    "calibrate": "measures this machine for minutes",
}
"""Commands without a sample, and the reason."""


def cases(*, all_samples: bool) -> list[Any]:
    """Return all samples or one of each command as test parameters, with the mark `slow` for slow commands."""
    return [
        pytest.param(sample, marks=[pytest.mark.slow] if command in SLOW else [])
        for command, samples in SAMPLES.items()
        for sample in (samples if all_samples else samples[:1])
    ]


def prepare(folder: Path) -> None:
    """Write the small store, the model file and the system file that the samples name."""
    (folder / "tiny.toml").write_text("layers = 4\nhidden = 128\nheads = 4\nvocab = 512\nseq = 64\n")
    (folder / "here.toml").write_text(toml(tables()))
    entries = suites.load_suite(SUITES / "zero_throughput.toml").entries
    case = next(entry.experiment for entry in entries if entry.experiment.name == "fig2-40b-zero")
    simulated = simulate_experiment(case, systems.load_system_file(case.system), "zero_throughput")
    with Store(folder / "store") as store:
        for record in (*synthetic.records(), simulated):
            store.append(record)
