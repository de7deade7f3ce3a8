"""Files that a reader sees whole or not at all, also after `kill -9` or on a full disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


def replace(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write `content` to `path` in place of what is there, if anything.

    Raises `OSError` about `path` and leaves no partial file.

    The partial file has a name of its own beside `path`, so that writers on several nodes cannot mix.
    `durable`: it is on disk, name and all, when this returns.
    """
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(partial, "xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise _about(path, error) from None
        raise
    if durable:
        sync_folder(path.parent)


def write(path: Path, content: str | bytes) -> None:
    """Write `content` to `path`, which may be a device.  Raises `OSError` that names it, as a full disk's does not."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _about(path, error) from None


def _about(path: Path, error: OSError) -> OSError:
    return OSError(error.errno, error.strerror, str(path))


def write_json(path: Path, document: Any, *, durable: bool = False) -> None:
    """`replace` with `document` as JSON."""
    replace(path, json.dumps(document), durable=durable)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
