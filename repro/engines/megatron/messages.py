"""What is sent to another stage stays in memory until it has been.

Interleaved schedules of megatron-core 0.16 free an output (`deallocate_pipeline_outputs`) before its sending has been
waited for, so that the next stage may receive something else (pull request 4047 of NVIDIA/Megatron-LM waits).  Here, on
every device, an alias is sent, which keeps the memory for as long as the message is under way.
"""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel import p2p_communication
from torch import Tensor

from repro.engines.megatron.exchange import Place


def replacements() -> dict[Place, Any]:
    """What is exchanged, by its place."""
    send = p2p_communication._p2p_ops

    def sent(*, tensor_send_prev: Tensor | None, tensor_send_next: Tensor | None, **others: Any) -> Any:
        to_prev, to_next = _alias(tensor_send_prev), _alias(tensor_send_next)
        return send(tensor_send_prev=to_prev, tensor_send_next=to_next, **others)

    return {(p2p_communication, "_p2p_ops"): sent}


def _alias(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
