"""Checkpoint folder `step-<n>`: one file for each rank, and `index.json`, which is written after all rank files.

The index describes the training, its progress, and the file location of every rectangle of every parameter. A folder
without an index is the remainder of a killed run, and not a checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from repro.config import ConfigError, require
from repro.engines.native.checkpoint import files
from repro.engines.native.checkpoint.state import STATES, Rectangle
from repro.util.files import replace_file, sync_folder

FORMAT = 1
"""Version number of the format of checkpoint folders."""
FILE = "index.json"
RETAINED_CHECKPOINTS = 2
"""Number of a run's complete checkpoints that remain when older checkpoints are removed (`prune`)."""
HINT = "remove the folder to resume from the preceding checkpoint"


@dataclass(frozen=True)
class FilePiece:
    """Rectangle of a parameter (as a matrix) that one checkpoint file contains."""

    file: str
    rectangle: Rectangle
    offsets: tuple[int, ...]
    """Offsets in the file, in bytes, of the rectangle's weights, first moments and second moments."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """Content of the file `index.json` of one checkpoint."""

    step: int
    """Number of completed training steps."""
    training: Mapping[str, Any]
    """Settings of the training that must be equal for a run to resume (`repro.config.experiment.Experiment.course`)."""
    scalars: Mapping[str, Any]
    """Scalar state of the training: optimizer steps and loss scaler, as `checkpoint.state.scalars` returns it."""
    history: Mapping[str, Any]
    """Losses of the run, and the steps at which it was resumed."""
    written_by: Mapping[str, Any]
    """Name, identifying key (`Experiment.key`) and layout of the experiment that wrote the checkpoint."""
    sizes: Mapping[str, int]
    """Size of every rank's checkpoint file in bytes, by file name."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of every full parameter (not split by tp or ZeRO), by name."""
    pieces: Mapping[str, tuple[FilePiece, ...]] = field(default_factory=dict)
    """Matrix blocks (rectangles) in files that together cover every parameter without overlap, by parameter name."""


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return root / f"step-{step}"


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of the checkpoint file of `rank`."""
    return folder / f"rank-{rank}.safetensors"


def complete(root: Path) -> list[int]:
    """Return the step numbers of the complete checkpoints in folder `root`, oldest first."""
    found = root.glob(f"step-*/{FILE}")
    return sorted(int(name) for path in found if (name := path.parent.name[5:]).isdigit())


def remove(folder: Path) -> None:
    """Remove a checkpoint folder, its index first, so that an interruption leaves no folder that seems complete."""
    (folder / FILE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def prune(root: Path, kept: int = RETAINED_CHECKPOINTS) -> None:
    """Remove all but the newest `kept` complete checkpoints of `root`, and all incomplete checkpoints."""
    keep = {folder_of(root, step) for step in complete(root)[-kept:]}
    for folder in root.glob("step-*"):
        if folder not in keep:
            remove(folder)


def gather(
    folder: Path, ranks: int
) -> tuple[dict[str, int], dict[str, tuple[int, ...]], dict[str, tuple[FilePiece, ...]]]:
    """Read the headers of all ranks' checkpoint files; return file sizes, parameter shapes and stored matrix blocks."""
    sizes: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[FilePiece]] = {}
    for rank in range(ranks):
        path = rank_file(folder, rank)
        sizes[path.name] = path.stat().st_size
        offsets: dict[tuple[str, Rectangle], dict[str, int]] = {}
        entries, of_rank = files.read_contents(path)
        shapes |= of_rank
        for entry, at in entries:
            offsets.setdefault((entry.name, entry.rectangle), {})[entry.state] = at
        for (name, rectangle), begins in offsets.items():
            places = tuple(begins[state] for state in STATES)
            pieces.setdefault(name, []).append(FilePiece(path.name, rectangle, places))
    return sizes, shapes, {name: tuple(found) for name, found in pieces.items()}


def write_index(folder: Path, index: Index) -> None:
    """Write `index.json` atomically and durably, after which the folder is a complete checkpoint."""
    document = {
        "format": FORMAT,
        "step": index.step,
        "training": index.training,
        "scalars": index.scalars,
        "history": index.history,
        "written_by": index.written_by,
        "files": index.sizes,
        "parameters": {
            name: {
                "shape": index.shapes[name],
                "pieces": [
                    {
                        "file": p.file,
                        "rectangle": p.rectangle,
                        "offsets": dict(zip(STATES, p.offsets, strict=True)),
                    }
                    for p in pieces
                ],
            }
            for name, pieces in index.pieces.items()
        },
    }
    replace_file(folder / FILE, json.dumps(document, separators=(",", ":")), durable=True)
    sync_folder(folder.parent)


def read_index(folder: Path) -> Index:
    """Return the index of a checkpoint.

    Raises:
        ConfigError: The index cannot be read or has another version.
    """
    path = folder / FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document["format"]
        if version != FORMAT:
            raise ConfigError(
                "format", version, f"{FORMAT}, the checkpoint format that this release reads", file=str(path)
            )
        return Index(
            step=int(document["step"]),
            training=document["training"],
            scalars=dict(document["scalars"]),
            history=dict(document["history"]),
            written_by=dict(document["written_by"]),
            sizes=document["files"],
            shapes={name: tuple(row["shape"]) for name, row in document["parameters"].items()},
            pieces={
                name: tuple(
                    FilePiece(
                        piece["file"],
                        Rectangle(*piece["rectangle"]),
                        tuple(piece["offsets"][state] for state in STATES),
                    )
                    for piece in row["pieces"]
                )
                for name, row in document["parameters"].items()
            },
        )
    except OSError as error:
        raise ConfigError(
            error.strerror or "cannot be read", expected="a readable index of a checkpoint", file=str(path)
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        what = f"must be a checkpoint index that `repro run` has written; {HINT}"
        raise ConfigError("not an index", says=what, file=str(path)) from None


def check_files(folder: Path, index: Index) -> None:
    """Raise `ConfigError` unless every rank's checkpoint file exists and has the size that the index states."""
    for name, size in index.sizes.items():
        path = folder / name
        says = f"the checkpoint is incomplete without this file of {size} bytes; {HINT}"
        require(path.is_file(), "is missing", says=says, file=str(path))
        if path.stat().st_size != size:
            raise ConfigError("size", path.stat().st_size, f"{size} bytes; {HINT}", file=str(path))


def reading(
    folder: Path, index: Index, reader: files.Reader
) -> Callable[[str, str, Rectangle, Tensor], None]:
    """Return a function `read(parameter, state, rectangle, tensor)` that fills a flat fp32 tensor from a checkpoint.

    `state`: weight or Adam moment. `rectangle`: block of the parameter's matrix. `ConfigError` if elements are missing.
    """

    def read(name: str, state: str, wanted: Rectangle, into: Tensor) -> None:
        found = 0
        for piece in index.pieces.get(name, ()):
            part = wanted.overlap(piece.rectangle)
            if part is not None:
                at = piece.offsets[STATES.index(state)]
                reader.read(folder / piece.file, at, piece.rectangle, part, wanted.view(into, part))
                found += part.size
        if found != wanted.size:
            right = f"the checkpoint has {found} of the {wanted.size} elements in rectangle {tuple(wanted)}"
            raise ConfigError(name, says=right, file=str(folder / FILE))

    return read
