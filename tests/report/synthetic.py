"""Synthetic records for the report's tests: invented numbers in the format of real records."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from repro.config import Experiment, Layout, Model, Training
from repro.results.measured import comparison_record, experiment_record
from repro.results.record_parts import RankResult
from repro.results.schema import Record
from repro.results.store import Store

MODEL = Model(name="synthetic", layers=2, hidden=32, heads=2, vocab=256, seq=32)
PSI = 100_003
PROVENANCE = {
    "git": {"commit": "0" * 40, "dirty": True, "diff": "0123456789abcdef"},
    "packages": {"torch": "0.0.0"},
    "python": {"version": "3.0"},
    "cpu": {"model": "synthetic processor", "usable_cores": 2},
    "memory": {"total_bytes": 8_000_000_000},
    "gpus": [],
    "host": "synthetic",
}


def experiment(name: str, **layout: Any) -> Experiment:
    return Experiment(name=name, model=MODEL, layout=Layout(**layout), training=Training(steps=20, seq=32))


def rank_result(rank: int, e: Experiment, seed: int = 0, speed: float = 1.0) -> dict[str, Any]:
    rng = random.Random(f"{e.name} {rank} {seed}")
    nd, stage = e.layout.dp, e.layout.zero
    mixed = e.layout.precision != "fp32"
    shard = math.ceil(PSI / nd)
    states = {
        "parameters": 2 * (shard if stage == 3 else PSI),
        "gradients": 2 * (shard if stage >= 2 else PSI),
        "optimizer": 12 * (shard if stage >= 1 else PSI),
    }
    if not mixed:
        states = {key: 2 * value for key, value in states.items()}
    peak = states | {
        "activations": 700_000,
        "checkpoints": 200_000 * (e.layout.recompute and not e.layout.pa_cpu),
    }
    peak |= {"communication": 70_000 * (nd > 1), "other": 40_000}
    peak = {"total": sum(peak.values()), **peak, "host": 150_000 * e.layout.pa_cpu}
    steps = [[speed * 0.01 * (1 + 0.05 * rng.random()) for _ in range(4)] for _ in range(5)]
    volume = 2 * PSI * (3 if stage == 3 or e.layout.zero1_reduce == "all-reduce" else 2) * (nd - 1) / nd
    amounts = {"size": nd, "calls": 3, "payload_bytes": 4 * PSI, "sent_bytes": volume}
    comm = [{"op": "any", "group": "dp", "purpose": "", **amounts}]
    losses = [5.5 * math.exp(-step / 30) for step in range(20)]
    if e.layout.world > 1:
        losses = [loss * (1 + 1e-7 * rng.choice((0, 1, 3))) for loss in losses]
    outside = {"start": 10**9, "end": 1_340_000_000} if e.layout.zero == 3 else None  # as on a GPU
    bounds = {"init_peak_bytes": 10**6, "rss_peak_bytes": 3 * 10**8}
    memory = {"states": states, "peak": peak, "most": peak, **bounds, "cuda": {}, "beside_torch": outside}
    series = {"loss": losses, "grad_norm": [1.0] * 20, "loss_scale": [], "skipped_steps": [], "rounds": steps}
    phases = {"forward": 3e-3, "backward": 6e-3, "optimizer": 1e-3}
    result = {"rank": rank, "outcome": "ok", "reason": "", "parameters": PSI, "phase_seconds": phases}
    return {**result, **series, "memory": memory, "comm": comm if nd > 1 else []}


def results(e: Experiment, speed: float = 1.0) -> list[RankResult]:
    return [RankResult.read(rank_result(rank, e, speed=speed)) for rank in range(e.layout.world)]


def experiments() -> list[Experiment]:
    stages, bf16 = range(4), {"precision": "bf16"}
    states = [
        experiment(f"states-z{z}-dp{n}", dp=n, zero=z, precision="bf16") for n in (1, 2, 4) for z in stages
    ]
    reduced = {"zero": 1, "zero1_reduce": "all-reduce", **bf16}
    parity: dict[str, dict[str, Any]] = {
        "single": {},
        **{f"z{z}-dp2": {"dp": 2, "zero": z} for z in stages},
        "tp2": {"tp": 2},
        "tp2-sp": {"tp": 2, "sp": True},
        **{f"z{z}-tp2-dp2": {"dp": 2, "tp": 2, "zero": z} for z in stages},
    }
    return [
        *states,
        *(experiment(f"comm-z1-allreduce-dp{n}", dp=n, **reduced) for n in (2, 4)),
        *(experiment(f"parity-{name}", global_batch=4, **layout) for name, layout in parity.items()),
        experiment("checkpoints-tp2", tp=2, recompute=True),
        experiment("checkpoints-tp2-cpu", tp=2, recompute=True, pa=True, pa_cpu=True),
    ]


def records() -> list[Record]:
    """Return records of all experiments, of which one ran out of memory and one hung, and of three comparisons."""
    common = {"suite": "smoke", "provenance": PROVENANCE}
    found: list[Record] = [experiment_record(e, results(e), wall_s=1.0, **common) for e in experiments()]
    limit = experiment("limit-z0-dp2", dp=2, micro_batch=2)
    reason = "rank 1: out of memory in backward of step 1 <not enough>"
    found.append(experiment_record(limit, [], wall_s=2.0, outcome="oom", reason=reason, **common))
    hung = experiment("fp16-z2-dp2", dp=2, zero=2, precision="fp16")
    found.append(experiment_record(hung, [], wall_s=60.0, outcome="hang", reason="rank 0 stopped", **common))
    for number, (stage, speed) in enumerate(((0, 1.06), (1, 1.01), (3, 0.9))):
        a, b = (experiment(f"speed-{name}z{stage}-dp2", dp=2, zero=stage) for name in ("torch-", ""))
        record = comparison_record(a, b, (results(a), results(b, 1 / speed)), **common)
        assert record is not None
        if number == 2:
            record = replace(record, low=None, high=None, rounds=2, pairs=record.pairs[:2])
        found.append(record)
    return found


def store(root: Path) -> Path:
    with Store(root) as opened:
        for record in records():
            opened.append(record)
    return root
