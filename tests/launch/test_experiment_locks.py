"""Two runs on one store never work on the same key, and a killed one leaves nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from repro.launch.runner import ExperimentLocks


def test_a_key_is_held_until_it_is_let_go_of(tmp_path: Path) -> None:
    mine, theirs, third = (ExperimentLocks(tmp_path) for _ in range(3))
    assert mine.take(["a", "b"])
    assert not theirs.take(["b", "0"])
    assert third.take(["0"]), "who does not get all of them holds none"
    assert not theirs.take(["a"])
    mine.release()
    assert theirs.take(["a", "b"])
    assert not mine.take(["b"])


def test_others_of_the_store_may_look_at_a_lock(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert ExperimentLocks(tmp_path / "new" / "store").take(["a"])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "store" / "locks" / "a").stat().st_mode) == 0o644


def test_who_takes_a_key_of_a_killed_run_removes_its_files(tmp_path: Path) -> None:
    for name, swept in (("repro-x", True), ("home", False)):
        folder = tmp_path / name
        folder.mkdir()
        killed, heir = ExperimentLocks(tmp_path), ExperimentLocks(tmp_path)
        assert killed.take(["a"])
        killed.remember(folder)
        note = (tmp_path / "locks" / "a").read_bytes()
        killed.release()
        (tmp_path / "locks" / "a").write_bytes(note)  # a kill lets go and leaves the note
        assert heir.take(["a"])
        assert folder.exists() != swept
        assert (tmp_path / "locks" / "a").read_bytes() == b""
        heir.release()
