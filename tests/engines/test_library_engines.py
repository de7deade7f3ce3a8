"""Test of engine torch with external counters: bytes of states, peak memory, messages and version."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.launch.rank.experiment import ExperimentRun
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.pool import RankPool
from tests.training import smallest, tiny

pytestmark = needs("torch")
COUNTER_BYTES = 2048
"""Upper bound on the bytes of AdamW's step counters, one fp32 number per parameter tensor."""


def run_experiment(layout: Layout) -> dict[str, Any]:
    experiment = tiny(layout, smallest(layout), "torch", steps=5, untimed_steps=2)
    run = ExperimentRun(
        experiment, meshes.distributed_mesh(layout, "cpu"), torch.device("cpu"), lambda step, phase: None
    )
    run.prelude()
    run.steps(3)
    return run.result().as_dict()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_strategies_of_torch_have_the_expected_state_bytes(two: RankPool, zero: int) -> None:
    """Two ranks have 4 bytes per fp32 parameter, 4 per gradient and 8 per pair of moments, each in full or in shards.

    ZeroRedundancyOptimizer assigns full parameters to ranks, so that a rank may have more than half of the moments.
    """
    layout = Layout(dp=2, zero=zero, micro_batch=4)
    results = two.run(run_experiment, layout)
    psi = results[0]["parameters"]
    for state, size in (("parameters", 4 * psi), ("gradients", 4 * psi), ("optimizer", 8 * psi)):
        bytes_by_rank = [result["memory"]["states"][state] for result in results]
        sharded = zero == 3 or (zero == 1 and state == "optimizer")
        full = sum(bytes_by_rank) if sharded else sum(bytes_by_rank) / 2
        assert size <= full <= size + 2 * COUNTER_BYTES, (state, bytes_by_rank)
    for result in results:
        states = sum(result["memory"]["states"].values())
        assert result["memory"]["peak"]["total"] > states > 0
        assert result["software"]["name"].startswith("torch 2")
        assert sum(row["sent_bytes"] for row in result["comm"] if row["group"] == "dp") >= 4 * psi
