"""What a checkpoint's files say, which bytes a reader takes from them, and what is said of damaged ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.config import ConfigError
from repro.engines.native.checkpoint import files, index
from repro.engines.native.checkpoint.state import Rectangle, matrix_rows, rectangles
from tests.engines.native.checkpoint.saved import HALF, LAYOUTS, checkpoint, experiment, start, train
from tests.launch.runs import synced

QUICK = settings(max_examples=60)


@st.composite
def cuts(draw: st.DrawFn, rows: int, width: int, tp: int) -> list[Rectangle]:
    """A matrix cut by tp into blocks of columns, and each of these by ZeRO, anywhere."""
    found = []
    for rank in range(tp):
        numel = rows * width // tp
        at = sorted(draw(st.lists(st.integers(0, numel), max_size=4)))
        for first, last in zip([0, *at], [*at, numel], strict=True):
            found += [cut for cut, _ in rectangles(first, last, rank * width // tp, width // tp)]
    return found


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, list[Rectangle], list[Rectangle]]:
    rows, width = draw(st.integers(1, 7)), 12 * draw(st.integers(1, 3))
    written, read = (draw(cuts(rows, width, draw(st.sampled_from([1, 2, 3, 4])))) for _ in range(2))
    return rows, width, written, read


@QUICK
@given(layouts())
def test_every_element_is_written_once_and_read_once(
    case: tuple[int, int, list[Rectangle], list[Rectangle]],
) -> None:
    rows, width, written, read = case
    for side in (written, read):
        count = torch.zeros(rows, width)
        for cut in side:
            assert cut.size > 0
            count[cut.row : cut.row + cut.rows, cut.column : cut.column + cut.columns] += 1
        assert bool((count == 1).all())
    for wanted in read:
        overlaps = [part for piece in written if (part := wanted.overlap(piece))]
        assert sum(part.size for part in overlaps) == wanted.size
        assert all(part.size > 0 for part in overlaps), "nothing is no overlap"


@QUICK
@given(layouts(), st.sampled_from([1, 5, 1000]), st.sampled_from([0, 3, 1000]))
def test_any_cut_can_be_read_from_any_other(
    tmp_path: Path,
    case: tuple[int, int, list[Rectangle], list[Rectangle]],
    slice_: int,
    gap: int,
) -> None:
    """Through a file, whatever is read at once; without reading over gaps, exactly the bytes that are wanted."""
    rows, width, written, read = case
    matrix = torch.randn(rows, width)

    def of(cut: Rectangle) -> torch.Tensor:
        return matrix[cut.row : cut.row + cut.rows, cut.column : cut.column + cut.columns].flatten()

    with pytest.MonkeyPatch.context() as patch, files.Reader() as reader:
        patch.setattr(files, "SLICE", slice_)
        patch.setattr(files, "GAP", gap)
        path = tmp_path / "rank-0.safetensors"
        entries = [(files.TensorEntry("a.b", "weight", cut), of(cut)) for cut in written]
        files.write_rank_file(path, entries, {"a.b": (rows, width)}, lambda: None)
        found, shapes = files.read_contents(path)
        assert shapes == {"a.b": (rows, width)}
        assert [entry for entry, _ in found] == [entry for entry, _ in entries]
        for wanted in read:
            into = torch.full((wanted.size,), torch.nan)
            for entry, at in found:
                part = wanted.overlap(entry.rectangle)
                if part is not None:
                    reader.read(path, at, entry.rectangle, part, wanted.view(into, part))
            assert torch.equal(into, of(wanted))
        if gap == 0:
            assert reader.bytes_read == 4 * matrix.numel()
        assert reader._buffer.numel() <= slice_, "more than a slice at once"


@pytest.mark.parametrize(
    ("slice_", "gap", "columns", "elements"),
    [(1000, 3, 6, 4 * 6), (1000, 4, 6, 3 * 10 + 6), (5, 6, 4, 4 * 4)],
    ids=["a large gap", "a small gap", "rows longer than a slice"],
)
def test_small_gaps_are_read_over_and_larger_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_: int, gap: int, columns: int, elements: int
) -> None:
    """Some of ten columns of four rows: row by row, or from the first to the last of them with what lies between."""
    monkeypatch.setattr(files, "SLICE", slice_)
    monkeypatch.setattr(files, "GAP", gap)
    complete, path = Rectangle(0, 4, 0, 10), tmp_path / "rank-0.safetensors"
    files.write_rank_file(
        path, [(files.TensorEntry("a", "weight", complete), torch.zeros(40))], {"a": (4, 10)}, lambda: None
    )
    ((_, at),) = files.read_contents(path)[0]
    with files.Reader() as reader:
        reader.read(path, at, complete, Rectangle(0, 4, 2, columns), torch.empty(4, columns))
        assert reader.bytes_read == 4 * elements


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_parameter_as_a_matrix_has_the_parts_of_tp_as_columns(
    shape: list[int], data: st.DataObject
) -> None:
    """However tensor parallelism cuts a parameter, a rank's part is what its columns are, in the same order."""
    tp = data.draw(st.integers(1, 4))
    split = data.draw(st.integers(0, len(shape) - 1))
    shape[split] *= tp
    complete = torch.arange(math.prod(shape)).view(shape)
    rows = matrix_rows(shape, split)
    width = complete.numel() // rows // tp
    for rank, part in enumerate(complete.chunk(tp, dim=split)):
        columns = complete.view(rows, -1)[:, rank * width : (rank + 1) * width]
        assert torch.equal(part.flatten(), columns.flatten())


