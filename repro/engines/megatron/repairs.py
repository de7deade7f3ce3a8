"""What is wrong in megatron-core 0.16, has been put right since, and is put right here, on every device.

An interleaved schedule frees an output (`deallocate_pipeline_outputs`) before its sending has been waited for, so that
the next stage may receive something else (pull request 4047 of NVIDIA/Megatron-LM waits).  Here an alias is sent,
which keeps the memory for as long as the message is under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.pipeline_parallel import p2p_communication
from torch import Tensor

from repro.engines.megatron.exchange import Place


def replacements() -> dict[Place, Any]:
    """What is exchanged, by its place."""
    return {(p2p_communication, "_p2p_ops"): _sending_aliases(p2p_communication._p2p_ops)}


def _sending_aliases(send: Callable[..., Any]) -> Callable[..., Any]:
    def sent(*, tensor_send_prev: Tensor | None, tensor_send_next: Tensor | None, **others: Any) -> Any:
        to_prev = None if tensor_send_prev is None else tensor_send_prev.detach()
        to_next = None if tensor_send_next is None else tensor_send_next.detach()
        return send(tensor_send_prev=to_prev, tensor_send_next=to_next, **others)

    return sent
