"""Locks on experiment keys, so that two `repro run` on one store share the work instead of doubling it.

A lock is an `flock` on `root/locks/<key>`: the kernel lets go of it when its holder dies, however it
dies.  The file's text says where the holder keeps its short-lived files; whoever takes over a lock whose
holder was killed removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
from pathlib import Path


class Locks:
    """The keys that this process works on."""

    def __init__(self, root: Path):
        self._folder = root / "locks"
        self._held: list[int] = []

    def take(self, keys: list[str]) -> bool:
        """Lock all `keys` without waiting; False, and none is held, if another process has one of them."""
        assert not self._held, "one set of keys at a time"
        self._folder.mkdir(parents=True, exist_ok=True)
        for key in sorted(keys):
            descriptor = os.open(self._folder / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                self.release()
                return False
            self._held.append(descriptor)
            _sweep(descriptor)
        return True

    def remember(self, folder: Path) -> None:
        """Note where the work on the held keys keeps its files, for whoever comes after a kill."""
        note = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "folder": str(folder)})
        for descriptor in self._held:
            with contextlib.suppress(OSError):  # only tidiness is lost
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, note.encode(), 0)

    def release(self) -> None:
        """Let go of all keys."""
        for descriptor in self._held:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            os.close(descriptor)
        self._held = []


def _sweep(descriptor: int) -> None:
    """Remove what a killed holder left behind on this host."""
    text = os.pread(descriptor, 4096, 0)
    if not text:
        return
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = json.loads(text)
        folder = Path(note["folder"])
        if note["host"] == socket.gethostname() and folder.name.startswith("repro-"):
            shutil.rmtree(folder, ignore_errors=True)
    os.ftruncate(descriptor, 0)
