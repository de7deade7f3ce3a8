"""A training that was stopped goes on under the same layout as if nothing had been, and under any other."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from repro.config import Experiment, Layout
from repro.engines.native.checkpoint import files, index
from repro.engines.native.checkpoint.state import STATES, Rectangle, matrix_rows
from repro.launch.job import Stopped
from repro.launch.rank.checkpoints import TRAINING_FILE
from repro.launch.rank.device_settings import DETERMINISTIC_ENVIRONMENT
from tests.engines.native.checkpoint.saved import HALF, LAYOUTS, WHOLE, checkpoint, experiment, start, train
from tests.launch.runs import fill, small_disk
from tests.parallel.test_architectures import FAMILIES
from tests.pool import RankPool, forks
from tests.training import TINY


def pass_on(experiment: Experiment, root: Path) -> int:
    """Read a checkpoint and write it again; returns its step."""
    run = start(experiment, root)
    assert run.checkpoints is not None
    assert run.checkpoints.write(run.index, {})
    return run.index


def on(layout: Layout, request: pytest.FixtureRequest) -> Any:
    """Calls a function on as many ranks as the layout has, and returns what rank 0 makes of it."""
    if layout.world == 1:
        return lambda function, *arguments: function(*arguments)
    pool: RankPool = request.getfixturevalue({2: "two", 4: "four"}[layout.world])
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
    """The losses of one process that nobody stops."""
    losses: list[float] = train(experiment(LAYOUTS["dp1"], every=0), Path())["loss"]
    return losses


@pytest.mark.parametrize(
    ("first", "then"),
    [
        *(("dp1", name) for name in LAYOUTS if name != "dp1"),
        ("dp2-z0", "dp1"),
        ("dp2-z3", "tp2"),
        ("tp2", "pp2"),
        ("tp2-dp2-z3", "pp2-dp2-z2"),
        ("tp2-pp2", "dp1"),
        ("cp2", "tp2"),
        ("cp2-dp2-z3", "dp2-z1"),
    ],
)
def test_any_layout_reads_what_any_layout_wrote(
    first: str,
    then: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    uninterrupted: list[float],
) -> None:
    """Bit for bit, and the losses go on as if one process had taken all steps."""
    hand_over(experiment(LAYOUTS[first]), experiment(LAYOUTS[then]), tmp_path, request, uninterrupted)


@pytest.mark.parametrize(("first", "then"), [("tp4", "dp2-z3"), ("dp1", "tp4"), ("tp4", "tp2-pp2")])
def test_keys_on_more_ranks_than_they_have_heads(
    first: str, then: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Whole on all ranks of one layout, split by the other."""
    model = replace(FAMILIES["llama"], biases="qkv")
    layouts = {**LAYOUTS, "tp4": Layout(tp=4, micro_batch=2, global_batch=4)}
    losses = train(experiment(LAYOUTS["dp1"], every=0, model=model), Path())["loss"]
    wrote, reads = (experiment(layouts[name], model=model) for name in (first, then))
    hand_over(wrote, reads, tmp_path, request, losses)


