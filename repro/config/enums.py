"""String enumerations: categories of memory, phases of a step, and sets of operators.  The module needs no torch."""

from __future__ import annotations

import enum


class StrEnum(str, enum.Enum):
    """Enumeration whose members equal their strings, as `enum.StrEnum`, which Python 3.10 does not have."""

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
    """Host memory of a step on a GPU, such as checkpoints of P_a+cpu; device totals exclude it."""
    SHAPE = "shape"
    """Placeholder on `meta` without memory, or tensor of the measurement itself; totals exclude both."""


ACCOUNTED: tuple[str, ...] = tuple(category for category in Category if category is not Category.SHAPE)
"""Categories of memory that tables and figures show, in order."""
MODEL_STATES: tuple[str, ...] = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
"""Categories that ZeRO partitions (1910.02054 sec. 5)."""


class Phase(StrEnum):
    """Activity of a rank. Rank processes report the position of their phase in this list as a number."""

    START = "start"
    """Start of the rank process: interpreter, imports and rendezvous."""
    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    IDLE = "idle"
    """Pipeline stage waits for another stage."""
    OPTIMIZER = "optimizer"
    MEASURE = "measure"
    DONE = "done"
    CHECKPOINT = "checkpoint"
    INPUT = "input"
    """Host creates the token ids of a step and copies them to the device."""


STEP_PHASES = (Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.IDLE, Phase.OPTIMIZER)
"""Phases of a training step whose durations are measured."""


class OperatorSet(StrEnum):
    """Operators of a layer, the loss and the optimizer (a layout's `kernels`), by the software that they represent.

    All sets compute the same function.
    """

    FUSED = "fused"
    """Operators of `kernels/`: on CUDA, each is one kernel with one pass over memory; attention never writes scores."""
    FUSED_2024 = "fused-2024"
    """Operators of `fused` in training runs.  Predictions take efficiencies from a published run with compiled code and
    libraries of 2024."""
    FUSED_2026 = "fused-2026"
    """Operators of `fused` in training runs.  Predictions take the times of this suite's kernels and of the libraries
    of 2026, as measured on Hopper."""
    MEGATRON_2025 = "megatron-2025"
    """Megatron-core of October 2025 with Transformer Engine 2.11: operators of `fused` with a contiguous copy of shared
    values and weight gradients in fp32 (`fuses_gradient_accumulation`)."""
    REFERENCE = "reference"
    """torch's own operators in place of each operator of `fused`; on a CPU, `fused` runs these too."""
    SOFTMAX = "softmax"
    """Megatron-LM of December 2020 and 2021 (2104.04473 sec. 4.2): attention writes its scores, and one operator fuses
    scale, mask and softmax.  Operations on gradients are separate passes over memory (`in_passes`)."""
    TORCHTITAN_2024 = "torchtitan-2024"
    """torchtitan of December 2024: operators of `fused`, but torch's own loss from fp32 copies of the logits."""
    UNFUSED = "unfused"
    """Megatron-LM of September 2019 (1909.08053) and DeepSpeed of February 2020: scale, mask, softmax, biases, dropouts
    and residuals are separate operators, and operations on gradients separate passes over memory (`in_passes`)."""

    @property
    def plain(self) -> bool:
        """Return whether torch's own operators run in place of this suite's CUDA kernels."""
        return self is OperatorSet.REFERENCE

    @property
    def writes_scores(self) -> bool:
        """Return whether attention writes its scores [b, a/t, s, s] to memory (a heads, tensor-parallel degree t)."""
        return self in (OperatorSet.SOFTMAX, OperatorSet.UNFUSED)

    @property
    def fuses_gradient_accumulation(self) -> bool:
        """Return whether matrix products add weight gradients to fp32 buffers (`gradient_accumulation_fusion`).

        A rank then also stores one uninitialised 16-bit gradient per weight shape, which Transformer Engine returns to
        autograd (`get_dummy_wgrad`).
        """
        return self is OperatorSet.MEGATRON_2025

    @property
    def in_passes(self) -> bool:
        """Return whether each operation on gradients is a separate pass over memory.

        The operations are the accumulation of weight gradients, the copies to and from the reduced buffer
        (`repro.parallel.zero.grad_reduce`), and the conversion to fp32, unscaling and clipping before the update
        (`repro.parallel.zero.optimizer`).
        """
        return self.writes_scores