def test_files_are_safetensors(tmp_path: Path) -> None:
    """By the format's own description: length, header in JSON, tensors without gaps, 8-byte aligned."""
    written = experiment(LAYOUTS["dp1"])
    train(written, tmp_path, HALF)
    raw = index.rank_file(checkpoint(tmp_path, written), 0).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    assert all(isinstance(value, str) for value in header.pop("__metadata__").values())
    ends = 0
    for entry in header.values():
        first, last = entry["data_offsets"]
        assert first == ends
        assert last - first == 4 * math.prod(entry["shape"])
        ends = last
    assert len(raw) == 8 + length + ends
    assert "embed.tokens/weight/0:1,0:3072" in header


def test_a_checkpoint_is_on_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank's file and the index, whole, and then their names: an index that is seen has its files."""
    written = experiment(LAYOUTS["dp1"])
    run = start(written, tmp_path)
    seen = synced(monkeypatch)
    assert run.checkpoints is not None
    assert run.checkpoints.write(HALF, {})
    folder = checkpoint(tmp_path, written)
    ranks = index.rank_file(folder, 0)
    assert seen[str(ranks)] == ranks.stat().st_size
    partial = [size for path, size in seen.items() if Path(path).name.startswith(f".{index.FILE}.")]
    assert partial == [(folder / index.FILE).stat().st_size]
    assert {str(folder), str(folder.parent)} <= set(seen)


# -- damage ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of one checkpoint."""
    root = tmp_path_factory.mktemp("written")
    train(experiment(LAYOUTS["dp1"]), root, HALF)
    folder = root / experiment(LAYOUTS["dp1"]).key
    return {str(path.relative_to(root)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path, written: dict[str, bytes]) -> Path:
    """A checkpoint to be damaged."""
    for name, content in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return checkpoint(tmp_path, experiment(LAYOUTS["dp1"]))


def message(folder: Path) -> str:
    """The one line about it, without where the folder is."""
    with pytest.raises(ConfigError) as caught:
        start(experiment(LAYOUTS["dp1"]), folder.parents[1])
    line = str(caught.value)
    assert "\n" not in line
    return line.removeprefix(f"{folder}/")


def change(folder: Path, **values: Any) -> None:
    path = folder / index.FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_without_an_index_there_is_no_checkpoint(folder: Path) -> None:
    (folder / index.FILE).unlink()
    assert start(experiment(LAYOUTS["dp1"]), folder.parents[1]).index == 0


def test_a_truncated_or_missing_file_is_named(folder: Path) -> None:
    path = index.rank_file(folder, 0)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-4])
    hint = "remove the folder to resume from the preceding checkpoint"
    assert message(folder) == f"rank-0.safetensors: size = {size - 4}: must be {size} bytes; {hint}"
    path.unlink()
    assert (
        message(folder)
        == f"rank-0.safetensors: is missing: the checkpoint needs this file of {size} bytes; {hint}"
    )


def test_a_file_that_shrinks_while_it_is_read_is_named(folder: Path) -> None:
    loaded = index.read_index(folder)
    path = index.rank_file(folder, 0)
    path.write_bytes(path.read_bytes()[:-4])
    name, (last,) = max(loaded.pieces.items(), key=lambda row: row[1][-1].offsets[-1])
    into = torch.empty(last.rectangle.size)
    with files.Reader() as reader:
        read = index.reading(folder, loaded, reader)
        with pytest.raises(ConfigError, match=r"rank-0.safetensors: ends before byte \d+"):
            read(name, "moment2", last.rectangle, into)


def test_an_index_of_another_version_is_refused(folder: Path) -> None:
    change(folder, format=9)
    assert message(folder) == "index.json: format = 9: must be 1, the version that this release reads"


def test_an_index_that_is_no_json_or_lacks_something_is_refused(folder: Path) -> None:
    right = (
        "must be a checkpoint index that `repro run` has written; "
        "remove the folder to resume from the preceding checkpoint"
    )
    change(folder, history=None, scalars=None, files=3, parameters=[])
    assert message(folder) == f"index.json: not an index: {right}"
    (folder / index.FILE).write_text("{")
    assert message(folder) == f"index.json: not an index: {right}"


def test_a_checkpoint_of_another_model_is_refused(folder: Path) -> None:
    course = json.loads((folder / index.FILE).read_text())["training"]
    change(folder, training={**course, "model": {**course["model"], "hidden": 64}})
    assert (
        message(folder)
        == "index.json: model.hidden = 64: must be 32, as in the experiment that resumes from this checkpoint"
    )
    change(folder, training={**course, "global_batch": 8})
    assert (
        message(folder)
        == "index.json: global_batch = 8: must be 4, as in the experiment that resumes from this checkpoint"
    )


def test_a_piece_that_the_index_lacks_is_named(folder: Path) -> None:
    parameters = json.loads((folder / index.FILE).read_text())["parameters"]
    del parameters["blocks.1.mlp.up"]["pieces"][0]
    change(folder, parameters=parameters)
    assert (
        message(folder)
        == "index.json: blocks.1.mlp.up: needs 4096 elements of rectangle (0, 1, 0, 4096); the checkpoint has 0"
    )
