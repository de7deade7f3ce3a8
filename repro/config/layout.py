"""Layout of one training step: parallel degrees, batches, ZeRO stage and memory options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, permutations
from typing import Any

from repro.config import sizes
from repro.config.enums import OperatorSet
from repro.config.errors import require
from repro.config.sizes import at_most

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Size of a tensor element in bytes, by data type."""
PRECISIONS = tuple(ELEMENT_BYTES)
GRAD_DTYPES = ("precision", "fp32")
ZERO1_REDUCE = ("reduce-scatter", "all-reduce")
ZERO3_GATHER = ("block", "parameter")
SCHEDULES = ("gpipe", "1f1b", "interleaved")
SELECTIVE = "selective"
"""Value of the layout key `recompute` with which the backward pass recomputes only the core of attention."""
RECOMPUTE_WORDS = {"none": False, "block": True, SELECTIVE: SELECTIVE}
"""Values of `recompute` by command-line word, such as true for `block`; files and records contain the values."""
ORDERS = tuple("-".join(axes) for axes in permutations(("tp", "dp", "pp")))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Distribution of a training step over `world = tp * cp * pp * dp` ranks, with a ZeRO stage over dp x cp."""

    dp: int = 1
    """Data-parallel degree, the ZeRO paper's Nd."""
    tp: int = 1
    """Tensor-parallel (Megatron) degree, the ZeRO paper's Nm, Megatron's t."""
    pp: int = 1
    """Pipeline-parallel degree, Megatron's p: the number of stages."""
    cp: int = 1
    """Context-parallel degree: ranks that share the tokens of each sample (2407.21783 sec. 3.3.2).  Attention gathers
    all keys and values; other operators process s/cp tokens.  Gradients are averaged over dp x cp, and ZeRO splits
    model states over dp x cp."""
    schedule: str = "1f1b"
    """Pipeline schedule: `gpipe`, `1f1b` (with flush) or `interleaved` (2104.04473 sec. 2.2)."""
    chunks: int = 1
    """Number of model chunks per stage under `interleaved`, Megatron's v."""
    stage_layers: tuple[int, ...] = ()
    """Number of layers in each of the pp * chunks parts of the model, in order; empty for equal numbers. The number may
    be 0 in the first part, which has the embedding, and in the last, which has the logits (2407.21783 sec. 3.3.2)."""
    scatter_gather: bool = False
    """Each tp rank sends 1/tp of the tensor to the next stage, which all-gathers the parts (2104.04473 sec. 4.1)."""
    order: str = "tp-dp-pp"
    """Order in which ranks are assigned to parallelism axes: ranks of the first axis are consecutive. cp follows tp."""
    zero: int = 0
    """ZeRO stage: 0 plain data parallelism, 1 P_os, 2 P_os+g, 3 P_os+g+p (1910.02054 sec. 5)."""
    zero1_reduce: str = "reduce-scatter"
    """Collective with which ZeRO stage 1 sums gradients: `reduce-scatter`, or `all-reduce` as in DeepSpeed's release of
    February 2020. With the following all-gather of parameters, the all-reduce variant sends 1.5x the bytes."""
    zero3_gather: str = "block"
    """Unit that ZeRO stage 3 gathers: a `block` while the preceding block computes, or a `parameter` as DeepSpeed of
    March 2021. With `parameter`, gathers do not overlap with compute. A gather sends and receives a list of the ranks'
    parts, for which the host makes views and copies. The host waits for the device before and after each gather.
    Parameters of fewer than 100,000 elements stay gathered until the optimizer's step. A recomputed layer gathers a
    parameter again for backward if 1e9 elements of other parameters are used between forward and backward."""
    sp: bool = False
    """Megatron sequence parallelism: norms and dropouts process s/tp tokens per rank; needs tp > 1."""
    micro_batch: int = 1
    """Micro-batch size: number of samples in one forward and backward pass of a replica."""
    global_batch: int = 0
    """Global batch size: number of samples in one optimizer step over all replicas. 0 means micro_batch * dp."""
    recompute: bool | str = False
    """Activation recomputation: `none` (false), `block` (true; one checkpoint per block) or `selective`. Megatron-LM
    calls `block` full, uniform, of one layer. `selective` recomputes only the core of attention (scores, softmax, its
    dropout and the product with the values) in backward (2205.05198 sec. 5)."""
    pa: bool = False
    """P_a: each tp rank retains 1/tp of every activation checkpoint (1910.02054 sec. 6.1)."""
    pa_cpu: bool = False
    """P_a+cpu: activation checkpoints are stored in host memory (1910.02054 sec. 6.1)."""
    cb: bool = True
    """C_B: fused communication uses buffers of constant size (1910.02054 sec. 6.2).  Without C_B, all gradients are
    copied to one fp32 buffer of 4 Psi bytes for their reduction."""
    md: bool = False
    """M_D: activation checkpoints and transient gradients use memory that is allocated once (1910.02054 sec. 6.3)."""
    offload_optimizer: bool = False
    """Optimizer states are stored and updated in host memory (ZeRO-Offload, 2101.06840), with DeepSpeed only."""
    precision: str = "fp32"
    """Training precision: fp32, bf16 with fp32 master weights, or fp16 with these weights and dynamic loss scaling."""
    grad_dtype: str = "precision"
    """Data type in which gradients are accumulated and reduced: that of `precision`, or `fp32` in 16-bit training.
    With `fp32`, each backward pass adds its 16-bit gradients to an fp32 buffer and frees them, as Megatron-LM's
    `main_grad` (`accumulate_allreduce_grads_in_fp32`).  Gradients and their messages then have 4 bytes per parameter.
    Matrix products of `kernels = "megatron-2025"` add to the buffer directly."""
    bucket_bytes: int = 25_000_000
    """Size of one gradient bucket in bytes (ZeRO stages 0 to 2). Stage 3 reduces one block at a time."""
    gradient_as_bucket_view: bool = True
    """Gradients are views of the buckets that are reduced. If false, buckets are copies of the gradients, which take 2
    Psi more bytes in 16-bit training, as in torch's DistributedDataParallel by default."""
    kernels: OperatorSet = OperatorSet.FUSED
    """Set of operators that compute a transformer layer, the loss and the optimizer."""
    tp_overlap: bool = True
    """Weight gradients are computed during the all-reduce of input gradients over tp.  If false, as in Megatron-LM
    until 2021, compute waits for every collective of tensor parallelism.  No effect with tp = 1."""
    overlap: bool = True
    """Data-parallel communication overlaps with computation.  If false, as in Megatron-LM's own data parallelism of
    2019 and DeepSpeed of February 2020, stages 0 and 1 reduce gradients after the step's last backward pass.  Stage 2,
    which does not retain all gradients, waits for the reduction of each bucket (DeepSpeed's `overlap_comm = false`).
    Updated parameters (stages 1 and 2) are complete before the next step begins.  Pipeline stages send and receive in
    batches and compute nothing meanwhile, as Megatron-LM of 2021."""
    cuda_graphs: bool = False
    """Engine `native` captures the forward and backward passes of a micro-batch in CUDA graphs, which the host launches
    at once. If it cannot capture them, the record contains the reason."""
    gather_overlap: bool = True
    """ZeRO stages 1 and 2 gather updated parameters during the next forward pass. If false, as in DeepSpeed, the
    parameters are complete before the next step begins. `overlap = false` implies false."""

    def __new__(cls, *arguments: Any, **settings: Any) -> Layout:
        require(not arguments, "layout", arguments, "keyword arguments, such as Layout(dp=2, zero=3)")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage_layers", tuple(self.stage_layers))
        object.__setattr__(self, "recompute", RECOMPUTE_WORDS.get(str(self.recompute), self.recompute))
        counts = ("dp", "tp", "pp", "cp", "chunks", "micro_batch", "bucket_bytes")
        sizes.at_least(self, counts, 1, sizes.POSITIVE_COUNT)
        for key, known in (
            ("precision", PRECISIONS),
            ("grad_dtype", GRAD_DTYPES),
            ("zero1_reduce", ZERO1_REDUCE),
            ("zero3_gather", ZERO3_GATHER),
            ("schedule", SCHEDULES),
            ("order", ORDERS),
            ("kernels", tuple(OperatorSet)),
            ("recompute", (False, True, *RECOMPUTE_WORDS)),
        ):
            words = ", ".join(str(word).lower() for word in known)
            require(getattr(self, key) in known, key, getattr(self, key), f"one of {words}")
        object.__setattr__(self, "kernels", OperatorSet(self.kernels))
        require(
            self.grad_dtype == "precision" or self.precision != "fp32",
            "grad_dtype",
            self.grad_dtype,
            says="needs precision = bf16 or fp16; with fp32, gradients are fp32 in any case",
        )
        require(
            not self.sp or self.tp > 1, "sp", self.sp, says="needs tp > 1: sp splits a sequence over tp ranks"
        )
        self._check_batches()
        self._check_zero()
        self._check_pipeline()
        self._check_checkpoints()
        right = f"1 with kernels = {self.kernels}, which do not support context parallelism"
        require(self.cp == 1 or not self.kernels.writes_scores, "cp", self.cp, right)
        self._check_sizes()

    def _check_batches(self) -> None:
        require(self.global_batch >= 0, "global_batch", self.global_batch, "0 (= micro_batch * dp) or more")
        per_pass = self.dp * self.micro_batch
        if self.global_batch == 0:
            object.__setattr__(self, "global_batch", per_pass)
        right = f"a multiple of dp * micro_batch = {self.dp} * {self.micro_batch} = {per_pass}"
        require(self.global_batch % per_pass == 0, "global_batch", self.global_batch, right)

    def _check_zero(self) -> None:
        require(self.zero in (0, 1, 2, 3), "zero", self.zero, "a ZeRO stage: 0, 1, 2 or 3")
        require(
            self.zero1_reduce == "reduce-scatter" or self.zero == 1,
            "zero1_reduce",
            self.zero1_reduce,
            says=f"needs zero = 1, the only stage with a choice of this collective (here zero = {self.zero})",
        )
        says = f"needs zero = 3, the only stage that partitions parameters (here zero = {self.zero})"
        require(self.zero3_gather == "block" or self.zero == 3, "zero3_gather", self.zero3_gather, says=says)
        require(
            self.gradient_as_bucket_view or (self.zero == 0 and self.copies > 1),
            "gradient_as_bucket_view",
            self.gradient_as_bucket_view,
            f"true unless zero = 0 and dp > 1 (here zero = {self.zero}, dp = {self.dp})",
        )
        require(
            self.zero < 3 or self.pp == 1,
            "zero",
            self.zero,
            f"0, 1 or 2 with pp = {self.pp}, since stage 3 would gather all parameters twice per micro-batch",
        )
        require(
            self.zero < 3 or self.schedule != "gpipe" or self.accumulation == 1,
            "schedule",
            self.schedule,
            "1f1b with zero = 3, because stage 3 runs each micro-batch's backward pass directly after its forward pass",
        )
        for key, reason in (
            ("cb", "stage 3 communicates one block at a time and has no fused buffer"),
            ("overlap", "stage 3 gathers the parameters of a block while the preceding block computes"),
        ):
            value = getattr(self, key)
            require(value or self.zero < 3, key, value, f"true with zero = 3: {reason}")
        require(self.cb or self.copies > 1, "cb", self.cb, "true with dp = 1, which reduces no gradients")

    def _check_pipeline(self) -> None:
        parts = self.pp * self.chunks
        interleaved = self.schedule == "interleaved"
        require(
            (self.chunks > 1) == interleaved,
            "chunks",
            self.chunks,
            "at least 2 with schedule = interleaved" if interleaved else "1 unless schedule = interleaved",
        )
        says = "needs pp > 1: one stage has no pipeline to interleave"
        require(not interleaved or self.pp > 1, "schedule", self.schedule, says=says)
        require(
            not interleaved or self.accumulation % self.pp == 0,
            "global_batch",
            self.global_batch,
            says=f"needs micro-batches in multiples of pp = {self.pp} with schedule = interleaved "
            f"(here global_batch / dp / micro_batch = {self.accumulation})",
        )
        right = f"one number of layers for each of pp * chunks = {parts} parts"
        require(len(self.stage_layers) in (0, parts), "stage_layers", list(self.stage_layers), right)
        require(
            all(count >= 1 for count in self.stage_layers[1:-1]) and min(self.stage_layers, default=0) >= 0,
            "stage_layers",
            list(self.stage_layers),
            "1 or more layers in each part; only the first (embedding) and the last (logits) may have 0",
        )
        require(
            not self.scatter_gather or (self.tp > 1 and self.pp > 1 and not self.sp),
            "scatter_gather",
            self.scatter_gather,
            says="needs tp > 1, pp > 1 and sp = false; sequence parallelism already splits boundary tensors",
        )

    def _check_checkpoints(self) -> None:
        for key in ("pa", "pa_cpu"):
            says = "needs recompute = true: without it, there are no activation checkpoints"
            require(self.has_checkpoints or not getattr(self, key), key, getattr(self, key), says=says)
        require(self.cp == 1 or self.recompute != SELECTIVE, "cp", self.cp, f"1 with recompute = {SELECTIVE}")
        says = "needs tp > 1 and sp = false; sequence parallelism already splits checkpoints"
        require(not self.pa or (self.tp > 1 and not self.sp), "pa", self.pa, says=says)
        says = "needs pa = true: otherwise all tp ranks copy the same checkpoint to host memory"
        require(not self.pa_cpu or self.pa or self.tp == 1 or self.sp, "pa_cpu", self.pa_cpu, says=says)

    def _check_sizes(self) -> None:
        for key in ("dp", "tp", "pp", "cp"):
            at_most(key, getattr(self, key), sizes.RANKS)
        at_most(" x ".join(self.axes), self.world, sizes.RANKS)
        at_most("micro_batch", self.micro_batch, sizes.SAMPLES)
        at_most("bucket_bytes", self.bucket_bytes, sizes.TENSOR_BYTES)
        parts = "global_batch / dp / micro_batch x pp x chunks"
        at_most(parts, self.accumulation * self.pp * self.chunks, sizes.MICRO_BATCHES)

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes of parallelism for display; cp is included only if its degree is above 1."""
        return ("tp", "cp", "pp", "dp") if self.cp > 1 else ("tp", "pp", "dp")

    @property
    def world(self) -> int:
        """Return the total number of ranks, tp * cp * pp * dp."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def has_checkpoints(self) -> bool:
        """Return whether each block stores an activation checkpoint and repeats its forward pass in backward."""
        return self.recompute not in (False, SELECTIVE)

    @property
    def copies(self) -> int:
        """Return dp x cp, the number of ranks with the same part of the model, over which ZeRO splits its states."""
        return self.dp * self.cp

    @property
    def grad_bytes(self) -> int:
        """Return the bytes per element of accumulated gradients and of their reduction."""
        return ELEMENT_BYTES["fp32" if self.grad_dtype == "fp32" else self.precision]

    @property
    def replica_batch(self) -> int:
        """Return the number of samples per optimizer step and model replica."""
        return self.global_batch // self.dp

    @property
    def accumulation(self) -> int:
        """Return the number of micro-batches per optimizer step and replica, the pipeline's m."""
        return self.replica_batch // self.micro_batch

    @cached_property
    def strides(self) -> dict[str, int]:
        """Return the rank distance between neighbours along each parallelism axis (tp, cp, dp, pp), set by `order`."""
        found, stride = {}, 1
        for axis in self.order.replace("tp", "tp-cp").split("-"):
            found[axis] = stride
            stride *= getattr(self, axis)
        return found

    def index_of(self, axis: str, rank: int) -> int:
        """Return the index of `rank` along `axis` (tp, cp, dp or pp): along pp the stage, along dp the replica."""
        return rank // self.strides[axis] % int(getattr(self, axis))

    @staticmethod
    def within(group: str) -> tuple[str, ...]:
        """Return the axes along which the ranks of a communication group differ: one axis, and for `dp` also cp."""
        return ("dp", "cp") if group == "dp" else (group,)

    def offsets(self, group: str) -> Sequence[int]:
        """Return the rank distance from a group's first member to each member, in the order of `group_of`'s result."""
        steps = [
            range(0, self.strides[axis] * getattr(self, axis), self.strides[axis])
            for axis in self.within(group)
        ]
        outer, inner = steps if len(steps) == 2 else (steps[0], range(1))
        if len(inner) == 1:
            return outer  # a range avoids a loop over up to 100,000 replicas
        return tuple(far + near for far in outer for near in inner)

    def group_of(self, group: str, rank: int) -> tuple[int, ...]:
        """Return the ranks in the tp, cp, pp or dp group of `rank`, ordered by their index along the axis.

        A `dp` group consists of all `copies` of one part of the model: ranks that differ along dp and cp, cp innermost.
        """
        first = rank - sum(self.strides[axis] * self.index_of(axis, rank) for axis in self.within(group))
        offsets = self.offsets(group)
        if isinstance(offsets, range):
            return tuple(range(first, first + offsets.stop, offsets.step))
        return tuple(first + offset for offset in offsets)

    def parts(self, layers: int) -> list[range]:
        """Return the range of layer indices in each of the pp * chunks parts of a model with `layers` layers.

        Part k is chunk k // pp of stage k % pp (2104.04473 sec. 2.2).
        """
        count = self.pp * self.chunks
        sizes = self.stage_layers or (layers // count,) * count
        stops = list(accumulate(sizes))
        return [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
