"""Artificial steps whose seconds depend on unknowns, and claims about their rates."""

from __future__ import annotations

from pathlib import Path

from repro.claims.judge import judge
from repro.claims.verdicts import ClaimResult
from repro.config import Experiment, Layout, Model, OperatorSet
from repro.config.systems.unknowns import PACE
from repro.results.interval import Sensitivity, StepInterval
from repro.results.schema import ExperimentRecord
from tests.claims.constructed_records import row, write_ledger
from tests.claims.test_possible import rate, simulated
from tests.records import changed

MODEL = Model(name="m", layers=2, hidden=32, heads=2, vocab=256, seq=32)
RINGS = "links.inter-node.rings"


def step_record(system: str, name: str, **moves: tuple[float, float]) -> ExperimentRecord:
    """Return a step of 10 s and 100 samples on `system`; `moves` has its seconds at both ends of an unknown."""
    keys = {"rings": RINGS, "pace": PACE}
    sensitivities = [
        Sensitivity(key=keys[key], low=1, best=2, high=3, low_s=low, high_s=high)
        for key, (low, high) in moves.items()
    ]
    record = simulated(f"s/{name}", 10.0, StepInterval(draws=[10.0] * 4, moves=sensitivities))
    layout = Layout(precision="fp16", kernels=OperatorSet.UNFUSED)
    experiment = Experiment(name=name, model=MODEL, layout=layout, system=system)
    return changed(record, experiment=experiment.as_dict(), key=experiment.key)


def judge_rates(path: Path, published: dict[str, str], *records: ExperimentRecord) -> list[ClaimResult]:
    """Judge one row per published rate of a step, in samples per second."""
    rows = "".join(
        row(number, name, unit='"samples/s"', simulated=rate(f"s/{name}"))
        for name, number in published.items()
    )
    return judge(write_ledger(path, rows), records)
