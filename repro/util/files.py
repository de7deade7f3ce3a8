"""Files: atomic replacement, JSON, writes that survive a power failure, and SHA-256."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any


def replace_file(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write `content` to `path` atomically: a reader sees either the old file or the complete new file.

    The temporary file has a unique name in the folder of `path`, so that writers on several nodes do not collide.
    `durable`: wait until the file's content and name are on disk.  Raises `OSError` with `path` as its file name.
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


def write_file(path: Path, content: str | bytes) -> None:
    """Write `content` to `path`, which may be a device file.  Raises `OSError` with `path` as its file name."""
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise _about(path, error) from None


def _about(path: Path, error: OSError) -> OSError:
    return OSError(error.errno, error.strerror, str(path))


def write_json(path: Path, document: Any, *, durable: bool = False) -> None:
    """Write `document` as JSON to the file `path`, atomically (`replace_file`)."""
    replace_file(path, json.dumps(document), durable=durable)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or contains no complete JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def sha256_digest(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Wait until the names of created and renamed files in `folder` are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
