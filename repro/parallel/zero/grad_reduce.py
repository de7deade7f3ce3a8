"""Bucketed data parallelism: average gradients over replicas during the backward pass.

A bucket is reduced when all its gradients have been computed, in a fixed order of buckets, so that ranks that use
different parameters cannot deadlock.  Under stage 3 the backward schedule determines when a bucket is complete
(`repro.parallel.zero.unshard`), and all ranks must use the same modules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from weakref import ref

import torch
from torch import Tensor
from torch.nn import Parameter

from repro.config.enums import Category
from repro.parallel import storage
from repro.parallel.comm import Group, Work
from repro.parallel.zero.flat_buffer import Bucket, add_product_
from repro.parallel.zero.flat_parameters import Sharding
from repro.parallel.zero_r.defragmentation import Arena

_UNFINISHED: list[Work] = []
"""Gradient collectives that were running when a backward pass failed and their `GradientReducer` was freed.

They are retained, because gloo closes a connection on which a message arrives for freed memory, and all later
collectives of the group then fail.
"""


class GradientReducer:
    """Collect gradients by autograd hooks, and reduce them over the data-parallel ranks bucket by bucket.

    Call `begin` before each micro-batch's backward, `finish` after it, and `wait` before the gradients are used.
    The last reductions overlap with the work between `finish` and `wait`.
    """

    IN_FLIGHT = 2
    """Maximum number of buckets under reduction at once in stages 1 to 3, if a reduction needs additional memory."""

    def __init__(self, buckets: Sequence[Bucket], sharding: Sharding):
        """Install the gradient hooks of all parameters in `buckets`.

        Without overlap, stages 0 and 1 reduce gradients in the `wait` at the end of a step. Stages 2 and 3 wait for
        each bucket's reduction before the backward pass continues.
        """
        self.overlap = sharding.overlap
        self.buckets = list(buckets)
        """Buckets in the order in which backward computes their gradients, the last layers first."""
        self.by_arrival = sharding.stage < 3
        """Whether a bucket is complete once its parameters have gradients (stages 0 to 2), not at a call of `close`."""
        self._index = {id(bucket): b for b, bucket in enumerate(self.buckets)}
        self._arrived = [[False] * len(bucket.parameters) for bucket in self.buckets]
        self._missing = [0] * len(self.buckets)
        self._closed = [False] * len(self.buckets)
        self._held = [False] * len(self.buckets)
        self._next = 0
        self._works: deque[Work] = deque()
        self._first = self._last = True
        self._reduced = False
        """Whether the gradients accumulated in this step have been reduced (stages 0 and 1)."""
        self.on_gradient: Callable[[], None] = lambda: None
        """Function called for every gradient that autograd has computed."""
        if sharding.contiguous:
            self._set_aside()
        for b, bucket in enumerate(self.buckets):
            for s, parameter in enumerate(bucket.parameters):
                if sharding.adds_in_products and getattr(parameter, "used_once", False):
                    vars(parameter)["gradient_sink"] = self._sink(b, s)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                # The parameters refer to the reducer, so that it exists as long as they do.
                vars(parameter)["reducer"] = self
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(b, s))
            for b, bucket in enumerate(self.buckets)
            for s, parameter in enumerate(bucket.parameters)
        ]

    def __del__(self) -> None:
        _UNFINISHED.extend(getattr(self, "_works", ()))

    def remove(self) -> None:
        """Remove the gradient hooks of this reducer from the parameters."""
        for handle in self._handles:
            handle.remove()
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                vars(parameter).pop("gradient_sink", None)
                vars(parameter).pop("reducer", None)

    def _set_aside(self) -> None:
        """Allocate the memory of full gradients once, as a pool of the largest buckets' sizes (1910.02054 sec. 6.3).

        The pool has memory for the buckets under reduction, the bucket that collects gradients, and the tied
        embedding's bucket. The latter collects gradients from the output layer's backward to the embedding's.
        """
        by_dtype: dict[torch.dtype, list[Bucket]] = {}
        for bucket in self.buckets:
            if bucket.stage >= 2:
                by_dtype.setdefault(bucket.grad_dtype, []).append(bucket)
        for same in by_dtype.values():
            sizes = sorted((bucket.plan.padded for bucket in same), reverse=True)[: self.IN_FLIGHT + 2]
            memory = storage.empty(sum(sizes), same[0].gradient_shard, Category.GRADIENTS)
            pool = Arena(memory, sizes)
            for bucket in same:
                bucket.pool = pool

    def begin(self, micro_batch: int, micro_batches: int) -> None:
        """Prepare the gradient buckets for the backward pass of a micro-batch; wait for earlier reductions.

        Further micro-batches after `micro_batches` are allowed: their gradients are reduced one by one.
        """
        self.wait()
        self._first, self._last = micro_batch == 0, micro_batch >= micro_batches - 1
        if self._reduced and not self._first:
            for bucket in self.buckets:
                bucket.unreduce()
        self._reduced = False
        self._next = 0
        for b, bucket in enumerate(self.buckets):
            self._arrived[b] = [False] * len(bucket.parameters)
            self._missing[b] = len(bucket.parameters)
            self._closed[b] = False

    @property
    def only_adds(self) -> bool:
        """Return whether the backward pass only adds gradients to those of earlier micro-batches, and reduces none."""
        return not self._first and not self._last and all(bucket.stage < 2 for bucket in self.buckets)

    def hold(self, bucket: Bucket) -> None:
        """Defer the reduction of `bucket` to `finish`. Its parameters may get several gradients in a backward pass."""
        self._held[self._index[id(bucket)]] = True

    def close(self, bucket: Bucket) -> None:
        """Record that `bucket` gets no more gradients in this backward pass; missing gradients count as zero."""
        self._close(self._index[id(bucket)])

    def finish(self) -> None:
        """End a backward pass, and start the remaining gradient reductions; without overlap, `wait` may start them."""
        for b in range(len(self.buckets)):
            self._close(b)
            self._held[b] = False

    def reduce_early(self) -> None:
        """Reduce the accumulated gradients when a step ends before the last micro-batch that `begin` expects."""
        if self._reduced or self.buckets[0].stage >= 2:
            return
        self._last = True
        for bucket in self.buckets:
            self._launch(bucket)
        self._await_all()

    def missing(self) -> set[int]:
        """Return the indices of the parameters without a gradient in the last backward pass."""
        return {
            slot.index
            for b, bucket in enumerate(self.buckets)
            if self._missing[b]
            for slot, arrived in zip(bucket.plan.slots, self._arrived[b], strict=True)
            if not arrived
        }

    def wait(self) -> None:
        """Wait until every complete bucket is reduced. Without overlap, stages 0 and 1 start their reductions here."""
        self._launch_closed()
        self._await_all()

    def _await_all(self) -> None:
        while self._works:
            self._works.popleft().wait()

    def _hook(self, b: int, s: int) -> Callable[[Parameter], None]:
        """Return the gradient hook of the parameter in slot `s` of bucket `b`.

        torch holds hooks in an object that the garbage collector does not traverse. If the hook referred to the
        reducer, and so to the hook's parameter, the reference cycle would never be freed.
        """
        reducer = ref(self)

        def collect(parameter: Parameter) -> None:
            found = reducer()
            if found is not None:
                found._collect(b, s, parameter)

        return collect

    def _collect(self, b: int, s: int, parameter: Parameter) -> None:
        """Move a gradient that autograd computed from `parameter.grad` to the parameter's bucket."""
        gradient = parameter.grad
        # Without `parameter.grad`, the gradient is zero, or the backward pass has written it to the bucket.
        if gradient is None:
            return
        parameter.grad = None
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"The sparse gradient of a parameter {list(parameter.shape)} is not supported. Set sparse=False."
            )
        self.on_gradient()
        # The copy to the bucket also divides the gradient by the number of replicas, at no additional cost.
        bucket = self.buckets[b]
        add = self._adds(b, s)
        view, size = self._view(bucket, s), bucket.group.size

        def write() -> None:
            # Set an fp32 gradient to zero and add the 16-bit gradient, as Megatron-LM does with `main_grad`.
            converts = view.dtype != gradient.dtype
            if converts and not add:
                view.zero_()
            if add or converts:
                view.add_(gradient, alpha=1 / size)
            elif size > 1:
                torch.mul(gradient, 1 / size, out=view)
            else:
                view.copy_(gradient)

        storage.call_once(view, ("gradient", view.shape, view.dtype, gradient.dtype, add, size > 1), write)
        self._arrive(b, s)

    def _sink(self, b: int, s: int) -> Callable[[Tensor, Tensor], None]:
        def add_product(rows: Tensor, x: Tensor) -> None:
            """Add rows^T x / n to a weight gradient in its bucket, for rows [N, o], x [N, i] and n replicas."""
            bucket = self.buckets[b]
            add = self._adds(b, s)
            view = self._view(bucket, s)

            def write() -> None:
                sums = view.view(rows.shape[1], x.shape[1])
                add_product_(sums, rows.t(), x, int(add), 1 / bucket.group.size)

            storage.call_once(view, ("product", view.dtype, rows.shape, x.shape, x.dtype, add), write)
            self._arrive(b, s)

        return add_product

    def _view(self, bucket: Bucket, s: int) -> Tensor:
        """Return the memory for the gradient of a bucket's parameter `s`; allocate the bucket's gradients if needed."""
        pool, size = bucket.pool, bucket.plan.padded
        if pool is not None and bucket.gradients is None:
            while self._works and not pool.fits(size):
                self._works.popleft().wait()
            if not pool.fits(size):
                # More buckets collect gradients at one time than the memory pool was planned for.
                pool.grow(size)
        return bucket.gradient_view(s)

    def _adds(self, b: int, s: int) -> bool:
        """Return whether a new gradient of parameter `s` in bucket `b` is added to an existing gradient.

        Reentrant checkpointing produces a separate gradient for every use of a parameter. Raises `RuntimeError` if the
        bucket has been reduced already, without the new gradient.
        """
        bucket = self.buckets[b]
        if b < self._next and (bucket.stage >= 2 or self._last):
            raise RuntimeError(
                "A gradient after the reduction of its bucket is not supported. Use checkpoint(use_reentrant=False) "
                "for modules that share a parameter, or sum the losses for one backward pass."
            )
        return self._arrived[b][s] or (bucket.stage < 2 and not self._first)

    def _arrive(self, b: int, s: int) -> None:
        """Record that parameter `s` of bucket `b` has its gradient, and close the bucket if all its gradients exist."""
        if not self._arrived[b][s]:
            self._arrived[b][s] = True
            self._missing[b] -= 1
        if self.by_arrival and not self._missing[b] and not self._held[b]:
            self._close(b)

    def _close(self, b: int) -> None:
        if self._closed[b]:
            return
        self._closed[b] = True
        bucket = self.buckets[b]
        if self._missing[b] and (self._first or bucket.stage >= 2):
            for s, arrived in enumerate(self._arrived[b]):
                if not arrived:
                    self._view(bucket, s).zero_()
        if self.overlap or bucket.stage >= 2:
            self._launch_closed()

    def _launch_closed(self) -> None:
        """Start to reduce the buckets that have all their gradients and are next in the fixed order of buckets."""
        while self._next < len(self.buckets) and self._closed[self._next]:
            self._launch(self.buckets[self._next])
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        if bucket.stage < 2 and not self._last:
            return
        limited = bucket.stage >= 1 and not bucket.reduces_in_place
        while limited and len(self._works) >= self.IN_FLIGHT:
            self._works.popleft().wait()
        self._reduced = bucket.stage < 2
        self._works.append(bucket.reduce(add=not self._first))
        if not self.overlap and bucket.stage >= 2:
            self._await_all()


def broadcast_parameters(tensors: Sequence[Tensor], group: Group) -> None:
    """Broadcast parameters and buffers from the group's rank 0 to every replica, before they are sharded."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                group.broadcast(tensor, 0, purpose="initial values").wait()
