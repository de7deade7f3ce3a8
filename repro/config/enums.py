"""Enumerations of strings: categories of memory, phases of a step, and sets of operators.  They need no torch."""

from __future__ import annotations

import enum


class StrEnum(str, enum.Enum):
    """`enum.StrEnum`, which Python 3.10 lacks: each member equals its string in files, keys and messages."""

    __str__ = str.__str__
    __repr__ = str.__repr__
    __format__ = str.__format__  # type: ignore[assignment]


class Category(StrEnum):
    """Category of memory (1910.02054 sec. 3)."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    """fp32 master weights and moments."""
    ACTIVATIONS = "activations"
    CHECKPOINTS = "checkpoints"
    """Activations that are retained for recomputation."""
    COMMUNICATION = "communication"
    OTHER = "other"
    HOST = "host"
    """Host memory while the device computes (P_a+cpu), outside the device's total."""
    SHAPE = "shape"
    """A placeholder on `meta` without memory, or a tensor of the measurement; no total counts these."""


ACCOUNTED: tuple[str, ...] = tuple(category for category in Category if category is not Category.SHAPE)
"""Categories that totals count, in the order of tables and figures."""
MODEL_STATES: tuple[str, ...] = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
"""Categories that ZeRO partitions (1910.02054 sec. 5)."""


class Phase(StrEnum):
    """Activity of a rank. The order gives the numbers that `launch.rank_process` writes."""

    START = "start"
    """The time before the rank's first message: interpreter, imports, rendezvous."""
    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    IDLE = "idle"
    """The wait of a pipeline stage for another stage."""
    OPTIMIZER = "optimizer"
    MEASURE = "measure"
    DONE = "done"
    CHECKPOINT = "checkpoint"
    INPUT = "input"
    """The host creates a step's tokens and copies them to the device."""


STEP_PHASES = (Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.IDLE, Phase.OPTIMIZER)
"""Phases of a step whose seconds are measured."""


class OperatorSet(StrEnum):
    """Operators of a layer, the loss and the optimizer (a layout's `kernels`), by the software that had them.

    All sets compute the same function.
    """

    FUSED = "fused"
    """Operators of `kernels/`, each one pass over memory, on CUDA one kernel; attention never writes its scores."""
    FUSED_2024 = "fused-2024"
    """Operators of `fused`, as compiled code and the libraries of 2024 run them.  They are identical here, but
    predictions use a separate published point for them."""
    FUSED_2026 = "fused-2026"
    """Operators of `fused`, as this suite's kernels and the libraries of 2026 run them on Hopper.  They are identical
    here, but predictions use measured kernel times for them."""
    MEGATRON_2025 = "megatron-2025"
    """Megatron-core of October 2025 with Transformer Engine 2.11: operators of `fused` with a contiguous copy of shared
    values and weight gradients in fp32 (`fuses_gradient_accumulation`)."""
    REFERENCE = "reference"
    """Operators of `fused`, each by torch's own, on every device; on a CPU `fused` runs these too."""
    SOFTMAX = "softmax"
    """Megatron-LM of December 2020 and 2021 (2104.04473 sec. 4.2), which writes the scores, with scale, mask and
    softmax in one operator; operations on gradients are separate passes (`in_passes`)."""
    TORCHTITAN_2024 = "torchtitan-2024"
    """torchtitan of December 2024: operators of `fused`, with the loss by torch's own from fp32 copies of logits."""
    UNFUSED = "unfused"
    """Megatron-LM of September 2019 (1909.08053) and DeepSpeed of February 2020 on it, with scale, mask, softmax,
    biases, dropouts and residuals as separate operators; operations on gradients are separate passes (`in_passes`)."""

    @property
    def plain(self) -> bool:
        """Return whether torch's operators run in place of CUDA kernels."""
        return self is OperatorSet.REFERENCE

    @property
    def writes_scores(self) -> bool:
        """Return whether attention writes its scores, [b, a/t, s, s]."""
        return self in (OperatorSet.SOFTMAX, OperatorSet.UNFUSED)

    @property
    def fuses_gradient_accumulation(self) -> bool:
        """Return whether matrix products add to fp32 gradients directly (`gradient_accumulation_fusion`).

        A rank then retains one uninitialised 16-bit gradient for each shape of its matrices, which Transformer Engine
        returns to autograd instead (`get_dummy_wgrad`).
        """
        return self is OperatorSet.MEGATRON_2025

    @property
    def in_passes(self) -> bool:
        """Return whether each operation on gradients is a pass over memory of its own.

        The operations are the sum of weight gradients, the copies to and from the reduced buffer
        (`repro.parallel.zero.grad_reduce`), and the conversion to fp32, unscaling and clipping before the update
        (`repro.parallel.zero.optimizer`).
        """
        return self.writes_scores
