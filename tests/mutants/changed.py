"""Changed files of a package, including untracked files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def sources(root: Path, patterns: Iterable[str], base: str | None) -> list[Path]:
    """Return files of the repository `root`, relative to `root`; with `base`, only files changed since this commit."""
    found = {path.relative_to(root) for pattern in patterns for path in root.glob(pattern)}
    if base:
        with new_files_in_the_index(root):
            changed = _git(root, "diff", "--name-only", base)
        found &= set(map(Path, changed.splitlines()))
    return sorted(found)


@contextmanager
def new_files_in_the_index(root: Path) -> Iterator[None]:
    """Let `git diff` in this process show untracked files, with a copy of the index; the user's index is unchanged."""
    index = root / _git(root, "rev-parse", "--git-path", "index").strip()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy2(index, folder)
        os.environ["GIT_INDEX_FILE"] = f"{folder}/{index.name}"
        try:
            _git(root, "add", "--intent-to-add", ".")
            yield
        finally:
            del os.environ["GIT_INDEX_FILE"]


def _git(root: Path, *words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=root, text=True)
