"""Tests of DeepSpeed's states and messages with external counters, and of the global state of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from repro.config import Layout
from repro.engines import build_engine
from repro.launch.rank.experiment import ExperimentRun
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.pool import RankPool
from tests.training import TINY, micro_batches, smallest, tiny, train

pytestmark = needs("deepspeed")

COUNTER_BYTES = 4 * 100
"""Upper bound on the bytes of AdamW's step counters, one per parameter tensor."""
LARGEST = 4 * TINY.hidden**2
REPLICATED = TINY.layers * (3 + 1 + 4 + 1 + 4) * TINY.hidden + 2 * TINY.hidden
"""Elements of biases and norms, which stage 3 does not partition."""


REPLICAS = Layout(dp=2, precision="bf16", micro_batch=2, bucket_bytes=20_000)


def measure(layout: Layout) -> dict[str, Any]:
    experiment = tiny(layout, TINY, "deepspeed", steps=4, untimed_steps=3)
    mesh = meshes.distributed_mesh(layout, "cpu")
    run = ExperimentRun(experiment, mesh, torch.device("cpu"), lambda step, phase: None)
    run.prelude()
    return run.result().as_dict()


def states_and_messages(pool: RankPool, **keys: Any) -> tuple[dict[str, int], dict[str, int], int]:
    """Return rank 0's state bytes, its message bytes by operation, and the number of parameters."""
    result = pool.run(measure, Layout(dp=2, precision="bf16", micro_batch=2, bucket_bytes=20_000, **keys))[0]
    messages: dict[str, int] = {}
    for row in result["comm"]:
        messages[row["op"]] = messages.get(row["op"], 0) + row["payload_bytes"]
    assert result["software"]["name"].startswith("DeepSpeed 0.19")
    assert result["software"]["configuration"]["zero_optimization"]["stage"] == keys["zero"]
    return result["memory"]["states"], messages, result["parameters"]


def test_stage_0_replicates_states_and_all_reduces_gradients(two: RankPool) -> None:
    states, messages, psi = states_and_messages(two, zero=0)
    assert (states["parameters"], states["gradients"]) == (2 * psi, 2 * psi)
    assert 12 * psi <= states["optimizer"] <= 12 * psi + COUNTER_BYTES
    assert 0 <= messages["all_reduce"] - 2 * psi < COUNTER_BYTES


@pytest.mark.parametrize(("zero", "global_batch"), [(1, 4), (1, 8), (2, 4), (2, 8)])
def test_stages_1_and_2_all_reduce_full_gradients(two: RankPool, zero: int, global_batch: int) -> None:
    """Each rank has half of the optimizer states. Only accumulation in stage 1 retains all gradients."""
    states, messages, psi = states_and_messages(two, zero=zero, global_batch=global_batch)
    passes = global_batch // 4 if zero == 2 else 1
    assert states["parameters"] == 2 * psi
    assert 6 * psi <= states["optimizer"] <= 6 * psi + COUNTER_BYTES
    if zero == 1 and global_batch == 8:
        assert states["gradients"] == 2 * psi
    else:
        assert psi <= states["gradients"] <= psi + 2 * LARGEST  # the boundary parameter is not split
    assert 0 <= messages["all_reduce"] - passes * 2 * psi < COUNTER_BYTES
    assert messages["all_gather"] == 2 * psi


