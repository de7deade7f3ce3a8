"""What every engine offers: build the model of an experiment on this rank, and take one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from repro.engines.about import EngineReport
from repro.engines.native.part import MicroBatch
from repro.parallel.pipeline.runner import Observer
from repro.parallel.zero.optimizer import Norms


class Engine(Protocol):
    """One experiment's training state on one rank."""

    def step(self, micro_batches: Sequence[MicroBatch], observe: Observer) -> Norms:
        """One optimizer step over the replica's micro-batches."""

    def loss_scale(self) -> Tensor | None:
        """The loss scale that the next step will use, 0-dim; None without loss scaling."""

    def synchronize(self) -> None:
        """Have everything done that the last step started."""

    def local_parameters(self) -> int:
        """Parameters of one model replica that this rank's tp share has."""

    def full_parameters(self) -> dict[str, Tensor]:
        """A copy of every (tp-local) parameter, complete, by name."""

    def padding(self) -> int:
        """Elements that flat buffers hold beyond the parameters."""

    def mark_states(self) -> None:
        """Mark every storage that now holds parameters, gradients or optimizer states (`repro.parallel.storage`).

        Asked for when the step's gradients are there and again after it, in the first step alone.
        """

    def about(self) -> EngineReport:
        """Whose software this is, and how it was set up."""

    def pipeline_report(self) -> dict[str, Any]:
        """`stage` and `in_flight`, the most micro-batches (per chunk) alive at once; {} without stages."""
