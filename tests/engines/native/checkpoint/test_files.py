"""Tests of checkpoint files: their content, the bytes that a reader takes, and errors of damaged files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.config import ConfigError
from repro.engines.native.checkpoint import files, index
from repro.engines.native.checkpoint.state import Rectangle, rectangles
from tests.engines.native.checkpoint.saved import HALF, LAYOUTS, checkpoint, experiment, start, train
from tests.launch.runs import synced


@st.composite
def partitions(draw: st.DrawFn, rows: int, width: int, tp: int) -> list[Rectangle]:
    """Draw the partition of a matrix by tp into blocks of columns, which ZeRO cuts at any element."""
    found = []
    for rank in range(tp):
        numel = rows * width // tp
        at = sorted(draw(st.lists(st.integers(0, numel), max_size=4)))
        for first, last in zip([0, *at], [*at, numel], strict=True):
            found += [cut for cut, _ in rectangles(first, last, rank * width // tp, width // tp)]
    return found


@st.composite
def partition_pairs(draw: st.DrawFn) -> tuple[int, int, list[Rectangle], list[Rectangle]]:
    rows, width = draw(st.integers(1, 7)), 12 * draw(st.integers(1, 3))
    written, read = (draw(partitions(rows, width, draw(st.sampled_from([1, 2, 3, 4])))) for _ in range(2))
    return rows, width, written, read


@settings(max_examples=60)
@given(partition_pairs(), st.sampled_from([1, 5, 1000]), st.sampled_from([0, 3, 1000]))
def test_each_partition_is_readable_from_any_other(
    tmp_path: Path, case: tuple[int, int, list[Rectangle], list[Rectangle]], slice_: int, gap: int
) -> None:
    """Each element is in one rectangle. The size of a read has no effect; gap 0 takes exactly the needed bytes."""
    rows, width, written, read = case
    matrix = torch.randn(rows, width)

    def elements(cut: Rectangle, full: torch.Tensor = matrix) -> torch.Tensor:
        return full[cut.row : cut.row + cut.rows, cut.column : cut.column + cut.columns]

    for partition in (written, read):
        count = torch.zeros(rows, width)
        for cut in partition:
            assert cut.size > 0
            elements(cut, count).add_(1)
        assert bool((count == 1).all())

    with pytest.MonkeyPatch.context() as patch, files.Reader() as reader:
        patch.setattr(files, "SLICE", slice_)
        patch.setattr(files, "GAP", gap)
        path = tmp_path / "rank-0.safetensors"
        entries = [(files.TensorEntry("a.b", "weight", cut), elements(cut).flatten()) for cut in written]
        files.write_rank_file(path, entries, {"a.b": (rows, width)}, lambda: None)
        found, shapes = files.read_contents(path)
        assert shapes == {"a.b": (rows, width)}
        assert [entry for entry, _ in found] == [entry for entry, _ in entries]
        for wanted in read:
            into = torch.full((wanted.size,), torch.nan)
            for entry, at in found:
                part = wanted.overlap(entry.rectangle)
                if part is not None:
                    assert part.size > 0
                    reader.read(path, at, entry.rectangle, part, wanted.view(into, part))
            assert torch.equal(into, elements(wanted).flatten())
        if gap == 0:
            assert reader.bytes_read == 4 * matrix.numel()
        assert reader._buffer.numel() <= slice_, "a read must not exceed a slice"


@pytest.mark.parametrize(
    ("slice_", "gap", "columns", "elements"),
    [(1000, 3, 6, 4 * 6), (1000, 4, 6, 3 * 10 + 6), (5, 6, 4, 4 * 4)],
    ids=["a large gap", "a small gap", "rows longer than a slice"],
)
def test_reader_reads_over_small_gaps_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_: int, gap: int, columns: int, elements: int
) -> None:
    """The reader takes some of ten columns of four rows, row by row or in one range with the gaps."""
    monkeypatch.setattr(files, "SLICE", slice_)
    monkeypatch.setattr(files, "GAP", gap)
    full, path = Rectangle(0, 4, 0, 10), tmp_path / "rank-0.safetensors"
    files.write_rank_file(
        path, [(files.TensorEntry("a", "weight", full), torch.zeros(40))], {"a": (4, 10)}, lambda: None
    )
    ((_, at),) = files.read_contents(path)[0]
    with files.Reader() as reader:
        reader.read(path, at, full, Rectangle(0, 4, 2, columns), torch.empty(4, columns))
        assert reader.bytes_read == 4 * elements


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the contents of the files of one checkpoint."""
    root = tmp_path_factory.mktemp("written")
    train(experiment(LAYOUTS["dp1"]), root, HALF)
    folder = root / experiment(LAYOUTS["dp1"]).key
    return {str(path.relative_to(root)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path, written: dict[str, bytes]) -> Path:
    """Return the folder of a checkpoint that a test can damage."""
    for name, content in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return checkpoint(tmp_path, experiment(LAYOUTS["dp1"]))


def test_files_are_safetensors(folder: Path) -> None:
    """The format has a length, a JSON header that ends at a multiple of 8 bytes, and tensors without gaps."""
    raw = index.rank_file(folder, 0).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert all(isinstance(value, str) for value in header.pop("__metadata__").values())
    ends = 0
    for entry in header.values():
        first, last = entry["data_offsets"]
        assert (first, last - first) == (ends, 4 * math.prod(entry["shape"]))
        ends = last
    assert len(raw) == 8 + length + ends
    assert "embed.tokens/weight/0:1,0:3072" in header


def test_write_syncs_the_checkpoint_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full files are synced before their names, so that a visible index has all its files."""
    written = experiment(LAYOUTS["dp1"])
    run = start(written, tmp_path)
    synced_sizes = synced(monkeypatch)
    assert run.checkpoints is not None
    assert run.checkpoints.write(HALF, {})
    folder = checkpoint(tmp_path, written)
    ranks = index.rank_file(folder, 0)
    assert synced_sizes[str(ranks)] == ranks.stat().st_size
    partial = [size for path, size in synced_sizes.items() if Path(path).name.startswith(f".{index.FILE}.")]
    assert partial == [(folder / index.FILE).stat().st_size]
    assert {str(folder), str(folder.parent)} <= set(synced_sizes)


def start_dp1(folder: Path) -> int:
    """Return the first step of a run that resumes from the folder of checkpoints."""
    return start(experiment(LAYOUTS["dp1"]), folder.parents[1]).index


def change(folder: Path, **values: Any) -> None:
    path = folder / index.FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_training(folder: Path, **values: int) -> None:
    training = json.loads((folder / index.FILE).read_text())["training"]
    for key, value in values.items():
        (training["model"] if key in training["model"] else training)[key] = value
    change(folder, training=training)


def remove_a_piece(folder: Path) -> None:
    parameters = json.loads((folder / index.FILE).read_text())["parameters"]
    del parameters["blocks.1.mlp.up"]["pieces"][0]
    change(folder, parameters=parameters)


def truncate(folder: Path) -> None:
    path = index.rank_file(folder, 0)
    path.write_bytes(path.read_bytes()[:-4])


HINT = "remove the folder to resume from the preceding checkpoint"
NO_INDEX = f"index.json: not an index: must be a checkpoint index that `repro run` has written; {HINT}"
RESUMES = "the value of the experiment that resumes from this checkpoint"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (truncate, f"rank-0.safetensors: size = SIZE - 4: must be SIZE bytes; {HINT}"),
    (
        lambda folder: index.rank_file(folder, 0).unlink(),
        f"rank-0.safetensors: is missing: the checkpoint is incomplete without this file of SIZE bytes; {HINT}",
    ),
    (
        partial(change, format=9),
        "index.json: format = 9: must be 1, the checkpoint format that this release reads",
    ),
    (partial(change, history=None, scalars=None, files=3, parameters=[]), NO_INDEX),
    (lambda folder: (folder / index.FILE).write_text("{"), NO_INDEX),
    (partial(change_training, hidden=64), f"index.json: model.hidden = 64: must be 32, {RESUMES}"),
    (partial(change_training, global_batch=8), f"index.json: global_batch = 8: must be 4, {RESUMES}"),
    (
        remove_a_piece,
        "index.json: blocks.1.mlp.up: the checkpoint has 0 of the 4096 elements in rectangle (0, 1, 0, 4096)",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_error_of_a_damaged_or_different_checkpoint_is_one_line(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    size = index.rank_file(folder, 0).stat().st_size
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        start_dp1(folder)
    line = str(caught.value).removeprefix(f"{folder}/")
    assert line == message.replace("SIZE - 4", str(size - 4)).replace("SIZE", str(size))


def test_file_that_shrinks_during_reading_is_named(folder: Path) -> None:
    loaded = index.read_index(folder)
    truncate(folder)
    name, (last,) = max(loaded.pieces.items(), key=lambda row: row[1][-1].offsets[-1])
    with files.Reader() as reader:
        read = index.reading(folder, loaded, reader)
        with pytest.raises(ConfigError, match=r"rank-0.safetensors: ends before byte \d+"):
            read(name, "moment2", last.rectangle, torch.empty(last.rectangle.size))
