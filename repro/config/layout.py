"""A layout: how one training step is spread over devices.  Sizes of batches are in samples."""

from __future__ import annotations

from dataclasses import dataclass

from repro.config.errors import require
from repro.config.model import Model

PRECISIONS = ("fp32", "bf16", "fp16")
ZERO1_REDUCE = ("reduce-scatter", "all-reduce")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One product ``tp x dp`` with a ZeRO stage across ``dp``.  ``world = tp * dp``."""

    dp: int = 1
    """Data-parallel degree, the ZeRO paper's Nd."""
    tp: int = 1
    """Tensor-parallel (Megatron) degree, the ZeRO paper's Nm."""
    zero: int = 0
    """0: plain data parallelism; 1: P_os; 2: P_os+g; 3: P_os+g+p (1910.02054 sec. 5)."""
    zero1_reduce: str = "reduce-scatter"
    """Stage 1 only.  ``all-reduce`` is the February 2020 release: all-reduce, then all-gather, 1.5x."""
    sp: bool = False
    """Megatron sequence parallelism: norms and dropouts split along the sequence; needs tp > 1."""
    micro_batch: int = 1
    """Samples that one replica runs through forward and backward at once."""
    global_batch: int = 0
    """Samples of one optimizer step over all replicas; 0 means micro_batch * dp."""
    recompute: bool = False
    """Activation recomputation (checkpointing), one checkpoint per block."""
    precision: str = "fp32"
    """fp32; bf16 with fp32 master weights; fp16 with fp32 master weights and dynamic loss scaling."""
    bucket_bytes: int = 25_000_000
    """Size of one gradient bucket (stages 0-2).  Stage 3 reduces one block at a time."""

    def __post_init__(self) -> None:
        for key in ("dp", "tp", "micro_batch", "bucket_bytes"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "a whole number of at least 1")
        require(self.zero in (0, 1, 2, 3), "zero", self.zero, "a ZeRO stage: 0, 1, 2 or 3")
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        require(
            self.zero1_reduce in ZERO1_REDUCE,
            "zero1_reduce",
            self.zero1_reduce,
            f"one of {', '.join(ZERO1_REDUCE)}",
        )
        require(
            self.zero1_reduce == "reduce-scatter" or self.zero == 1,
            "zero1_reduce",
            self.zero1_reduce,
            f"zero = 1, the only stage it exists for (here zero = {self.zero})",
        )
        require(not self.sp or self.tp > 1, "sp", self.sp, "tp > 1, since sp splits over the tp group")
        require(self.global_batch >= 0, "global_batch", self.global_batch, "0 (micro_batch * dp) or more")
        per_pass = self.dp * self.micro_batch
        if self.global_batch == 0:
            object.__setattr__(self, "global_batch", per_pass)
        require(
            self.global_batch % per_pass == 0,
            "global_batch",
            self.global_batch,
            f"a multiple of dp * micro_batch = {self.dp} * {self.micro_batch} = {per_pass}",
        )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp

    @property
    def replica_batch(self) -> int:
        """Samples per optimizer step and model replica."""
        return self.global_batch // self.dp

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step and replica."""
        return self.replica_batch // self.micro_batch

    def check(self, model: Model) -> None:
        """Raise ``ConfigError`` if ``model`` cannot be spread this way."""
        require(
            model.heads % self.tp == 0, "tp", self.tp, f"a divisor of heads = {model.heads} ({model.name})"
        )
        require(
            model.ffn_width % self.tp == 0,
            "tp",
            self.tp,
            f"a divisor of ffn = {model.ffn_width} ({model.name})",
        )
        require(
            model.vocab % self.tp == 0, "tp", self.tp, f"a divisor of vocab = {model.vocab} ({model.name})"
        )
        require(
            not self.sp or model.seq % self.tp == 0,
            "sp",
            self.sp,
            f"tp = {self.tp} to divide seq = {model.seq} ({model.name})",
        )
