"""String enumerations: categories of memory, phases of a training step, and sets of operators. Imports no torch."""

from __future__ import annotations

import enum


class StrEnum(str, enum.Enum):
    """Enumeration whose members equal their strings, as `enum.StrEnum`, which Python 3.10 does not have."""

    __str__ = str.__str__
    __repr__ = str.__repr__
    __format__ = str.__format__  # type: ignore[assignment]


class Category(StrEnum):
    """Category of the memory that training uses, such as parameters or activations (1910.02054 sec. 3)."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    """Optimizer states: fp32 master weights and Adam's moments."""
    ACTIVATIONS = "activations"
    CHECKPOINTS = "checkpoints"
    """Activation checkpoints: activations that are retained for recomputation in the backward pass."""
    COMMUNICATION = "communication"
    OTHER = "other"
    HOST = "host"
    """Host memory of a training step on a GPU, such as checkpoints of P_a+cpu; totals of device memory exclude it."""
    SHAPE = "shape"
    """Tensors that memory totals exclude: placeholders without memory on `meta`, and tensors of the measurement."""


ACCOUNTED: tuple[str, ...] = tuple(category for category in Category if category is not Category.SHAPE)
"""Categories of memory that tables and figures show, in order."""
MODEL_STATES: tuple[str, ...] = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
"""Categories of memory that ZeRO partitions: the model states (1910.02054 sec. 5)."""


class Phase(StrEnum):
    """Activity of a rank, such as the forward pass. Rank processes report a phase as its index in this enumeration."""

    START = "start"
    """Start of the rank process: interpreter, imports and rendezvous."""
    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    IDLE = "idle"
    """Idle time in which a pipeline stage waits for another stage."""
    OPTIMIZER = "optimizer"
    MEASURE = "measure"
    DONE = "done"
    CHECKPOINT = "checkpoint"
    INPUT = "input"
    """Creation of a training step's token ids on the host, and their copy to the device."""


STEP_PHASES = (Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.IDLE, Phase.OPTIMIZER)
"""Phases of a training step whose durations are measured."""


class OperatorSet(StrEnum):
    """Set of operators that compute a transformer layer, loss and optimizer, named after the software that it models.

    The layout key `kernels` selects a set. All sets compute the same function.
    """

    FUSED = "fused"
    """Fused operators in `kernels/`: each is one CUDA kernel with one pass over memory; attention writes no scores."""
    FUSED_2024 = "fused-2024"
    """Fused operators of this project in training runs. In predictions, operators with the efficiencies of a published
    run that used compiled code and libraries of 2024."""
    FUSED_2026 = "fused-2026"
    """Fused operators of this project in training runs. Predictions use times of this project's kernels, and of cuBLAS
    and attention kernels of 2026, as measured on a Hopper GPU."""
    MEGATRON_2025 = "megatron-2025"
    """Operators of Megatron-core (October 2025, Transformer Engine 2.11): those of `fused`, but attention values of
    grouped heads are copied to contiguous memory, and weight gradients are fp32 (`fuses_gradient_accumulation`)."""
    REFERENCE = "reference"
    """torch's own operators in place of this project's fused operators; on a CPU, the set `fused` also runs them."""
    SOFTMAX = "softmax"
    """Operators of Megatron-LM in 2020 and 2021 (2104.04473 sec. 4.2): attention writes its scores to memory, one
    operator fuses scale, mask and softmax, and operations on gradients are separate passes (`in_passes`)."""
    TORCHTITAN_2024 = "torchtitan-2024"
    """Operators of torchtitan (December 2024): those of `fused`, but torch's own loss from fp32 copies of logits."""
    UNFUSED = "unfused"
    """Operators of Megatron-LM in 2019 (1909.08053) and DeepSpeed in February 2020: scale, mask, softmax, biases,
    dropouts and residuals are separate operators, and so are operations on gradients (`in_passes`)."""

    @property
    def plain(self) -> bool:
        """Return whether the operator set consists of torch's own operators in place of this project's CUDA kernels."""
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
