"""Words with a fixed set of values, as strings that know their set: what memory is for, what a step is doing.

No torch here, so that whoever draws, stores or checks them need not copy them.
"""

from __future__ import annotations

import enum


class StrEnum(str, enum.Enum):
    """`enum.StrEnum`, which Python 3.10 lacks: each member is its string, in files, keys and messages too."""

    __str__ = str.__str__
    __repr__ = str.__repr__
    __format__ = str.__format__  # type: ignore[assignment]


class Category(StrEnum):
    """What memory holds (1910.02054 sec. 3)."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    """fp32 master weights and moments."""
    ACTIVATIONS = "activations"
    CHECKPOINTS = "checkpoints"
    """Activations that are kept for recomputation."""
    COMMUNICATION = "communication"
    OTHER = "other"
    HOST = "host"
    """In host memory while the device computes (P_a+cpu); no part of what the device holds."""
    SHAPE = "shape"
    """A tensor on `meta` that stands for one to come, wherever it will be: it holds nothing and counts nowhere."""


ACCOUNTED: tuple[str, ...] = tuple(category for category in Category if category is not Category.SHAPE)
"""What bytes are counted as, in the order of tables and figures."""
MODEL_STATES: tuple[str, ...] = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER)
"""What ZeRO partitions (sec. 5)."""


class Phase(StrEnum):
    """Activity of a rank. The order gives the numbers that `launch.rank_process` writes."""

    START = "start"
    """Everything before the rank's first word: interpreter, imports, rendezvous."""
    INIT = "init"
    FORWARD = "forward"
    BACKWARD = "backward"
    IDLE = "idle"
    """A pipeline stage that waits for another one."""
    OPTIMIZER = "optimizer"
    MEASURE = "measure"
    DONE = "done"
    CHECKPOINT = "checkpoint"
    INPUT = "input"
    """The host makes a step's tokens and copies them to the device."""


STEP_PHASES = (Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.IDLE, Phase.OPTIMIZER)
"""The phases of a step, whose seconds are measured."""
