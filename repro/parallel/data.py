"""Bucketed data parallelism: average gradients over replicas while the backward pass still runs.

When the last gradient of a bucket has been computed, the bucket is reduced.  Buckets are reduced in one
fixed order on all ranks, whatever order gradients come in, so under stages 0 to 2 ranks that use different
parameters cannot wait for different messages (under stage 3 all ranks must use the same modules).
Stages differ only in what a bucket keeps (see :mod:`repro.parallel.bucket`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from repro.parallel.bucket import Bucket
from repro.parallel.comm import Group, Work


class GradientReducer:
    """Collects gradients by hooks and reduces them bucket by bucket.

    Call :meth:`begin` before each micro-batch's forward and :meth:`finish` after its backward.
    """

    IN_FLIGHT = 2
    """Transient gradient buffers (stages 2 and 3) that may be under reduction at once."""

    def __init__(self, buckets: Sequence[Bucket], on_complete: Callable[[Bucket], None] | None = None):
        self.buckets = list(buckets)
        """In the order in which their gradients are expected, the last layers first."""
        self.on_complete = on_complete
        """Called when all gradients of a bucket have been computed (stage 3 frees its parameters)."""
        self._arrived = [[False] * len(bucket.parameters) for bucket in self.buckets]
        self._missing = [0] * len(self.buckets)
        self._next = 0
        self._works: deque[Work] = deque()
        self._first = self._last = True
        for b, bucket in enumerate(self.buckets):
            for s, parameter in enumerate(bucket.parameters):
                if getattr(parameter, "used_once", False):
                    vars(parameter)["gradient_sink"] = self._sink(b, s)
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(b, s))
            for b, bucket in enumerate(self.buckets)
            for s, parameter in enumerate(bucket.parameters)
        ]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                vars(parameter).pop("gradient_sink", None)

    def begin(self, micro_batch: int, micro_batches: int) -> None:
        """Prepare for the backward pass of one of the step's micro-batches."""
        self._first, self._last = micro_batch == 0, micro_batch == micro_batches - 1
        self._next = 0
        for b, bucket in enumerate(self.buckets):
            self._arrived[b] = [False] * len(bucket.parameters)
            self._missing[b] = len(bucket.parameters)

    def finish(self) -> None:
        """Reduce what is left and wait for everything; a parameter without a gradient counts as having a zero one."""
        for b, bucket in enumerate(self.buckets):
            if self._missing[b]:
                self._fill_missing(b, bucket)
        self._launch_ready()
        while self._works:
            self._works.popleft().wait()

    def _hook(self, b: int, s: int) -> Callable[[Parameter], None]:
        bucket = self.buckets[b]

        def collect(parameter: Parameter) -> None:
            gradient = parameter.grad
            if gradient is None:  # it went into the sink, or autograd found that it is zero
                return
            parameter.grad = None
            if self._arrived[b][s]:
                raise RuntimeError(
                    "a parameter got a second gradient in one backward pass (reentrant checkpointing of a "
                    "shared module?); use checkpoint(..., use_reentrant=False)"
                )
            self._store(bucket, s, gradient)
            self._arrive(b, s)

        return collect

    def _sink(self, b: int, s: int) -> Callable[[Tensor, Tensor], None]:
        bucket = self.buckets[b]

        def add_product(rows: Tensor, x: Tensor) -> None:
            """Gradient += rows^T x / n, for rows [N, o] and x [N, i]."""
            view = bucket.gradient_view(s).view(rows.shape[1], x.shape[1])
            beta = 0 if self._first or bucket.stage >= 2 else 1
            torch.addmm(view, rows.t(), x, beta=beta, alpha=1 / bucket.group.size, out=view)
            self._arrive(b, s)

        return add_product

    def _arrive(self, b: int, s: int) -> None:
        """The gradient of slot ``s`` is in its place."""
        bucket = self.buckets[b]
        self._arrived[b][s] = True
        self._missing[b] -= 1
        if not self._missing[b]:
            if self.on_complete is not None:
                self.on_complete(bucket)
            if b == self._next:
                self._launch_ready()

    def _store(self, bucket: Bucket, slot: int, gradient: Tensor) -> None:
        # The sum over n replicas becomes the mean by dividing here, where the gradient is copied anyway.
        view = bucket.gradient_view(slot).view(gradient.shape)
        if not self._first and bucket.stage < 2:
            view.add_(gradient, alpha=1 / bucket.group.size)
        elif bucket.group.size > 1:
            torch.mul(gradient, 1 / bucket.group.size, out=view)
        else:
            view.copy_(gradient)

    def _fill_missing(self, b: int, bucket: Bucket) -> None:
        if self._first or bucket.stage >= 2:
            for s, arrived in enumerate(self._arrived[b]):
                if not arrived:
                    bucket.gradient_view(s).zero_()
        self._missing[b] = 0
        if self.on_complete is not None:
            self.on_complete(bucket)

    def _launch_ready(self) -> None:
        while self._next < len(self.buckets) and not self._missing[self._next]:
            bucket = self.buckets[self._next]
            self._next += 1
            if bucket.stage < 2 and not self._last:
                continue
            while bucket.stage >= 2 and len(self._works) >= self.IN_FLIGHT:
                self._works.popleft().wait()
            self._works.append(bucket.reduce(add=not self._first))


def broadcast_parameters(tensors: Sequence[Tensor], group: Group) -> None:
    """Give every replica the values of the group's rank 0 (parameters and buffers, before they are sharded)."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                group.broadcast(tensor, 0, purpose="initial values").wait()
