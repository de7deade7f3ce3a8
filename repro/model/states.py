"""Bytes of model states per device, mixed-precision Adam, in the ZeRO paper's symbols (sec. 3.1, 5)."""

from __future__ import annotations

K = 12
"""Optimizer bytes per parameter: fp32 master weight, momentum and variance (sec. 3.1)."""


def states_bytes(psi: int, nd: int, stage: int, k: int = K) -> float:
    """Bytes per device of `psi` fp16 parameters, their fp16 gradients and Adam's states.

    Stage 0: (4 + K) Psi;  1, P_os: 4 Psi + K Psi / Nd;  2, P_os+g: 2 Psi + (2 + K) Psi / Nd;
    3, P_os+g+p: (4 + K) Psi / Nd.  Shards are not padded here, as in the paper.
    """
    assert nd >= 1
    kept = {0: 4 + k, 1: 4, 2: 2, 3: 0}[stage]
    return psi * (kept + (4 + k - kept) / nd)
