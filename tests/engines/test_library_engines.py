"""What is seen of an engine that is a library, by the counters outside it: states, peak, messages, and whose it is."""

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
SMALL = 2048
"""More bytes than all of AdamW's step counters, one fp32 a parameter, have here."""


def seen(layout: Layout) -> dict[str, Any]:
    experiment = tiny(layout, smallest(layout), "torch", steps=5, untimed_steps=2)
    run = ExperimentRun(
        experiment, meshes.distributed_mesh(layout, "cpu"), torch.device("cpu"), lambda step, phase: None
    )
    run.prelude()
    run.steps(3)
    return run.result().as_dict()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_states_of_torchs_strategies(two: RankPool, zero: int) -> None:
    """In fp32 a parameter has 4 bytes, its gradient 4, its moments 8: whole, or one half on each of two ranks.

    ZeroRedundancyOptimizer gives whole parameters to ranks, so that a rank may have more than half of the moments.
    """
    layout = Layout(dp=2, zero=zero, micro_batch=4)
    results = two.run(seen, layout)
    psi = results[0]["parameters"]
    for part, size in (("parameters", 4 * psi), ("gradients", 4 * psi), ("optimizer", 8 * psi)):
        held = [result["memory"]["states"][part] for result in results]
        sharded = zero == 3 or (zero == 1 and part == "optimizer")
        full = sum(held) if sharded else sum(held) / 2
        assert size <= full <= size + 2 * SMALL, (part, held)
    for result in results:
        states = sum(result["memory"]["states"].values())
        assert result["memory"]["peak"]["total"] > states > 0
        assert result["software"]["name"].startswith("torch 2")
        assert sum(row["sent_bytes"] for row in result["comm"] if row["group"] == "dp") >= 4 * psi
