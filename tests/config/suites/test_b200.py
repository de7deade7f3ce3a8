"""Tests of the suites of SimuMax on eight B200 and A100: layouts of its scripts, and errors of the predictions."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from repro.claims.ledger import Row
from repro.config import Experiment
from repro.launch.simulated import simulate_experiment, simulated_system
from repro.model import counts
from repro.simulate.time.calibration import calibration_points
from tests import committed


def experiments(suite: str) -> dict[str, Experiment]:
    """Return the experiments of a suite by name."""
    entries = committed.suite(Path(__file__).parents[3] / "suites" / f"{suite}.toml").entries
    return {entry.experiment.name: entry.experiment for entry in entries}


EXPERIMENTS = experiments("b200")
SIZES = {"70b": (12, 8192, 28672, 8), "405b": (4, 16384, 53248, 16)}
"""Layers, hidden size, width of the MLP and key heads (run_pretrain_llama3.sh)."""


def rows_of(claim: str) -> list[Row]:
    return list(committed.ledger().claim(claim).rows)


def number(row: Row, key: str) -> int:
    """Return the number in a cell such as `tp 2` or `4 micro-batches`."""
    return int(next(word for word in str(row.variables[key]).split() if word.isdigit()))


@pytest.mark.parametrize("claim", ["simumax-b200-steps", "simumax-b200-long", "simumax-a100-steps"])
def test_layouts_are_those_of_the_launcher_script(claim: str) -> None:
    """run_llama3.sh has 8 ranks and derives dp; Megatron ignores its --sequence-parallel with tp 1."""
    rows = rows_of(claim)
    assert len(rows) == {"simumax-b200-steps": 24, "simumax-b200-long": 7, "simumax-a100-steps": 12}[claim]
    suite = experiments("a100_pcie") if "a100" in claim else EXPERIMENTS
    for row in rows:
        experiment = suite[str(row.variables["at"])]
        model, layout = experiment.model, experiment.layout
        tp, cp = number(row, "tp"), number(row, "cp") if "cp" in row.variables else 1
        pp = 2 if (tp, cp) == (1, 1) else 1
        assert (layout.tp, layout.cp, layout.pp, layout.dp) == (tp, cp, pp, 8 // (tp * cp * pp))
        assert (layout.world, layout.sp, layout.zero, layout.grad_dtype) == (8, tp > 1, 1, "fp32")
        assert layout.accumulation == (4 if cp > 1 else number(row, "batches"))
        assert experiment.seq == (number(row, "tokens") if cp > 1 else 4096)
        assert (model.layers, model.hidden, model.ffn, model.kv_heads) == SIZES[experiment.name.split("-")[0]]
        # NullTokenizer adds the end-of-document token; Megatron-LM pads to a multiple of 128 tp.
        assert model.vocab == -(-(128256 + 1) // (128 * tp)) * 128 * tp


def test_calibration_point_is_an_experiment_of_the_suite() -> None:
    (point,) = (point for point in calibration_points() if point.claim == "simumax-b200-steps")
    (row,) = (row for row in rows_of(point.claim) if row.calibrates == point.name)
    experiment = EXPERIMENTS[str(row.variables["at"])]
    assert point.experiment(experiment.model).key == experiment.key
    assert row.printed is not None
    work = counts.model_flops(experiment.model, experiment.seq, experiment.layout.global_batch)
    assert work / 8 / (row.printed.value * 1e-3) == pytest.approx(point.flops_per_device, rel=1e-5)


def errors(claim: str, metric: str, unit: float) -> dict[str, float]:
    """Return the relative error of each predicted value by experiment: predicted / published - 1."""
    found = {}
    for row in rows_of(claim):
        if not row.calibrates and "cp" not in row.variables:
            experiment = EXPERIMENTS[str(row.variables["at"])]
            record = simulate_experiment(experiment, simulated_system(experiment), "b200")
            assert row.printed is not None
            found[experiment.name] = record.metrics[metric] / (row.printed.value * unit) - 1
    return found


def test_peak_memory_is_within_2_percent() -> None:
    found = errors("simumax-b200-memory", "memory.peak_bytes", 2**30)
    assert len(found) == 8
    assert max(map(abs, found.values())) <= 0.02


def blind_errors(claim: str, *words: str) -> list[float]:
    """Return the errors in percent of the blind predictions of rows whose label has all of the words."""
    return [
        100 * (row.blind.value / row.printed.value - 1)
        for row in rows_of(claim)
        if row.blind and row.printed and all(word in row.label for word in words)
    ]


GROUPS = {
    "step, tp 1 and two stages": blind_errors("simumax-b200-steps", "tp 1"),
    "step, tp 2": blind_errors("simumax-b200-steps", "tp 2"),
    "step, tp 4": blind_errors("simumax-b200-steps", "tp 4"),
    "step, tp 8, 405B": blind_errors("simumax-b200-steps", "tp 8", "405B"),
    "step, tp 8, 70B": blind_errors("simumax-b200-steps", "tp 8", "70B"),
    "all steps of 4,096 tokens": blind_errors("simumax-b200-steps"),
    "all steps of 32,768 and 131,072 tokens": blind_errors("simumax-b200-long"),
    "peak allocated memory, 4,096 tokens": blind_errors("simumax-b200-memory")[:8],
    "peak allocated memory, 32,768 and 131,072 tokens": blind_errors("simumax-b200-memory", "tokens"),
}


@pytest.mark.parametrize("group", GROUPS)
def test_accuracy_page_has_the_errors_of_blind_predictions(group: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text()
    found = GROUPS[group]
    middle = f"{median(map(abs, found)):.1f} | {min(found):+.1f} to {max(found):+.1f}"
    assert f"| {group} | {len(found)} | {middle} |" in page


@pytest.mark.slow
def test_only_steps_limited_by_the_host_exceed_15_percent() -> None:
    found = errors("simumax-b200-steps", "step_seconds.median", 1e-3)
    assert len(found) == 23
    assert median(map(abs, found.values())) <= 0.08
    beyond = {name for name, error in found.items() if abs(error) > 0.15}
    assert beyond == {"70b-tp8-mbc4", "70b-tp8-mbc8", "70b-tp8-mbc32"}
