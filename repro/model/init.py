"""Initial weights, element by element: a value depends on the seed, the parameter and the element alone.

So a rank makes exactly the elements that it owns, under every layout the same (1910.02054 has no word on
this; 1909.08053 sec. 4.1 gives N(0, 0.02), scaled by 1/sqrt(2 layers) before residual additions).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from repro import kernels
from repro.parallel.zero.flat_parameters import InitialValues

STANDARD_DEVIATION = 0.02


def full_index(
    start: int,
    stop: int,
    shape: Sequence[int],
    split: int | None,
    rank: int,
    ranks: int,
    device: torch.device,
) -> Tensor:
    """Flat indices, in the full parameter, of elements start..stop of one tp rank's part (`shape`)."""
    local = torch.arange(start, stop, dtype=torch.int64, device=device)
    if split is None or ranks == 1:
        return local
    inner = math.prod(shape[split + 1 :])
    part = shape[split] * inner
    outer = torch.div(local, part, rounding_mode="floor")
    return local + outer * (part * (ranks - 1)) + rank * part


def initial_values(
    names: Sequence[str],
    parameters: Sequence[Parameter],
    *,
    seed: int,
    layers: int,
    rank: int,
    ranks: int,
    device: torch.device,
) -> InitialValues:
    """Values of the parameters of one tp rank, fp32, made on demand.

    `rank` of `ranks` is the place in the tp group; parameters carry `init` and `split`.
    """
    shapes = [tuple(p.shape) for p in parameters]
    kinds = [p.init for p in parameters]  # type: ignore[attr-defined]
    splits: list[int | None] = [vars(p)["split"] for p in parameters]
    keys = [kernels.derive_key(seed, zlib.crc32(name.encode())) for name in names]

    def values(i: int, start: int, stop: int) -> Tensor:
        if device.type == "meta":  # shapes only: no arithmetic on numbers that are not there
            return torch.empty(stop - start, device=device)
        if kinds[i] in ("zeros", "ones"):
            return torch.full((stop - start,), float(kinds[i] == "ones"), device=device)
        index = full_index(start, stop, shapes[i], splits[i], rank, ranks, device)
        deviation = STANDARD_DEVIATION / (math.sqrt(2 * layers) if kinds[i] == "residual" else 1.0)
        return kernels.normal_at(index, keys[i]).mul_(deviation)

    return values
