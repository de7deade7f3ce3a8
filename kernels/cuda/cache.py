"""Compiled programs on disk, shared by all ranks and nodes that see the folder.

A file's name is the hash of everything that the machine code depends on, so nothing in the folder is ever
out of date. A file appears whole, by a rename: there are no locks, and of two ranks that compile the same one wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from pathlib import Path

from repro.kernels.cuda import compile as compiler
from repro.kernels.cuda.compile import Compiled, Target
from repro.kernels.cuda.program import Program, headers
from repro.util.files import replace_file

FOLDER = "REPRO_KERNEL_CACHE"
"""The variable that names another folder."""


def folder() -> Path:
    """Where compiled programs are: $REPRO_KERNEL_CACHE, or `repro/kernels` in the user's cache."""
    if chosen := os.environ.get(FOLDER):
        return Path(chosen)
    # Of a user without a home folder the path is `/~/.cache`, which cannot be written, rather than an error.
    own = os.path.join("/", os.path.expanduser("~/.cache"))
    return Path(os.environ.get("XDG_CACHE_HOME") or own).expanduser() / "repro" / "kernels"


def key(program: Program, target: Target) -> str:
    """Hash of source, definitions, headers, options (the architecture is one) and NVRTC's version."""
    parts = [program.text, headers(), compiler.options_for(target), compiler.version()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def contents() -> tuple[int, int]:
    """(programs, bytes) of the folder, of all architectures and versions."""
    try:
        sizes = [entry.stat().st_size for entry in os.scandir(folder()) if not entry.name.startswith(".")]
    except OSError:
        return 0, 0
    return len(sizes), sum(sizes)


def known(program: Program, target: Target) -> Compiled | None:
    """The program if it is in the cache. Raises Unavailable."""
    return _read(_path(program, target))


def _path(program: Program, target: Target) -> Path:
    return folder() / f"{program.source}-{target.architecture}-{key(program, target)}"


def compiled(program: Program, target: Target) -> Compiled:
    """The program from the cache, or from the compiler and into the cache. Raises Unavailable."""
    path = _path(program, target)
    found = _read(path)
    if found is None:
        found = compiler.compile(program, target)
        try:
            _write(path, found)
        except OSError as error:
            warnings.warn(
                f"kernels are compiled again by every process: {path.parent} cannot be written ({error.strerror}); "
                f"set {FOLDER} to a folder that can",
                RuntimeWarning,
                stacklevel=2,
            )
    return found


def _read(path: Path) -> Compiled | None:
    """What is stored; None where nothing is, or where a disk has lost some of it."""
    try:
        first, _, code = path.read_bytes().partition(b"\n")
        about = json.loads(first)
        whole = about["sha256"] == hashlib.sha256(code).hexdigest()
        return Compiled(code, about["log"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, content: Compiled) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"sha256": hashlib.sha256(content.code).hexdigest(), "log": content.log}
    replace_file(path, json.dumps(about).encode() + b"\n" + content.code)