def test_stage_3_does_not_partition_small_parameters(two: RankPool) -> None:
    states, messages, psi = states_and_messages(two, zero=3)
    assert states["parameters"] == psi + 2 * REPLICATED
    assert states["gradients"] == psi
    assert 6 * psi <= states["optimizer"] <= 6 * psi + COUNTER_BYTES
    assert messages["reduce_scatter"] == 2 * psi
    # Backward gathers all parameters again, except its first ones: the last block and the head's embedding.
    assert 2 * 2 * psi * 0.6 < messages["all_gather"] < 2 * 2 * psi


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_offload_leaves_no_optimizer_states_on_the_device(two: RankPool, zero: int) -> None:
    """Host memory has master weights and moments, 12 psi/d, and fp32 gradients (in stage 3, also in 16 bits)."""
    result = two.run(measure, replace(REPLICAS, zero=zero, offload_optimizer=True))[0]
    configuration = result["software"]["configuration"]
    assert configuration["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert configuration["zero_force_ds_cpu_optimizer"] is False
    states, psi = result["memory"]["states"], result["parameters"]
    parameters = 2 * psi if zero < 3 else psi + 2 * REPLICATED
    assert (states["parameters"], states["gradients"], states["optimizer"]) == (parameters, 0, 0)
    # Before the first moments, the host has master weights and their gradients.
    assert result["memory"]["most"]["host"] >= 4 * psi


def test_partitioned_activations_are_gathered_once_per_block(two: RankPool) -> None:
    """P_a (1910.02054 sec. 6.1): an all-gather over tp restores each block's input before recomputation."""
    layout = Layout(tp=2, precision="bf16", micro_batch=2, recompute=True, pa=True)
    rows = [row for row in two.run(measure, layout)[0]["comm"] if row["op"] == "all_gather"]
    checkpoint = 2 * TINY.seq * TINY.hidden * 2
    assert [(row["group"], row["calls"]) for row in rows] == [("tp", TINY.layers)]
    assert rows[0]["payload_bytes"] == TINY.layers * checkpoint


# -- global state ----------------------------------------------------------------------------------

PARTITIONED = Layout(tp=2, dp=2, zero=2, micro_batch=2, global_batch=8, recompute=True, pa=True, md=True)
PLAIN = Layout(dp=4, zero=3, micro_batch=2, global_batch=8, recompute=True)


def alternating_losses(layouts: list[tuple[Layout, str]]) -> list[list[float]]:
    """Return the losses of experiments that alternate after each step."""
    experiments = [tiny(layout, smallest(layout), engine) for layout, engine in layouts]
    grids = [meshes.distributed_mesh(layout, "cpu") for layout, _ in layouts]
    engines = [build_engine(e, m, torch.device("cpu")) for e, m in zip(experiments, grids, strict=True)]
    found: list[list[float]] = [[] for _ in layouts]
    for step in range(3):
        for i, (experiment, mesh) in enumerate(zip(experiments, grids, strict=True)):
            norms = engines[i].step(micro_batches(experiment, mesh.dp.rank, step), lambda phase: None)
            engines[i].synchronize()
            found[i].append(norms.loss.item())
    return found


def test_alternating_experiments_have_unchanged_losses(four: RankPool) -> None:
    """Each step restores the global state of checkpointing and groups; losses equal those of separate runs."""
    runs = [(PARTITIONED, "deepspeed"), (PLAIN, "native"), (PLAIN, "deepspeed"), (PARTITIONED, "native")]
    separate = [four.run(alternating_losses, [run])[0][0] for run in runs]
    assert four.run(alternating_losses, runs)[0] == separate


def torch_attributes() -> dict[str, int]:
    """Return the identities of all attributes of modules in which DeepSpeed replaces functions."""
    modules: list[Any] = [torch, torch.nn.functional, torch.nn.Module, torch.Tensor, torch.autograd, dist]
    return {f"{module}.{name}": id(vars(module)[name]) for module in modules for name in vars(module)}


def changed_attributes(layouts: list[Layout]) -> list[str]:
    before = torch_attributes()
    for layout in layouts:
        train(tiny(layout, smallest(layout), "deepspeed", steps=4))
    after = torch_attributes()
    return [name for name in before if after.get(name) != before[name]]


def test_training_leaves_torch_unchanged(two: RankPool) -> None:
    layouts = [Layout(dp=2, zero=zero, micro_batch=4, recompute=zero == 3) for zero in range(4)]
    two.run(train, tiny(layouts[0], engine="deepspeed", steps=4))  # torch imports modules on first use
    assert two.run(changed_attributes, layouts) == [[], []]


SCRIPT = """
from repro import engines
engines.import_libraries("deepspeed", "cpu")  # as before a memory limit
from repro.config import Layout
from tests.training import tiny, train
trained = train(tiny(Layout(zero=2, micro_batch=8, precision="bf16"), engine="deepspeed", steps=4))
assert len(trained.loss) == 4 and trained.parameters
"""


def test_single_process_prints_and_writes_nothing(tmp_path: Path) -> None:
    """Without a launcher, there is no log, no compiled extension and no cache in the home directory."""
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TORCH_EXTENSIONS_DIR", None)
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
