"""Tests of the suite `today`: the printed shapes, parallel degrees and batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from repro.claims.reader import load_ledger
from repro.config import Experiment
from repro.model import counts
from repro.model.counts import total_parameters
from repro.simulate.time.calibration import calibration_points
from tests import committed

ENTRIES = committed.suite(Path(__file__).parents[3] / "suites/today.toml").entries
EXPERIMENTS = {entry.experiment.name: entry.experiment for entry in ENTRIES}
PRINTED = {
    "mpt-1b-512": 1_315_950_592,
    "mpt-1b-s4096": 1_320_144_896,
    "mpt-1b-s16384": 1_345_310_720,
    "mpt-1b-s65536": 1_445_974_016,
    "mpt-3b-512": 2_651_837_440,
    "mpt-7b-512": 6_658_859_008,
    "mpt-7b-s4096": 6_667_247_616,
    "mpt-7b-s8192": 6_684_024_832,
    "mpt-7b-s32768": 6_784_688_128,
    "mpt-7b-s65536": 6_918_905_856,
    "mpt-13b-512": 12_853_954_560,
    "mpt-13b-s16384": 12_927_354_880,
    "mpt-13b-s32768": 13_011_240_960,
    "mpt-30b-512": 29_975_214_080,
    "mpt-30b-s8192": 30_019_254_272,
    "mpt-70b-512": 64_862_437_376,
}
"""Number of parameters in the table of llm-foundry, including the position embeddings."""


def experiments(prefix: str) -> list[Experiment]:
    """Return the experiments whose names start with `prefix`."""
    return [experiment for name, experiment in EXPERIMENTS.items() if name.startswith(prefix)]


@pytest.mark.parametrize("name", PRINTED)
def test_foundry_models_have_the_printed_parameters(name: str) -> None:
    assert total_parameters(EXPERIMENTS[name].model) == PRINTED[name]


def test_foundry_experiments_have_the_printed_layouts() -> None:
    """Runs use FULL_SHARD or SHARD_GRAD_OP over all GPUs. Up to 7B at 2,048 tokens, activations are not recomputed."""
    for experiment in experiments("mpt-"):
        model, layout = experiment.model, experiment.layout
        assert layout.world == layout.dp
        small = model.hidden <= 2560
        assert layout.zero == (2 if layout.dp >= 128 and small else 3)
        if layout.dp >= 128:
            assert layout.recompute == (model.hidden > 4096)
            assert layout.accumulation == 1


@pytest.mark.parametrize("claim", ["foundry-h100-many", "foundry-h100-long"])
def test_foundry_experiments_have_the_printed_batches(claim: str) -> None:
    for row in load_ledger().claim(claim).rows:
        line = row.variables
        experiment = EXPERIMENTS[f"mpt-{line['at']}"]
        layout = experiment.layout
        assert (layout.micro_batch, layout.global_batch) == (line["micro"], line["batch"])
        assert (layout.world, experiment.seq) == (line.get("GPUs", 8), line.get("sequence", 2048))


@pytest.mark.parametrize(("gpus", "batch"), [(8192, 32), (16384, 16)])
def test_llama_3_has_the_layouts_of_the_paper(gpus: int, batch: int) -> None:
    """arXiv 2407.21783, Table 4 and sec. 3.3.2: 126 chunks have one layer; the first and last chunk have none."""
    for experiment in experiments(f"llama3-405b-{gpus}"):
        layout = experiment.layout
        assert (layout.tp, layout.pp, layout.world) == (8, 16, gpus)
        assert (experiment.seq, layout.replica_batch) == (8192, batch)
        assert layout.global_batch * experiment.seq == 16 * 2**20
        assert layout.stage_layers == (0, *(1,) * 126, 0)


def test_calibration_point_is_an_experiment_of_the_suite() -> None:
    """The calibration point has the conditions of the experiment and the FLOP/s of the published tokens/s."""
    found = [point for point in calibration_points() if point.claim == "fms-fsdp-7b"]
    assert {point.compute_capability for point in found} == {"8.0", "9.0"}
    for point in found:
        (row,) = (row for row in load_ledger().claim(point.claim).rows if row.calibrates == point.name)
        experiment = EXPERIMENTS[f"fms-7b-{row.variables['at']}"]
        assert point.experiment(experiment.model).key == experiment.key
        assert row.printed is not None
        a_token = counts.model_flops(experiment.model, experiment.seq, 1) / experiment.seq
        assert row.printed.value * a_token == pytest.approx(point.flops_per_device, rel=1e-4)
