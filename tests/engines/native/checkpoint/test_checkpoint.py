"""Tests that training resumes from checkpoints: exactly under the same layout, and under other layouts."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from repro.config import Experiment, Layout, Model
from repro.engines.native.checkpoint import files, index
from repro.engines.native.checkpoint.state import STATES, Rectangle, matrix_rows
from repro.launch.job import Stopped
from repro.launch.rank.checkpoints import TRAINING_FILE
from repro.launch.rank.device_settings import DETERMINISTIC_ENVIRONMENT
from tests.engines.native.checkpoint.saved import HALF, LAYOUTS, STEPS, checkpoint, experiment, start, train
from tests.engines.runs import pool_of
from tests.launch.runs import fill, small_disk
from tests.parallel.test_architectures import FAMILIES
from tests.pool import RankPool, forks
from tests.training import TINY


def resumed(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the starts of a run from a checkpoint."""
    return list(result["checkpoints"]["resumed"])


def rewrite(experiment: Experiment, root: Path) -> int:
    """Read a checkpoint and write it again; returns its step."""
    run = start(experiment, root)
    assert run.checkpoints is not None
    assert run.checkpoints.write(run.index, {})
    return run.index


def run_on(layout: Layout, request: pytest.FixtureRequest) -> Any:
    """Return a function that calls its argument on the ranks of a layout and returns the result of rank 0."""
    if layout.world == 1:
        return lambda function, *arguments: function(*arguments)
    pool = pool_of(request, layout)
    return lambda function, *arguments: pool.run(function, *arguments)[0]


def read_states(folder: Path) -> dict[str, Tensor]:
    """Return all states of all parameters in a checkpoint."""
    loaded = index.read_index(folder)
    found = {}
    with files.Reader() as reader:
        read = index.reading(folder, loaded, reader)
        for name, shape in loaded.shapes.items():
            rows = max(p.rectangle.row + p.rectangle.rows for p in loaded.pieces[name])
            columns = torch.Size(shape).numel() // rows
            for state in STATES:
                into = torch.full((rows * columns,), torch.nan)
                read(name, state, Rectangle(0, rows, 0, columns), into)
                found[f"{name}/{state}"] = into
    return found


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    """Return the losses of one process without interruption."""
    losses: list[float] = train(experiment(LAYOUTS["dp1"], every=0), Path())["loss"]
    return losses


CYCLE = (
    *("dp1", "dp2-z0", "dp2-z3", "tp2", "pp2", "tp2-dp2-z3", "pp2-dp2-z2", "tp2-pp2", "cp2", "cp2-dp2-z3"),
    *("dp2-z1", "dp2-z2", "tp2-dp2-z1", "dp1"),
)
"""Each layout reads a checkpoint of the preceding layout."""


@pytest.mark.parametrize(("first", "then"), list(itertools.pairwise(CYCLE)))
def test_each_layout_reads_a_checkpoint_of_another_layout(
    first: str, then: str, tmp_path: Path, request: pytest.FixtureRequest, uninterrupted: list[float]
) -> None:
    """States are equal bit for bit, and the next losses are those of one process without interruption."""
    assert set(CYCLE) == set(LAYOUTS)
    resume_elsewhere(experiment(LAYOUTS[first]), experiment(LAYOUTS[then]), tmp_path, request, uninterrupted)


INTERLEAVED = Layout(pp=2, chunks=2, schedule="interleaved", micro_batch=1, global_batch=4, precision="fp16")
FP16 = replace(LAYOUTS["dp1"], precision="fp16")
TP4 = Layout(tp=4, micro_batch=2, global_batch=4)
LLAMA = replace(FAMILIES["llama"], biases="qkv")


