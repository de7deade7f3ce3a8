"""Files in the format of safetensors: read by mapping, written tensor by tensor.

8 bytes little-endian with the length of the header, the header (JSON: name to dtype, shape, offsets), the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from repro.config import ConfigError

DTYPES = {
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


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, mapped: what nobody touches is not read.  Raises `ConfigError` if it is none."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="c")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "empty"
        raise ConfigError(reason, expected="a file of safetensors", file=str(path)) from None
    try:
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:begin].tobytes())
        header.pop("__metadata__", None)
        return {
            name: _tensor(data[begin:], entry["dtype"], entry["shape"], *entry["data_offsets"])
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError("not whole", says="needs a file of safetensors", file=str(path)) from None


def _tensor(data: npt.NDArray[np.uint8], dtype: str, shape: Sequence[int], start: int, stop: int) -> Tensor:
    kind = DTYPES[dtype]
    raw = torch.from_numpy(data[start:stop])
    if start < 0 or raw.numel() != stop - start or raw.numel() != math.prod(shape) * kind.itemsize:
        raise ValueError(dtype)
    if raw.data_ptr() % kind.itemsize:
        raw = raw.clone()
    return raw.view(kind).view(*shape)


def write(path: Path, shapes: Mapping[str, Sequence[int]], pieces: Callable[[str], Iterable[Tensor]]) -> None:
    """Write fp32 tensors of these `shapes`; `pieces` gives what one of them consists of, flat, piece by piece."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        stop = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            for piece in pieces(name):
                assert piece.dtype == torch.float32
                file.write(memoryview(piece.contiguous().numpy().data).cast("B"))
