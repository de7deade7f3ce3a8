"""Writing of an experiment's checkpoints during training, and choice of the checkpoint from which training resumes.

The results folder `checkpoints/<key>/` has `training.json`, which describes the training, and a subfolder for each
checkpoint. An experiment resumes from the newest checkpoint with its name and training settings, in any layout.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from repro.config import ConfigError, Experiment, require
from repro.engines.native.checkpoint import files, index, state
from repro.engines.native.checkpoint.index import Index
from repro.engines.native.engine import NativeEngine
from repro.launch.job import STOP_FILE, Job
from repro.parallel.comm import MAX
from repro.parallel.mesh import Mesh
from repro.util.files import read_json, write_json

TRAINING_FILE = "training.json"


class FoundCheckpoint(NamedTuple):
    """Step and folder of a complete checkpoint."""

    step: int
    folder: Path


@dataclass(frozen=True)
class CheckpointPlace:
    """Paths that checkpointing uses: the folder of all checkpoints, and the file that requests a stop."""

    root: Path
    """Folder of all checkpoints, with a subfolder for the key of each experiment."""
    stop: Path
    """File whose existence requests a checkpoint after the current step, and then the end of the ranks."""

    @staticmethod
    def for_experiment(job: Job, experiment: Experiment) -> CheckpointPlace | None:
        """Return the paths that the launcher assigned to an experiment; None if it writes no checkpoints."""
        every = experiment.training.checkpoint_every
        if not every:
            return None
        right = "0 (no checkpoints), because this launch has no store for checkpoints"
        require(job.checkpoints, "checkpoint_every", every, right)
        return CheckpointPlace(Path(job.checkpoints), Path(job.folder) / STOP_FILE)


class CheckpointManager:
    """Reads and writes the checkpoints of one experiment. All ranks call the same methods in the same order."""

    def __init__(
        self,
        experiment: Experiment,
        mesh: Mesh,
        engine: NativeEngine,
        device: torch.device,
        place: CheckpointPlace,
        progress: Callable[[], None],
    ):
        """`progress`: function that is called while checkpoints are read and written, so that no hang is reported."""
        self.experiment, self.mesh, self.engine, self.device = experiment, mesh, engine, device
        self.place, self.progress = place, progress
        self.root = place.root / experiment.key
        self.written: list[int] = []
        """Training steps after which a checkpoint was written."""
        self.seconds: list[float] = []
        """Seconds for which training waited for each written checkpoint."""
        self.failures: list[dict[str, Any]] = []
        """Training step and error message (`reason`) of each checkpoint that this rank failed to write."""

    def resume(self) -> Index | None:
        """Load the newest checkpoint into the engine; return its index file's content, or None without a checkpoint.

        Raises `ConfigError` for a damaged checkpoint, and if the experiment in the key `continues` has none.
        """
        found = self._choose()
        if found is None:
            return None
        loaded = index.read_index(found.folder)
        _require_same_training(self.experiment.course, loaded.training, str(found.folder / index.FILE))
        if self.mesh.rank == 0:
            index.check_files(found.folder, loaded)
        with files.Reader() as reader:
            fill = index.reading(found.folder, loaded, reader)

            def read(*part: Any) -> None:
                fill(*part)
                self.progress()

            state.restore_states(self.engine, dict(loaded.scalars), read)
        return loaded

    def _choose(self) -> FoundCheckpoint | None:
        """Return on all ranks the checkpoint that rank 0 finds, by a broadcast of its step and experiment key."""
        found = newest_checkpoint(self.place.root, self.experiment) if self.mesh.rank == 0 else None
        words = [0, 0, 0, 0]
        if found is not None:
            key = int(found.folder.parent.name, 16)
            words = [1, found.step, key >> 32, key & 0xFFFFFFFF]
        message = torch.tensor(words, dtype=torch.int64, device=self.device)
        self.mesh.world.broadcast(message, 0, purpose="checkpoint").wait()
        exists, step, high, low = message.tolist()
        if not exists:
            return None
        return FoundCheckpoint(step, index.folder_of(self.place.root / f"{high << 32 | low:016x}", step))

    def asked_to_stop(self) -> bool:
        """Return on all ranks whether the launcher has requested a stop, by a file in rank 0's launch folder."""
        return self._any(self.mesh.rank == 0 and self.place.stop.exists())

    def write(self, step: int, history: Mapping[str, Any]) -> bool:
        """Write a checkpoint after `step` steps, with the losses and norms in `history`.

        Return False, without a new checkpoint, if a rank could not write, for example on a full disk.
        """
        began = time.monotonic()
        self.engine.synchronize()
        folder = index.folder_of(self.root, step)
        entries = []
        shapes: dict[str, tuple[int, ...]] = {}
        for fragment in state.fragments(self.engine, owned=True):
            shapes[fragment.name] = fragment.shape
            for kind, tensor in zip(state.STATES, fragment.states, strict=True):
                entries.append((files.TensorEntry(fragment.name, kind, fragment.rectangle), tensor))
        mine = index.rank_file(folder, self.mesh.rank)
        steps: list[Callable[[], None]] = [
            lambda: self._make(folder),
            lambda: files.write_rank_file(mine, entries, shapes, self.progress),
            lambda: self._complete(folder, step, history),
        ]
        if not all(self._all_could(action, step) for action in steps):
            if self.mesh.rank == 0:
                index.remove(folder)
            return False
        self.written.append(step)
        self.seconds.append(time.monotonic() - began)
        return True

    def _make(self, folder: Path) -> None:
        """Create on rank 0 an empty folder for the checkpoint, and `training.json`, which describes the training."""
        if self.mesh.rank:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        training = {"name": self.experiment.name, "course": self.experiment.course}
        write_json(self.root / TRAINING_FILE, training)
        index.remove(folder)
        folder.mkdir()

    def _complete(self, folder: Path, step: int, history: Mapping[str, Any]) -> None:
        """Write the checkpoint's index file on rank 0, which completes the checkpoint, and remove older checkpoints."""
        if self.mesh.rank:
            return
        e = self.experiment
        sizes, shapes, pieces = index.gather(folder, self.mesh.world.size)
        index.write_index(
            folder,
            Index(
                step=step,
                training=e.course,
                scalars=state.scalars(self.engine),
                history=history,
                written_by={"name": e.name, "key": e.key, "layout": asdict(e.layout)},
                sizes=sizes,
                shapes=shapes,
                pieces=pieces,
            ),
        )
        # After the last step only the final checkpoint is useful, because another experiment may continue from it.
        index.prune(self.root, 1 if step == e.training.steps else index.RETAINED_CHECKPOINTS)

    def _all_could(self, action: Callable[[], None], step: int) -> bool:
        """Run a write operation, and return on all ranks whether no rank had an `OSError`, for example a full disk."""
        failed = False
        try:
            action()
        except OSError as error:
            failed = True
            reason = f"rank {self.mesh.rank}: {error.strerror}: {error.filename or self.root}"
            self.failures.append({"step": step, "reason": reason})
            print(f"the checkpoint after step {step} was not written: {reason}", file=sys.stderr, flush=True)
        return not self._any(failed)

    def _any(self, mine: bool) -> bool:
        """Return on all ranks whether the flag `mine` is true on any rank."""
        flag = torch.tensor([int(mine)], dtype=torch.int64, device=self.device)
        self.mesh.world.all_reduce(flag, MAX, purpose="checkpoint").wait()
        return bool(flag.item())


