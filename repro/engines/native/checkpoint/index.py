"""A checkpoint is a folder: one file a rank, and an index that is written when all of them are on disk.

`step-<n>/index.json` says what was trained and how far, and for every parameter which rectangle of it lies
where.  Without it the folder is what a killed run left behind, and no checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from repro.config import ConfigError
from repro.engines.native.checkpoint import files
from repro.engines.native.checkpoint.region import Rectangle
from repro.engines.native.checkpoint.state import STATES
from repro.util.files import replace_file, sync_folder

FORMAT = 1
"""Version of the folder's layout."""
FILE = "index.json"
KEPT = 2
"""Complete checkpoints of one run that stay."""


@dataclass(frozen=True)
class FilePiece:
    """A rectangle of a parameter in one file."""

    file: str
    rectangle: Rectangle
    offsets: tuple[int, ...]
    """The byte at which each of the states begins."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """What one checkpoint says of itself."""

    step: int
    """Steps that were done."""
    training: Mapping[str, Any]
    """What has to be equal for a run to go on from here (`repro.config.experiment.Experiment.course`)."""
    scalars: Mapping[str, Any]
    """`repro.engines.native.checkpoint.state.scalars`."""
    history: Mapping[str, Any]
    """What the run has seen so far: its losses, and where it was resumed."""
    written_by: Mapping[str, Any]
    """Name, key and layout of the experiment."""
    sizes: Mapping[str, int]
    """Bytes of every rank's file."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of every parameter, whole."""
    pieces: Mapping[str, tuple[FilePiece, ...]] = field(default_factory=dict)
    """Of every parameter; they do not overlap and leave nothing out."""


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return root / f"step-{step}"


def rank_file(folder: Path, rank: int) -> Path:
    """Where `rank` writes."""
    return folder / f"rank-{rank}.safetensors"


def complete(root: Path) -> list[int]:
    """Steps of the complete checkpoints in `root`, oldest first."""
    found = root.glob(f"step-*/{FILE}")
    return sorted(int(name) for path in found if (name := path.parent.name[5:]).isdigit())


def remove(folder: Path) -> None:
    """Remove a checkpoint, its index first: from then on there is none, whatever happens."""
    (folder / FILE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def prune(root: Path, kept: int = KEPT) -> None:
    """Remove all but the newest `kept` complete checkpoints of `root`, and what is not complete."""
    keep = {folder_of(root, step) for step in complete(root)[-kept:]}
    for folder in root.glob("step-*"):
        if folder not in keep:
            remove(folder)


def gather(
    folder: Path, ranks: int
) -> tuple[dict[str, int], dict[str, tuple[int, ...]], dict[str, tuple[FilePiece, ...]]]:
    """Sizes of all ranks' files, shapes of all parameters, and every parameter's pieces in the files."""
    sizes: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[FilePiece]] = {}
    for rank in range(ranks):
        path = rank_file(folder, rank)
        sizes[path.name] = path.stat().st_size
        offsets: dict[tuple[str, Rectangle], dict[str, int]] = {}
        entries, of_rank = files.contents(path)
        shapes |= of_rank
        for entry, at in entries:
            offsets.setdefault((entry.name, entry.rectangle), {})[entry.state] = at
        for (name, rectangle), begins in offsets.items():
            places = tuple(begins[state] for state in STATES)
            pieces.setdefault(name, []).append(FilePiece(path.name, rectangle, places))
    return sizes, shapes, {name: tuple(found) for name, found in pieces.items()}


def save(folder: Path, index: Index) -> None:
    """Make the folder a checkpoint: the index appears whole, and only when it is on disk."""
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


def load(folder: Path) -> Index:
    """The index of a checkpoint.  Raises `ConfigError` if it cannot be read or is of another version."""
    path = folder / FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        version = document["format"]
        if version != FORMAT:
            raise ConfigError(
                "format", version, f"{FORMAT}, the version that this release reads", file=str(path)
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
            error.strerror or "cannot be read", expected="the index of a checkpoint", file=str(path)
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        what = (
            "needs an index as `repro run` writes it; remove the folder to go on from the checkpoint before"
        )
        raise ConfigError("not an index", says=what, file=str(path)) from None


def check_files(folder: Path, index: Index) -> None:
    """Raise `ConfigError` unless every rank's file is there with the size that the index has."""
    for name, size in index.sizes.items():
        path = folder / name
        hint = "remove the folder to go on from the checkpoint before"
        if not path.is_file():
            raise ConfigError("is missing", says=f"a file of {size} bytes; {hint}", file=str(path))
        if path.stat().st_size != size:
            raise ConfigError("size", path.stat().st_size, f"{size} bytes; {hint}", file=str(path))


def reading(
    folder: Path, index: Index, reader: files.Reader
) -> Callable[[str, str, Rectangle, Tensor], None]:
    """A function that fills a flat fp32 tensor with (parameter, state, rectangle), from whichever pieces.

    It raises `ConfigError` if the checkpoint does not have all of it.
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
            right = f"needs {wanted.size} elements at {tuple(wanted)}; the index has {found} of them"
            raise ConfigError(name, says=right, file=str(folder / FILE))

    return read
