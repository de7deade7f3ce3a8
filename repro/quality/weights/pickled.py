"""torch's own files (`.bin`, `.pt`): tensors and plain values, and nothing that could be called.

torch's restricted reader (`weights_only`) takes no class but its own.  Megatron-LM's checkpoints name a few more (its
arguments, loss scalers, states of random numbers): each becomes a `StandIn`, which holds what is written about it and
does nothing.  Nothing that a file names is imported.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from repro.config import ConfigError

STOOD_IN = re.compile(
    r"argparse\.Namespace|numpy\.(?:_?core\.)[\w.]*|numpy\.(?:ndarray|dtype|random\.[\w.]*)"
    r"|(?:megatron|fp16|mpu|apex|signal|pathlib)\.[\w.]*|types\.SimpleNamespace"
)
"""Names for which a `StandIn` is put; beyond torch's own, nothing else is accepted."""
_TORCH = re.compile(r"(?:torch|collections|_codecs)\..*")


class StandIn:
    """In the place of an object of a class that is not imported: its attributes, if it has any."""

    def __new__(cls, *_: Any, **__: Any) -> StandIn:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def load(path: Path) -> Any:
    """What a file holds; tensors are mapped where the file's age allows it (torch 1.6).  Raises `ConfigError`."""
    names: dict[str, None] = {}
    try:
        whole = zipfile.is_zipfile(path)
        for name in _names(path, whole):
            names[name] = None
        stood_in: list[Any] = [(StandIn, name) for name in names if STOOD_IN.fullmatch(name)]
        with torch.serialization.safe_globals(stood_in):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True if whole else None)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ConfigError(reason, expected="a file of weights", file=str(path)) from None
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, IndexError, KeyError) as error:
        strange = [name for name in names if not STOOD_IN.fullmatch(name) and not _TORCH.fullmatch(name)]
        if not strange:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                "not weights", says=f"needs a file of torch.save: {reason}", file=str(path)
            ) from None
        says = f"refused: loading it would call {strange[0]}; a file of weights has tensors and plain values only"
        raise ConfigError("weights", says=says, file=str(path)) from None


def _names(path: Path, whole: bool) -> Iterator[str]:
    """What the pickle of a file names, as `module.name`; nothing is executed."""
    if whole:
        with zipfile.ZipFile(path) as archive:
            inner = next((n for n in archive.namelist() if n.rpartition("/")[2] == "data.pkl"), None)
            if inner is not None:
                with archive.open(inner) as file:
                    yield from _globals(file)
        return
    with open(path, "rb") as file:
        for _ in range(4):  # a magic number, the version, the machine, and what was saved
            yield from _globals(file)


def _globals(file: Any) -> Iterator[str]:
    strings: list[str] = []
    for operation, argument, _ in pickletools.genops(file):
        if operation.name == "GLOBAL":
            yield str(argument).replace(" ", ".")
        elif operation.name == "STACK_GLOBAL" and len(strings) > 1:
            yield ".".join(strings[-2:])
        elif isinstance(argument, str):
            strings.append(argument)