def newest_checkpoint(root: Path, experiment: Experiment) -> FoundCheckpoint | None:
    """Return the newest complete checkpoint from which `experiment` may resume; None without one.

    Of two checkpoints at an equal step, the experiment's own one is preferred. Checkpoints at or after the last step do
    not count. Raises `ConfigError` if `continues` names an experiment without a checkpoint.
    """
    names = {experiment.name, experiment.training.continues} - {""}
    found: list[tuple[int, bool, Path]] = []
    for path in root.glob(f"*/{TRAINING_FILE}"):
        if not re.fullmatch("[0-9a-f]{16}", path.parent.name):
            continue
        about = read_json(path)
        if about.get("name") not in names or about.get("course") != experiment.course:
            continue
        own = path.parent.name == experiment.key
        for step in index.complete(path.parent):
            if step < experiment.training.steps:
                found.append((step, own, index.folder_of(path.parent, step)))
    if found:
        step, _, folder = max(found)
        return FoundCheckpoint(step, folder)
    if experiment.training.continues:
        right = f"an experiment of the same training with a checkpoint in {root}; run it first"
        raise ConfigError("continues", experiment.training.continues, right)
    return None


def _require_same_training(wanted: Mapping[str, Any], written: Mapping[str, Any], file: str) -> None:
    """Raise `ConfigError` if training settings of a checkpoint (`written`) differ from the experiment's (`wanted`)."""
    right = "the value of the experiment that resumes from this checkpoint"
    for key in wanted:
        mine, theirs = wanted[key], written.get(key)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            for name in sorted({*mine, *theirs}):
                if mine.get(name) != theirs.get(name):
                    ours, other = (values.get(name, "its default") for values in (mine, theirs))
                    raise ConfigError(name, other, f"{ours!r}, {right}", file=file, where=key)
        elif mine != theirs:
            raise ConfigError(key, theirs, f"{mine!r}, {right}", file=file)
