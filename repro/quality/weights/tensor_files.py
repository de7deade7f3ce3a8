"""Readers of tensor files in the formats of safetensors and of `torch.save`, memory-mapped if the format allows it.

torch's restricted reader (`weights_only`) accepts only torch's classes, but checkpoints of Megatron-LM contain objects
of others, such as arguments. `Placeholder` objects replace them, so that no code that a file names is imported or run.
"""

from __future__ import annotations

import json
import math
import pickle
import pickletools
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.config import ConfigError

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PLACEHOLDER_CLASSES = re.compile(
    r"argparse\.Namespace|numpy\.(?:_?core\.)[\w.]*|numpy\.(?:ndarray|dtype|random\.[\w.]*)"
    r"|(?:megatron|fp16|mpu|apex|signal|pathlib)\.[\w.]*|types\.SimpleNamespace"
)
"""Pattern of the class names in a pickle that a `Placeholder` replaces; all others except torch's are rejected."""
_TORCH_CLASSES = re.compile(r"(?:torch|collections|_codecs)\..*")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file, memory-mapped.

    The file contains the length of the header (8 bytes, little-endian), the header (JSON: dtype, shape and offsets by
    tensor name) and the data. Raises `ConfigError` for any other file.
    """
    try:
        data = np.memmap(path, dtype=np.uint8, mode="c")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "empty"
        raise ConfigError(reason, expected="a safetensors file", file=str(path)) from None
    try:
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:begin].tobytes())
        header.pop("__metadata__", None)
        return {
            name: _mapped_tensor(data[begin:], entry["dtype"], entry["shape"], *entry["data_offsets"])
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("damaged", says="must be a complete safetensors file", file=str(path)) from None


def _mapped_tensor(
    data: npt.NDArray[np.uint8], dtype: str, shape: Sequence[int], start: int, stop: int
) -> Tensor:
    kind = SAFETENSORS_DTYPES[dtype]
    raw = torch.from_numpy(data[start:stop])
    if start < 0 or raw.numel() != stop - start or raw.numel() != math.prod(shape) * kind.itemsize:
        raise ValueError(dtype)
    if raw.data_ptr() % kind.itemsize:
        raw = raw.clone()
    return raw.view(kind).view(*shape)


class Placeholder:
    """Substitute for an unpickled object whose class is not imported; it has the attributes of that object."""

    def __new__(cls, *_: Any, **__: Any) -> Placeholder:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


def read_torch_file(path: Path) -> Any:
    """Return the content of a file of `torch.save`; the tensors of files since torch 1.6 are memory-mapped.

    Raises `ConfigError` for a file that is damaged or names a class outside of `PLACEHOLDER_CLASSES` and torch.
    """
    names: dict[str, None] = {}
    try:
        is_zip = zipfile.is_zipfile(path)
        for name in _class_names(path, is_zip):
            names[name] = None
        replaced = filter(PLACEHOLDER_CLASSES.fullmatch, names)
        placeholders: list[Any] = [(Placeholder, name) for name in replaced]
        with torch.serialization.safe_globals(placeholders):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True if is_zip else None)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ConfigError(reason, expected="a file of model weights", file=str(path)) from None
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, IndexError, KeyError) as error:
        known = (PLACEHOLDER_CLASSES, _TORCH_CLASSES)
        refused = [name for name in names if not any(pattern.fullmatch(name) for pattern in known)]
        if not refused:
            says = f"must be a file of torch.save: {' '.join(str(error).split())[:200]}"
            raise ConfigError("not weights", says=says, file=str(path)) from None
        says = f"must contain only tensors and plain values; loading this file would call {refused[0]}"
        raise ConfigError("weights", says=says, file=str(path)) from None


def _class_names(path: Path, is_zip: bool) -> Iterator[str]:
    """Yield `module.name` of each class and function in the pickles of a file, without running the pickles."""
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            inner = next((n for n in archive.namelist() if n.rpartition("/")[2] == "data.pkl"), None)
            if inner is not None:
                with archive.open(inner) as file:
                    yield from _global_names(file)
        return
    with open(path, "rb") as file:
        for _ in range(4):  # old torch files have four pickles: magic number, version, machine, saved object
            yield from _global_names(file)


def _global_names(file: IO[bytes]) -> Iterator[str]:
    strings: list[str] = []
    for operation, argument, _ in pickletools.genops(file):
        if operation.name == "GLOBAL":
            yield str(argument).replace(" ", ".")
        elif operation.name == "STACK_GLOBAL" and len(strings) > 1:
            yield ".".join(strings[-2:])
        elif isinstance(argument, str):
            strings.append(argument)
