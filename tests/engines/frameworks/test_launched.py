"""Tests that written files train: DeepSpeed's in its launch script, Megatron-LM's in engine megatron."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from repro.config import Experiment, Layout
from repro.engines.frameworks.files import read_experiment, write_files
from tests.engines.needs import needs
from tests.engines.runs import result_of
from tests.pool import RankPool
from tests.training import smallest, tiny, train

STEPS = 4
MODEL = """
import atexit, json, os, pickle
from pathlib import Path
import torch
from repro.engines.deepspeed import engine, model_states
from repro.measure.operators import CollectiveCounter
from repro.model.gpt import BatchPosition
from repro.parallel import mesh as meshes
from tests.training import micro_batches

engine.import_deepspeed("cpu")
experiment = pickle.loads(Path("experiment.pickle").read_bytes())
device = torch.device("cpu")
seen = {"losses": [], "comm": []}

class Model(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, tokens, targets):
        loss = self.inner(tokens, targets, BatchPosition(0, 0))
        seen["losses"][-1].append(loss.item())
        return loss

def build_model():
    global mesh
    torch.distributed.init_process_group("gloo")
    engine.join_process_group(device)
    mesh = meshes.distributed_mesh(experiment.layout, "cpu")
    built = model_states.build_model(experiment, mesh, device)
    seen["parameters"] = built.count
    return Model(built.model)

def batches(step):
    seen["losses"].append([])
    if step == experiment.training.steps - 1:
        counter = CollectiveCounter(mesh)
        counter.__enter__()
        atexit.register(end, counter)
    for batch in micro_batches(experiment, mesh.dp.rank, step):
        yield batch.tokens, batch.targets

def end(counter):
    counter.__exit__(None, None, None)
    seen["comm"] = counter.ledger.rows()
    Path(f"seen-{os.environ['RANK']}.json").write_text(json.dumps(seen))
"""


def write_tiny_experiment(key: str, layout: Layout, folder: Path) -> Experiment:
    """Write the launch files of a tiny experiment to a folder; return the experiment."""
    experiment = tiny(layout, smallest(layout), key, steps=STEPS, untimed_steps=1, warmup_steps=0, lr=6e-3)
    write_files(key, experiment, layout.world, folder)
    return experiment


def dp_bytes(rows: list[dict[str, Any]]) -> int:
    return sum(row["sent_bytes"] for row in rows if row["group"] == "dp")


@needs("deepspeed")
@pytest.mark.parametrize("zero", [1, 3])
def test_deepspeed_launch_script_trains_the_experiment(two: RankPool, zero: int, tmp_path: Path) -> None:
    """Losses and parameters equal those of engine `native`. Bytes of stage 1 equal those of engine `deepspeed`."""
    layout = Layout(dp=2, zero=zero, micro_batch=2, global_batch=8, gather_overlap=False)
    experiment = write_tiny_experiment("deepspeed", layout, tmp_path)
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "experiment.pickle").write_bytes(pickle.dumps(experiment))
    root = Path(__file__).parents[3]
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(root)}
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MASTER_PORT": "29631"}
    environment = {**os.environ, **paths, **settings}
    command = ["bash", "launch.sh"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr[-3000:]
    ours = two.run(train, replace(experiment, engine="native"))
    ranks = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    for seen, mine in zip(ranks, ours, strict=True):
        assert [len(losses) for losses in seen["losses"]] == [layout.accumulation] * STEPS
        assert seen["parameters"] == sum(value.numel() for value in mine.parameters.values())
    if zero == 1:  # stage 3 gathers depend on the counted step and on `zero.Init`
        # Engine deepspeed also averages the loss over dp, which is one number.
        for seen, result in zip(ranks, two.run(result_of, experiment), strict=True):
            assert dp_bytes(seen["comm"]) == pytest.approx(dp_bytes(result["comm"]), abs=64)
    means = torch.tensor([[sum(step) / len(step) for step in seen["losses"]] for seen in ranks]).mean(0)
    torch.testing.assert_close(means, torch.tensor(ours[0].loss), rtol=1e-5, atol=0.0)
    assert ours[0].loss[-1] < 0.98 * ours[0].loss[0]


MEGATRON = {
    "z1": Layout(dp=2, zero=1, micro_batch=2, global_batch=8),
    "tp-sp": Layout(tp=2, sp=True, micro_batch=4, recompute=True),
    "uneven": Layout(pp=2, stage_layers=(1, 2), micro_batch=2, global_batch=8),
    "interleaved": Layout(pp=2, chunks=2, schedule="interleaved", micro_batch=2, global_batch=8),
}


@needs("megatron")
@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_script_configures_and_trains_the_experiment(
    two: RankPool, name: str, tmp_path: Path
) -> None:
    """Arguments with the name of a field of TransformerConfig set this field (`core_transformer_config_from_args`).
    megatron-core has no `pretrain_gpt.py`, so that engine megatron trains the experiment of the script."""
    from megatron.core.transformer import TransformerConfig

    from repro.engines.megatron import model

    experiment = write_tiny_experiment("megatron", MEGATRON[name], tmp_path)
    script = (tmp_path / "megatron.sh").read_text()
    tokens = shlex.split(script.split("ARGUMENTS=(")[1].split("\n)")[0], comments=True)
    starts = [i for i, token in enumerate(tokens) if token.startswith("--")]
    given = {
        tokens[i][2:].replace("-", "_"): " ".join(tokens[i + 1 : end]) or "True"
        for i, end in zip(starts, [*starts[1:], len(tokens)], strict=True)
    }
    configuration = model.transformer_config(experiment, torch.device("cpu"), None)
    names = {field.name for field in fields(TransformerConfig)} & given.keys()
    names -= {"pipeline_model_parallel_layout"}
    assert {"num_layers", "tensor_model_parallel_size", "ffn_hidden_size", "kv_channels"} <= names
    for field in names:
        value = getattr(configuration, field)
        found = float(given[field]) if isinstance(value, float) else type(value)(given[field])
        assert found == value, field
    assert float(given["norm_epsilon"]) == configuration.layernorm_epsilon
    chunks = int(given.get("num_virtual_stages_per_pipeline_rank", 1))
    assert chunks == (configuration.virtual_pipeline_model_parallel_size or 1)
    data_parallel = model.data_parallel_config(experiment)
    assert ("use_distributed_optimizer" in given) == data_parallel.use_distributed_optimizer
    assert int(given["ddp_bucket_size"]) == data_parallel.bucket_size
    again, reading = read_experiment(tmp_path / "megatron.sh", 2, {})
    assert not reading.unread + reading.remarks
    assert again.layout == experiment.layout
    again = replace(experiment, layout=again.layout, model=again.model)
    theirs, ours = two.run(train, again), two.run(train, replace(experiment, engine="native"))
    for their, our in zip(theirs, ours, strict=True):
        torch.testing.assert_close(torch.tensor(their.loss), torch.tensor(our.loss), rtol=1e-5, atol=0.0)
        counts = [sum(value.numel() for value in one.parameters.values()) for one in (their, our)]
        assert counts[0] == counts[1] or again.layout.tp > 1  # with tp, one count is that of one rank
