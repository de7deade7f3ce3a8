"""DeepSpeed leaves nothing behind in a process that goes on with other experiments, prints nothing, writes nothing."""

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


def by_turns(layouts: list[tuple[Layout, str]]) -> list[list[float]]:
    """Losses of some experiments that take one step each, in turns."""
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


def test_turns_do_not_disturb_each_other(four: RankPool) -> None:
    """What checkpointing and groups remember is swapped with the turn: alone, each has the same losses to the bit."""
    turns = [(PARTITIONED, "deepspeed"), (PLAIN, "native"), (PLAIN, "deepspeed"), (PARTITIONED, "native")]
    alone = [four.run(by_turns, [turn])[0][0] for turn in turns]
    assert four.run(by_turns, turns)[0] == alone


def everything_of_torch() -> dict[str, int]:
    """What DeepSpeed is known to replace, and with it all of these modules."""
    places: list[Any] = [torch, torch.nn.functional, torch.nn.Module, torch.Tensor, torch.autograd, dist]
    return {f"{place}.{name}": id(vars(place)[name]) for place in places for name in vars(place)}


def changed(layouts: list[Layout]) -> list[str]:
    before = everything_of_torch()
    for layout in layouts:
        train(tiny(layout, smallest(layout), "deepspeed", steps=4))
    after = everything_of_torch()
    return [name for name in before if after.get(name) != before[name]]


def test_torch_is_as_it_was(two: RankPool) -> None:
    layouts = [Layout(dp=2, zero=zero, micro_batch=4, recompute=zero == 3) for zero in range(4)]
    two.run(train, tiny(layouts[0], engine="deepspeed", steps=4))  # what torch itself imports on first use
    assert two.run(changed, layouts) == [[], []]


ALONE = """
from repro import engines
engines.import_libraries("deepspeed", "cpu")  # as before a limit of memory is set
from repro.config import Layout
from tests.training import tiny, train
trained = train(tiny(Layout(zero=2, micro_batch=8, precision="bf16"), engine="deepspeed", steps=4))
assert len(trained.loss) == 4 and trained.parameters
"""


def test_one_process_prints_and_writes_nothing(tmp_path: Path) -> None:
    """Without a launcher, one process: no logging, no compiled extension, no cache in the home directory."""
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TORCH_EXTENSIONS_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
