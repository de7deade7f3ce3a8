"""Micro-batches as CUDA graphs: the host launches a forward or a backward pass as one captured graph.

For a small micro-batch the host launches operators more slowly than a GPU computes them, so each pass is captured once
and replayed. The first micro-batch of a step writes gradients, the others add to gradients, and the last one also
reduces gradients. Each of these kinds of micro-batches therefore has a pair of graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from repro.config.enums import Phase
from repro.engines.native.model_part import MicroBatch, ModelPart
from repro.parallel.pipeline.runner import Observer

EAGER_STEPS = 1
"""Number of initial steps without CUDA graphs, in which libraries load kernels and allocate workspaces."""


class _CapturedPasses(NamedTuple):
    """CUDA graphs of the forward and backward pass of one kind of micro-batch: first, middle or last of a step."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    loss: Tensor
    """Mean loss of the micro-batch, 0-dim fp32, which the forward graph writes."""


class CapturedMicroBatches:
    """Micro-batches of a rank without pipeline stages, whose passes are captured and replayed as CUDA graphs."""

    def __init__(self, part: ModelPart, micro_batches: int, scale: Tensor | None):
        """Prepare CUDA graphs of `micro_batches` micro-batches per step. `scale`: 0-dim loss scale."""
        self._part, self._count, self._scale = part, micro_batches, scale
        self._passes: dict[tuple[bool, bool], _CapturedPasses] = {}
        """CUDA graphs by (whether the micro-batch is the first of a step, whether it is the last)."""
        self._inputs: MicroBatch | None = None
        """Micro-batch with static memory, from which the CUDA graphs read tokens, targets and dropout keys; None before
        capture."""
        self._pool: Any = None
        self._steps = 0

    def begin_step(self) -> bool:
        """Count a training step, and return whether it runs as CUDA graphs (captured or replayed)."""
        self._steps += 1
        return self._steps > EAGER_STEPS

    def run(self, batches: Sequence[MicroBatch], observe: Observer) -> Tensor:
        """Run forward and backward of the step's micro-batches; return the mean loss (0-dim fp32)."""
        self._part.sharded.wait()
        total = torch.zeros((), dtype=torch.float32, device=batches[0].tokens.device)
        for i, batch in enumerate(batches):
            observe(Phase.FORWARD)
            passes = self._load(batch, i)
            passes.forward.replay()
            total += passes.loss
            observe(Phase.BACKWARD)
            passes.backward.replay()
        return total / self._count

    def _load(self, batch: MicroBatch, i: int) -> _CapturedPasses:
        """Copy micro-batch number `i` of a step to the memory that the CUDA graphs read, and return its graphs."""
        inputs = self._inputs
        if inputs is None:
            inputs = self._inputs = self._static_copy(batch)
        inputs.tokens.copy_(batch.tokens)
        inputs.targets.copy_(batch.targets)
        if inputs.place.keys is not None:
            # CUDA stages pageable host memory, so the host may free the dropout keys when `copy_` returns.
            inputs.place.keys.copy_(self._part.model.setting.dropout_keys(batch.place), non_blocking=True)
        kind = (i == 0, i == self._count - 1)
        if kind not in self._passes:
            self._passes[kind] = self._capture(inputs, i)
        return self._passes[kind]

    def _static_copy(self, batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch in new memory with the shapes of `batch`, and dropout keys if there is dropout."""
        setting, keys = self._part.model.setting, None
        if setting.dropout or setting.attention_dropout:
            keys = setting.dropout_keys(batch.place).to(batch.tokens.device)
        place = replace(batch.place, keys=keys)
        return MicroBatch(torch.empty_like(batch.tokens), torch.empty_like(batch.targets), place)

    def _capture(self, inputs: MicroBatch, i: int) -> _CapturedPasses:
        """Capture forward and backward of micro-batch `i` of a step as CUDA graphs, without running the graphs."""
        part = self._part
        part.micro_batches = [inputs]
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, pool=self._pool, capture_error_mode="thread_local"):
            loss = part.forward(0, None)
            scaled = loss / self._count if self._count > 1 else loss
            scaled = scaled if self._scale is None else scaled * self._scale
        self._pool = forward.pool()
        part.before_backward(i, self._count)
        with torch.cuda.graph(backward, pool=self._pool, capture_error_mode="thread_local"):
            scaled.backward()
            part.after_backward()
            part.finish()
        return _CapturedPasses(forward, backward, loss.detach())
