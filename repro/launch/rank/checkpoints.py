"""When a run writes its state, where it goes on from, and how all ranks agree about it.

Below the store, `checkpoints/<key>/` has `training.json`, which says what is trained there, and a folder for
each checkpoint (`repro.engines.native.checkpoint.index`).  A run goes on from the newest checkpoint of its own name
and course (`repro.config.Experiment.course`), under whatever layout that was written.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from repro.config import ConfigError, Experiment
from repro.engines.native.checkpoint import files, index, state
from repro.engines.native.checkpoint.index import Index
from repro.engines.native.engine import NativeEngine
from repro.launch.job import STOP_FILE, Job
from repro.parallel.comm import MAX
from repro.parallel.mesh import Mesh
from repro.util.files import write_json

ABOUT = "training.json"


class Found(NamedTuple):
    """A complete checkpoint."""

    step: int
    folder: Path


@dataclass(frozen=True)
class CheckpointPlace:
    """Where a run's checkpoints are, and what asks it to stop."""

    root: Path
    """Holds a folder for each experiment's key."""
    stop: Path

    @staticmethod
    def of(job: Job, experiment: Experiment) -> CheckpointPlace | None:
        """The place that the launcher gives; None for an experiment without checkpoints."""
        every = experiment.training.checkpoint_every
        if not every:
            return None
        if not job.checkpoints:
            raise ConfigError("checkpoint_every", every, "0 where nothing is stored")
        return CheckpointPlace(Path(job.checkpoints), Path(job.folder) / STOP_FILE)


class CheckpointManager:
    """Writes and finds the checkpoints of one run; every rank has one and calls the same methods in the same order."""

    def __init__(
        self,
        experiment: Experiment,
        mesh: Mesh,
        engine: NativeEngine,
        device: torch.device,
        place: CheckpointPlace,
        progress: Callable[[], None],
    ):
        """`progress` is called while a checkpoint is written, so that nobody takes the time for a hang."""
        self.experiment, self.mesh, self.engine, self.device = experiment, mesh, engine, device
        self.place, self.progress = place, progress
        self.root = place.root / experiment.key
        self.written: list[int] = []
        self.seconds: list[float] = []
        """Of each of them, all that the step waits for."""
        self.failures: list[dict[str, Any]] = []
        """Step and reason of the checkpoints that could not be written, as far as this rank knows."""

    # -- going on ----------------------------------------------------------------------------------

    def resume(self) -> Index | None:
        """Bring the engine to where the newest checkpoint is; None, and it stays new, if there is none.

        Raises `ConfigError` if the checkpoint is damaged, or if `continues` names a run without one.
        """
        found = self._choose()
        if found is None:
            return None
        loaded = index.read_index(found.folder)
        _same(self.experiment.course, loaded.training, str(found.folder / index.FILE))
        if self.mesh.rank == 0:
            index.check_files(found.folder, loaded)
        with files.Reader() as reader:
            fill = index.reading(found.folder, loaded, reader)

            def read(*part: Any) -> None:
                fill(*part)
                self.progress()

            state.restore_states(self.engine, dict(loaded.scalars), read)
        return loaded

    def _choose(self) -> Found | None:
        """What rank 0 finds, made known to all ranks in 32 bytes: a folder's name is sixteen hex digits."""
        found = newest(self.place.root, self.experiment) if self.mesh.rank == 0 else None
        words = [0, 0, 0, 0]
        if found is not None:
            key = int(found.folder.parent.name, 16)
            words = [1, found.step, key >> 32, key & 0xFFFFFFFF]
        told = torch.tensor(words, dtype=torch.int64, device=self.device)
        self.mesh.world.broadcast(told, 0, purpose="checkpoint").wait()
        there, step, high, low = told.tolist()
        if not there:
            return None
        return Found(step, index.folder_of(self.place.root / f"{high << 32 | low:016x}", step))

    # -- keeping -----------------------------------------------------------------------------------

    def asked_to_stop(self) -> bool:
        """Whether the launcher wants the run to end; rank 0 sees it, and all ranks know it after one step."""
        return self._any(self.mesh.rank == 0 and self.place.stop.exists())

    def write(self, step: int, history: Mapping[str, Any]) -> bool:
        """Write a checkpoint after `step` steps.

        False, and everything is as it was before, if a rank could not: the disk is full, say.
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
        """Rank 0: an empty folder, and who it belongs to."""
        if self.mesh.rank:
            return
        self.root.mkdir(parents=True, exist_ok=True)
        write_json(self.root / ABOUT, {"name": self.experiment.name, "course": self.experiment.course})
        index.remove(folder)
        folder.mkdir()

    def _complete(self, folder: Path, step: int, history: Mapping[str, Any]) -> None:
        """Rank 0: the index, now that every rank's file is on disk; then what it replaces goes."""
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
        # Of a run that is done only the end is of use: another may continue it.
        index.prune(self.root, 1 if step == e.training.steps else index.RETAINED_CHECKPOINTS)

    def _all_could(self, action: Callable[[], None], step: int) -> bool:
        """Whether no rank's `action` met an error of its disk."""
        failed = False
        try:
            action()
        except OSError as error:
            failed = True
            reason = f"rank {self.mesh.rank}: {error.strerror}: {error.filename or self.root}"
            self.failures.append({"step": step, "reason": reason})
            print(f"no checkpoint after step {step}: {reason}", file=sys.stderr, flush=True)
        return not self._any(failed)

    def _any(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        flag = torch.tensor([int(mine)], dtype=torch.int64, device=self.device)
        self.mesh.world.all_reduce(flag, MAX, purpose="checkpoint").wait()
        return bool(flag.item())


def newest(root: Path, experiment: Experiment) -> Found | None:
    """The newest complete checkpoint that `experiment` may go on from, its own first; None without one.

    One at or beyond its last step is of no use to it: it ran before, and is wanted again.  Raises `ConfigError`
    if the run that it continues left none.
    """
    names = {experiment.name, experiment.training.continues} - {""}
    found: list[tuple[int, bool, Path]] = []
    for path in root.glob(f"*/{ABOUT}"):
        if not re.fullmatch("[0-9a-f]{16}", path.parent.name):
            continue
        about = _about(path)
        if about.get("name") not in names or about.get("course") != experiment.course:
            continue
        own = path.parent.name == experiment.key
        for step in index.complete(path.parent):
            if step < experiment.training.steps:
                found.append((step, own, index.folder_of(path.parent, step)))
    if found:
        step, _, folder = max(found)
        return Found(step, folder)
    if experiment.training.continues:
        right = f"an experiment of the same training with a checkpoint in {root}; run it first"
        raise ConfigError("continues", experiment.training.continues, right)
    return None


def _about(path: Path) -> dict[str, Any]:
    """What a folder of checkpoints is about; nothing if its writer was killed before it said so."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _same(wanted: Mapping[str, Any], written: Mapping[str, Any], file: str) -> None:
    """Raise `ConfigError` unless the checkpoint is of the same training; it names the first thing that differs."""
    for key in wanted:
        mine, theirs = wanted[key], written.get(key)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            for name in sorted({*mine, *theirs}):
                if mine.get(name) != theirs.get(name):
                    at_default = "its default"
                    right = f"{mine.get(name, at_default)!r}, as in the experiment that is to go on from it"
                    raise ConfigError(name, theirs.get(name, at_default), right, file=file, where=key)
        elif mine != theirs:
            raise ConfigError(
                key, theirs, f"{mine!r}, as in the experiment that is to go on from it", file=file
            )
