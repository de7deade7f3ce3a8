"""What DeepSpeed holds and sends, counted from outside, beside the ZeRO paper's formulas and where it differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from repro.config import Layout
from repro.config.errors import ConfigError
from repro.launch.rank.experiment import ExperimentRun
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.pool import RankPool
from tests.training import TINY, tiny

pytestmark = needs("deepspeed")

COUNTERS = 4 * 100
"""Bytes of AdamW's step counters at most, one a parameter where it has tensors of its own."""
LARGEST = 4 * TINY.hidden**2
PERSISTED = TINY.layers * (3 + 1 + 4 + 1 + 4) * TINY.hidden + 2 * TINY.hidden
"""Elements of biases and norms, which stage 3 keeps whole."""


def seen(layout: Layout) -> dict[str, Any]:
    experiment = tiny(layout, TINY, "deepspeed", steps=4, untimed_steps=3)
    run = ExperimentRun(
        experiment, meshes.distributed_mesh(layout, "cpu"), torch.device("cpu"), lambda step, phase: None
    )
    run.prelude()
    return run.result().as_dict()


def held(pool: RankPool, **keys: Any) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes of states and of messages by operation, rank 0's, and the parameters that there are."""
    result = pool.run(seen, Layout(dp=2, precision="bf16", micro_batch=2, bucket_bytes=20_000, **keys))[0]
    messages: dict[str, int] = {}
    for row in result["comm"]:
        messages[row["op"]] = messages.get(row["op"], 0) + row["payload_bytes"]
    assert result["software"]["name"].startswith("DeepSpeed 0.19")
    assert result["software"]["configuration"]["zero_optimization"]["stage"] == keys["zero"]
    return result["memory"]["states"], messages, result["parameters"]


def test_stage_0_is_data_parallelism(two: RankPool) -> None:
    states, messages, psi = held(two, zero=0)
    assert (states["parameters"], states["gradients"]) == (2 * psi, 2 * psi)
    assert 12 * psi <= states["optimizer"] <= 12 * psi + COUNTERS
    assert 0 <= messages["all_reduce"] - 2 * psi < COUNTERS


@pytest.mark.parametrize(("zero", "global_batch"), [(1, 4), (1, 8), (2, 4), (2, 8)])
def test_stages_1_and_2_sum_gradients_on_all_ranks(two: RankPool, zero: int, global_batch: int) -> None:
    """The optimizer's states are a half each.  All gradients stay only where stage 1 accumulates."""
    states, messages, psi = held(two, zero=zero, global_batch=global_batch)
    passes = global_batch // 4 if zero == 2 else 1
    assert states["parameters"] == 2 * psi
    assert 6 * psi <= states["optimizer"] <= 6 * psi + COUNTERS
    if zero == 1 and global_batch == 8:
        assert states["gradients"] == 2 * psi
    else:
        assert psi <= states["gradients"] <= psi + 2 * LARGEST  # the parameter on the boundary is kept whole
    assert 0 <= messages["all_reduce"] - passes * 2 * psi < COUNTERS
    assert messages["all_gather"] == 2 * psi


def test_stage_3_keeps_small_parameters_whole(two: RankPool) -> None:
    states, messages, psi = held(two, zero=3)
    assert states["parameters"] == psi + 2 * PERSISTED
    assert states["gradients"] == psi
    assert 6 * psi <= states["optimizer"] <= 6 * psi + COUNTERS
    assert messages["reduce_scatter"] == 2 * psi
    # Twice but for what backward begins with: the block that the turn finds, and the head's embedding.
    assert 2 * 2 * psi * 0.6 < messages["all_gather"] < 2 * 2 * psi


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_offload_leaves_no_optimizer_states_on_the_device(two: RankPool, zero: int) -> None:
    """Masters and moments, 12 psi/d, and the gradients that they are updated by (fp32; 16 bits in stage 3, too)."""
    layout = Layout(dp=2, zero=zero, precision="bf16", micro_batch=2, bucket_bytes=20_000)
    result = two.run(seen, replace(layout, offload_optimizer=True))[0]
    told = result["software"]["configuration"]
    assert told["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert told["zero_force_ds_cpu_optimizer"] is False
    states, psi = result["memory"]["states"], result["parameters"]
    parameters = 2 * psi if zero < 3 else psi + 2 * PERSISTED
    assert (states["parameters"], states["gradients"], states["optimizer"]) == (parameters, 0, 0)
    assert (
        result["memory"]["most"]["host"] >= 4 * psi
    )  # masters and their gradients, before there are moments


def test_partitioned_activations_are_gathered_once_a_block(two: RankPool) -> None:
    """P_a (1910.02054 sec. 6.1): an all-gather of each block's input over tp before it runs again."""
    layout = Layout(tp=2, precision="bf16", micro_batch=2, recompute=True, pa=True)
    rows = [row for row in two.run(seen, layout)[0]["comm"] if row["op"] == "all_gather"]
    checkpoint = 2 * TINY.seq * TINY.hidden * 2
    assert [(row["group"], row["calls"]) for row in rows] == [("tp", TINY.layers)]
    assert rows[0]["payload_bytes"] == TINY.layers * checkpoint


def test_what_it_has_no_counterpart_of_is_refused() -> None:
    for keys, key in (
        ({"pp": 2}, "pp"),
        ({"tp": 2, "sp": True}, "sp"),
        ({"dp": 2, "cb": False}, "cb"),
        ({"recompute": True, "md": True}, "md"),
        ({"dp": 2, "offload_optimizer": True}, "offload_optimizer"),
        ({"precision": "bf16", "grad_dtype": "fp32"}, "grad_dtype"),
    ):
        with pytest.raises(ConfigError, match="deepspeed") as refused:
            tiny(Layout(**keys), engine="deepspeed")
        assert refused.value.key == key
    with pytest.raises(ConfigError, match="power of 2"):
        tiny(Layout(precision="fp16"), engine="deepspeed", loss_scale=1000.0)