@pytest.mark.parametrize(
    ("model", "first", "then"),
    [
        # Four ranks replicate the key heads, and the other layouts split the key heads.
        (LLAMA, TP4, LAYOUTS["dp2-z3"]),
        (LLAMA, LAYOUTS["dp1"], TP4),
        (LLAMA, TP4, LAYOUTS["tp2-pp2"]),
        # Two chunks per stage use the layer names of the model; both stages have the tied embedding.
        pytest.param(TINY, INTERLEAVED, FP16, id="interleaved"),
    ],
)
def test_replicated_key_heads_and_interleaved_stages_are_split_and_merged(
    model: Model, first: Layout, then: Layout, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    alone = experiment(replace(LAYOUTS["dp1"], precision=first.precision), every=0, model=model)
    saved, other = (experiment(layout, model=model) for layout in (first, then))
    rel = 1e-6 if first.precision == "fp32" else 2.0**-11
    resume_elsewhere(saved, other, tmp_path, request, train(alone, Path())["loss"], rel)


def resume_elsewhere(
    saved: Experiment, other: Experiment, tmp_path: Path, request: Any, losses: list[float], rel: float = 1e-6
) -> None:
    """Train, rewrite the checkpoint under another layout and resume; compare with the losses of one process."""
    run_on(saved.layout, request)(train, saved, tmp_path, HALF)
    written = read_states(checkpoint(tmp_path, saved))
    assert run_on(other.layout, request)(rewrite, other, tmp_path) == HALF
    rewritten = read_states(checkpoint(tmp_path, other))
    assert written.keys() == rewritten.keys()
    for name, values in written.items():
        assert torch.equal(values, rewritten[name]), name
    index.remove(checkpoint(tmp_path, other))
    result = run_on(other.layout, request)(train, other, tmp_path)
    assert [(start["step"], start["key"]) for start in resumed(result)] == [(HALF, saved.key)]
    assert result["loss"] == pytest.approx(losses, rel=rel)
    assert sum(map(len, result["rounds"])) == STEPS - HALF - 1, "times of the last start only"


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(("dp1", "fp16"), ("dp2-z2", "fp16"), ("dp2-z3", "fp16"), ("tp2", "bf16"), ("pp2", "fp32")),
        ("tp2-dp2-z3", "bf16"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("dp2-z0", "fp32"), ("dp2-z1", "bf16"))),
    ],
)
def test_same_layout_resumes_bit_for_bit(
    name: str, precision: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The fp16 run halves its loss scale before the stop. The later increase counts steps on both sides of the stop."""
    assert_resumes(replace(LAYOUTS[name], precision=precision), tmp_path, run_on(LAYOUTS[name], request))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gpu_with_deterministic_algorithms_resumes_bit_for_bit(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every operator of the step has a deterministic algorithm."""
    for name, value in DETERMINISTIC_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    layout = replace(LAYOUTS["dp1"], precision=precision)
    on_gpu = lambda function, *arguments: function(*arguments, device="cuda")
    assert_resumes(layout, tmp_path, on_gpu, deterministic=True)


def assert_resumes(layout: Layout, root: Path, run: Any, **training: Any) -> None:
    """Compare a run without interruption with a run that resumes from its first checkpoint."""
    if layout.precision == "fp16":
        training |= {"loss_scale": 2.0**19, "loss_scale_window": 2, "loss_scale_hysteresis": 1}
    full, parts = (experiment(layout, **training) for _ in range(2))
    reference = run(train, full, root / "full")
    run(train, parts, root / "parts", HALF)
    result = run(train, parts, root / "parts")
    for series in ("loss", "grad_norm", "loss_scale", "skipped_steps"):
        assert result[series] == reference[series], series
    if layout.precision == "fp16":
        scale = reference["loss_scale"]
        assert min(reference["skipped_steps"]) < HALF - 1, "a good step must precede the stop"
        assert scale[HALF - 1] == scale[HALF] < scale[HALF + 1]
    expected = read_states(checkpoint(root / "full", full, STEPS))
    for key, values in read_states(checkpoint(root / "parts", parts, STEPS)).items():
        assert torch.equal(values, expected[key]), key


def test_ranks_write_each_element_once_and_share_the_work(tmp_path: Path, two: RankPool) -> None:
    """Replicated states are written once; no rank writes 62 % of the bytes."""
    for name in ("dp2-z0", "dp2-z3", "tp2", "pp2"):
        written = experiment(LAYOUTS[name])
        two.run(train, written, tmp_path / name, HALF)
        loaded = index.read_index(checkpoint(tmp_path / name, written))
        total = 0
        for parameter, pieces in loaded.pieces.items():
            covered = sum(piece.rectangle.size for piece in pieces)
            assert covered == torch.Size(loaded.shapes[parameter]).numel()
            total += covered
        sizes = list(loaded.sizes.values())
        assert sum(sizes) >= 12 * total
        assert max(sizes) < 0.62 * sum(sizes), name
        assert matrix_rows(loaded.shapes["blocks.0.attention.qkv"], 1) == 3


def test_run_retains_two_checkpoints_and_finally_one(tmp_path: Path) -> None:
    frequent = experiment(LAYOUTS["dp1"], every=1)
    root = tmp_path / frequent.key
    train(frequent, tmp_path, 4)
    assert index.complete(root) == [3, 4]
    result = train(frequent, tmp_path)
    assert index.complete(root) == [STEPS]
    assert result["checkpoints"]["written"] == [5, STEPS]
    assert resumed(train(frequent, tmp_path)) == [], "a run of a finished experiment starts at step 0"


def test_longer_run_of_same_name_resumes_at_the_end_and_another_name_on_request(
    tmp_path: Path, uninterrupted: list[float]
) -> None:
    train(experiment(LAYOUTS["dp1"], steps=4), tmp_path / "shorter", 4)
    result = train(experiment(LAYOUTS["dp1"]), tmp_path / "shorter")
    assert [start["step"] for start in resumed(result)] == [4]
    assert result["loss"] == uninterrupted
    train(experiment(LAYOUTS["dp1"]), tmp_path, HALF)
    other = replace(experiment(LAYOUTS["dp1"], every=3), name="other")
    assert start(other, tmp_path).resumed == []
    continuing = replace(other, training=replace(other.training, continues="tiny"))
    assert [found["step"] for found in start(continuing, tmp_path).resumed] == [HALF]
    unknown = replace(other, training=replace(other.training, continues="nobody"))
    with pytest.raises(ValueError, match=r"continues = 'nobody': must be an experiment .* run it first"):
        start(unknown, tmp_path)


# -- interruptions -----------------------------------------------------------------------------------


def run_until_stopped(experiment: Experiment, root: Path) -> str:
    """Run until the stop request of the launcher after step 3, and return the message."""
    run = start(experiment, root)
    run.prelude()
    run.steps(1)
    if run.mesh.rank == 0:
        (root / "stop").touch()
    with pytest.raises(Stopped) as caught:
        run.steps(run.left)
    return str(caught.value)


def test_all_ranks_stop_and_resume_at_the_same_step(tmp_path: Path, two: RankPool) -> None:
    wanted = experiment(LAYOUTS["dp2-z2"], every=STEPS)
    message = two.run(run_until_stopped, wanted, tmp_path)
    assert message == ["stopped on request after step 3; the next run resumes from this step"] * 2
    (tmp_path / "stop").unlink()
    result = two.run(train, wanted, tmp_path)[0]
    assert [start["step"] for start in resumed(result)] == [3]
    assert len(result["loss"]) == STEPS


def train_and_die(experiment: Experiment, root: Path, moment: str) -> None:
    """Train until the process is killed while it writes its second checkpoint."""

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    run = start(experiment, root)
    run.prelude()
    run.steps(HALF - 1)
    assert run.checkpoints is not None
    if moment == "in the data":
        run.checkpoints.progress = die
    elif moment == "before the index":
        index.gather = die  # type: ignore[assignment]
    elif moment == "before the index has its name":
        rename = os.replace
        os.replace = lambda old, new: die() if Path(new).name == index.FILE else rename(old, new)
    run.steps(run.left)


@pytest.mark.parametrize("moment", ["in the data", "before the index", "before the index has its name"])
def test_kill_during_a_write_leaves_the_preceding_checkpoint(
    moment: str, tmp_path: Path, uninterrupted: list[float]
) -> None:
    killed = experiment(LAYOUTS["dp1"], every=HALF - 1, steps=STEPS)
    process = forks().Process(target=train_and_die, args=(killed, tmp_path, moment))
    process.start()
    process.join(250)
    assert process.exitcode == -signal.SIGKILL
    root = tmp_path / killed.key
    assert index.complete(root) == [HALF - 1]
    assert (root / f"step-{2 * (HALF - 1)}").is_dir(), "the kill must leave a partial folder"
    result = train(killed, tmp_path)
    assert [start["step"] for start in resumed(result)] == [HALF - 1]
    assert result["loss"] == uninterrupted
    assert [path.name for path in root.glob("step-*")] == [f"step-{STEPS}"]


def test_full_disk_retains_old_checkpoint_without_ending_the_run(
    tmp_path: Path, uninterrupted: list[float]
) -> None:
    full = experiment(LAYOUTS["dp1"])
    with small_disk(tmp_path) as disk:
        run = start(full, disk)
        run.prelude()
        run.steps(HALF - 1)
        fill(disk)
        run.steps(run.left)
        result = run.result().as_dict()
        assert result["checkpoints"]["written"] == [HALF]
        (failure,) = result["checkpoints"]["failures"]
        assert failure["step"] == STEPS
        assert failure["reason"] == f"rank 0: No space left on device: {disk / full.key / TRAINING_FILE}"
        assert result["loss"] == uninterrupted
        (disk / "filler").unlink()
        assert index.complete(disk / full.key) == [HALF]
        assert start(full, disk).index == HALF


def train_with_full_disk(experiment: Experiment, root: Path) -> dict[str, Any]:
    """Train on two ranks, of which rank 1 has no disk space for its file of the second checkpoint."""
    run = start(experiment, root)
    run.prelude()
    run.steps(HALF - 1)
    if dist.get_rank():
        index.rank_file(index.folder_of(root / experiment.key, STEPS), 1).parent.mkdir()
        os.symlink("/dev/full", index.rank_file(index.folder_of(root / experiment.key, STEPS), 1))
    dist.barrier()
    assert run.checkpoints is not None
    run.checkpoints._make = lambda folder: None  # type: ignore[method-assign]
    run.steps(run.left)
    return run.result().as_dict()


def test_checkpoint_that_one_rank_cannot_write_is_removed(tmp_path: Path, two: RankPool) -> None:
    incomplete = experiment(LAYOUTS["dp2-z1"])
    results = two.run(train_with_full_disk, incomplete, tmp_path)
    assert [result["checkpoints"]["written"] for result in results] == [[HALF]] * 2
    assert [len(result["checkpoints"]["failures"]) for result in results] == [0, 1]
    assert index.complete(tmp_path / incomplete.key) == [HALF]
    assert not checkpoint(tmp_path, incomplete, STEPS).exists()
