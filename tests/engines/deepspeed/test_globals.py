"""Tests that DeepSpeed leaves no global state in the process, prints nothing and writes no file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from repro.config import Layout
from repro.engines import build_engine
from repro.parallel import mesh as meshes
from tests.engines.needs import needs
from tests.pool import RankPool
from tests.training import micro_batches, smallest, tiny, train

pytestmark = needs("deepspeed")

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