def hand_over(
    wrote: Experiment, reads: Experiment, tmp_path: Path, request: pytest.FixtureRequest, losses: list[float]
) -> None:
    """Train, read and write again, and train on: `losses` are those of one process that nobody stops."""
    on(wrote.layout, request)(train, wrote, tmp_path, HALF)
    written = read_states(checkpoint(tmp_path, wrote))
    assert on(reads.layout, request)(pass_on, reads, tmp_path) == HALF
    again = read_states(checkpoint(tmp_path, reads))
    assert written.keys() == again.keys()
    for name, values in written.items():
        assert torch.equal(values, again[name]), name
    index.remove(checkpoint(tmp_path, reads))
    result = on(reads.layout, request)(train, reads, tmp_path)
    assert [start["step"] for start in result["checkpoints"]["resumed"]] == [HALF]
    assert result["checkpoints"]["resumed"][0]["key"] == wrote.key
    assert result["loss"] == pytest.approx(losses, rel=1e-6)
    assert sum(map(len, result["rounds"])) == WHOLE - HALF - 1, "times of the last start only"


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(("dp1", "fp16"), ("dp2-z2", "fp16"), ("dp2-z3", "fp16"), ("tp2", "bf16"), ("pp2", "fp32")),
        ("tp2-dp2-z3", "bf16"),
        *(
            pytest.param(f"dp2-z{zero}", precision, marks=pytest.mark.slow)
            for zero, precision in ((0, "fp32"), (1, "bf16"), (3, "fp32"))
        ),
    ],
)
def test_the_same_layout_goes_on_to_the_bit(
    name: str, precision: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Weights, moments, losses, norms, and in fp16 the scaler: halved, and grown by steps on both sides of the stop."""
    goes_on_to_the_bit(replace(LAYOUTS[name], precision=precision), tmp_path, on(LAYOUTS[name], request))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_on_a_gpu_that_needs_deterministic_algorithms(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which every operator of the step has."""
    for name, value in DETERMINISTIC_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    layout = replace(LAYOUTS["dp1"], precision=precision)
    there = lambda function, *arguments: function(*arguments, device="cuda")
    goes_on_to_the_bit(layout, tmp_path, there, deterministic=True)


def goes_on_to_the_bit(layout: Layout, root: Path, run: Any, **training: Any) -> None:
    """Train through, and with a stop: everything is equal."""
    if layout.precision == "fp16":
        training |= {"loss_scale": 2.0**19, "loss_scale_window": 2, "loss_scale_hysteresis": 1}
    through, halves = (experiment(layout, **training) for _ in range(2))
    reference = run(train, through, root / "through")
    run(train, halves, root / "halves", HALF)
    result = run(train, halves, root / "halves")
    for series in ("loss", "grad_norm", "loss_scale", "skipped_steps"):
        assert result[series] == reference[series], series
    if layout.precision == "fp16":
        scale = reference["loss_scale"]
        assert min(reference["skipped_steps"]) < HALF - 1, "then a good step, which counts for the growth"
        assert scale[HALF - 1] == scale[HALF] < scale[HALF + 1]
    expected = read_states(checkpoint(root / "through", through, WHOLE))
    for key, values in read_states(checkpoint(root / "halves", halves, WHOLE)).items():
        assert torch.equal(values, expected[key]), key


def test_interleaved_stages_name_their_layers_as_the_model_does(tmp_path: Path, two: RankPool) -> None:
    """Two chunks a stage, the tied embedding on both, fp16 with master weights."""
    layout = Layout(pp=2, chunks=2, schedule="interleaved", micro_batch=1, global_batch=4, precision="fp16")
    wrote = experiment(layout, model=TINY)
    reads = experiment(replace(LAYOUTS["dp1"], precision="fp16"), model=TINY)
    two.run(train, wrote, tmp_path, HALF)
    assert pass_on(reads, tmp_path) == HALF
    written, again = read_states(checkpoint(tmp_path, wrote)), read_states(checkpoint(tmp_path, reads))
    assert written.keys() == again.keys()
    assert all(torch.equal(values, again[name]) for name, values in written.items())


def test_each_rank_writes_only_what_it_owns(tmp_path: Path, two: RankPool) -> None:
    """Nothing twice, not even what all replicas have, and replicas share the work."""
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


def test_a_run_keeps_the_newest_two_and_in_the_end_one(tmp_path: Path) -> None:
    kept = experiment(LAYOUTS["dp1"], every=1)
    root = tmp_path / kept.key
    train(kept, tmp_path, 4)
    assert index.complete(root) == [3, 4]
    result = train(kept, tmp_path)
    assert index.complete(root) == [WHOLE]
    assert result["checkpoints"]["written"] == [5, WHOLE]
    assert train(kept, tmp_path)["checkpoints"]["resumed"] == [], (
        "what is done and is wanted again begins again"
    )


def test_a_longer_run_of_the_same_name_goes_on_from_the_end(
    tmp_path: Path, uninterrupted: list[float]
) -> None:
    train(experiment(LAYOUTS["dp1"], steps=4), tmp_path, 4)
    result = train(experiment(LAYOUTS["dp1"]), tmp_path)
    assert [start["step"] for start in result["checkpoints"]["resumed"]] == [4]
    assert result["loss"] == uninterrupted


def test_another_name_is_continued_only_where_it_is_asked_for(tmp_path: Path) -> None:
    train(experiment(LAYOUTS["dp1"]), tmp_path, HALF)
    other = replace(experiment(LAYOUTS["dp1"], every=3), name="other")
    assert start(other, tmp_path).resumed == []
    asked = replace(other, training=replace(other.training, continues="tiny"))
    assert [found["step"] for found in start(asked, tmp_path).resumed] == [HALF]
    lost = replace(other, training=replace(other.training, continues="nobody"))
    with pytest.raises(ValueError, match=r"continues = 'nobody': must be an experiment .* run it first"):
        start(lost, tmp_path)


# -- being stopped -----------------------------------------------------------------------------------


def stopped(experiment: Experiment, root: Path) -> str:
    """A run that finds the launcher's request after its third step."""
    run = start(experiment, root)
    run.prelude()
    run.steps(1)
    if run.mesh.rank == 0:
        (root / "stop").touch()
    with pytest.raises(Stopped) as caught:
        run.steps(run.left)
    return str(caught.value)


def test_all_ranks_stop_after_the_same_step_and_go_on_from_there(tmp_path: Path, two: RankPool) -> None:
    wanted = experiment(LAYOUTS["dp2-z2"], every=WHOLE)
    message = two.run(stopped, wanted, tmp_path)
    assert message == ["stopped on request after step 3; the next run resumes there"] * 2
    (tmp_path / "stop").unlink()
    result = two.run(train, wanted, tmp_path)[0]
    assert [start["step"] for start in result["checkpoints"]["resumed"]] == [3]
    assert len(result["loss"]) == WHOLE


def dies(experiment: Experiment, root: Path, moment: str) -> None:
    """A run that is killed while it writes its second checkpoint."""

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
def test_a_kill_in_mid_write_leaves_the_checkpoint_before(
    moment: str, tmp_path: Path, uninterrupted: list[float]
) -> None:
    killed = experiment(LAYOUTS["dp1"], every=HALF - 1, steps=WHOLE)
    process = forks().Process(target=dies, args=(killed, tmp_path, moment))
    process.start()
    process.join(250)
    assert process.exitcode == -signal.SIGKILL
    root = tmp_path / killed.key
    assert index.complete(root) == [HALF - 1]
    assert (root / f"step-{2 * (HALF - 1)}").is_dir(), "it was killed in the middle"
    result = train(killed, tmp_path)
    assert [start["step"] for start in result["checkpoints"]["resumed"]] == [HALF - 1]
    assert result["loss"] == uninterrupted
    assert [path.name for path in root.glob("step-*")] == [f"step-{WHOLE}"]


def test_a_full_disk_keeps_the_old_checkpoint_and_does_not_end_the_run(
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
        assert failure["step"] == WHOLE
        assert failure["reason"] == f"rank 0: No space left on device: {disk / full.key / TRAINING_FILE}"
        assert result["loss"] == uninterrupted
        (disk / "filler").unlink()
        assert index.complete(disk / full.key) == [HALF]
        assert start(full, disk).index == HALF


def runs_out(experiment: Experiment, root: Path) -> dict[str, Any]:
    """A run on two ranks, of which the second has no room for its part of the second checkpoint."""
    run = start(experiment, root)
    run.prelude()
    run.steps(HALF - 1)
    if dist.get_rank():
        index.rank_file(index.folder_of(root / experiment.key, WHOLE), 1).parent.mkdir()
        os.symlink("/dev/full", index.rank_file(index.folder_of(root / experiment.key, WHOLE), 1))
    dist.barrier()
    assert run.checkpoints is not None
    run.checkpoints._make = lambda folder: None  # type: ignore[method-assign]
    run.steps(run.left)
    return run.result().as_dict()


def test_a_checkpoint_that_one_rank_cannot_write_is_none(tmp_path: Path, two: RankPool) -> None:
    lacking = experiment(LAYOUTS["dp2-z1"])
    results = two.run(runs_out, lacking, tmp_path)
    assert [result["checkpoints"]["written"] for result in results] == [[HALF]] * 2
    assert [len(result["checkpoints"]["failures"]) for result in results] == [0, 1]
    assert index.complete(tmp_path / lacking.key) == [HALF]
    assert not checkpoint(tmp_path, lacking, WHOLE).exists()
