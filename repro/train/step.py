"""The one training step, under every layout: what the engine ``native`` runs.

``meta`` tensors and a transport that carries nothing run the same step in shape only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from repro.config import Experiment
from repro.models.gpt import GPT, Place
from repro.models.init import initial_values
from repro.parallel.bucket import InitialValues, Tag
from repro.parallel.checkpoints import Checkpoints
from repro.parallel.mesh import Mesh
from repro.parallel.optimizer import AdamGroup, GradientShards, Norms, ShardedAdamW, divisor_for
from repro.parallel.precision import DTYPES, LossScaler
from repro.parallel.sharding import ShardedModule, Sharding
from repro.train.schedule import learning_rate

Observer = Callable[[str], None]
"""Called with the name of the phase that begins: forward, backward, optimizer."""


@dataclass(frozen=True)
class MicroBatch:
    """Tokens and targets [micro_batch, s], int64, on the engine's device."""

    tokens: Tensor
    targets: Tensor
    place: Place


DECAYED, NOT_DECAYED = 0, 1


class NativeEngine:
    """Model, sharded states and step of one experiment on one rank."""

    def __init__(self, experiment: Experiment, mesh: Mesh, device: torch.device):
        layout, training = experiment.layout, experiment.training
        self.layout, self.training, self.mesh = layout, training, mesh
        self.checkpoints: Checkpoints | None = None
        if layout.recompute:
            self.checkpoints = Checkpoints(layout, mesh.tp, capacity=experiment.model.layers)
        self.model = GPT(experiment.model, layout, training, mesh.tp, self.checkpoints)
        sharding = Sharding.of(layout, mesh.dp, device, DTYPES[layout.precision])
        names = [name for name, _ in self.model.named_parameters()]

        def values(parameters: list[Parameter]) -> InitialValues:
            return initial_values(
                names,
                parameters,
                seed=training.seed,
                layers=experiment.model.layers,
                rank=mesh.tp.rank,
                ranks=mesh.tp.size,
                device=device,
            )

        self.sharded = ShardedModule(self.model, self.model.zero_units(), sharding, self._tag, values)
        self.gradients = GradientShards(self.sharded.buckets, mesh)
        groups = [AdamGroup(training.weight_decay), AdamGroup(0.0)]
        self.optimizer = ShardedAdamW(
            self.sharded.buckets, groups, training.beta1, training.beta2, training.eps
        )
        self.scaler: LossScaler | None = None
        if layout.precision == "fp16":
            self.scaler = LossScaler(
                training.loss_scale, training.loss_scale_window, training.loss_scale_hysteresis, device
            )

    def _tag(self, parameter: Parameter) -> Tag:
        """Matrices decay, vectors do not; what every tp rank holds is counted once."""
        return Tag(
            group=DECAYED if parameter.dim() > 1 and parameter.init != "zeros" else NOT_DECAYED,  # type: ignore[attr-defined]
            duplicate=self.mesh.tp.size > 1 and parameter.split is None,  # type: ignore[attr-defined]
            partial=parameter.partial,  # type: ignore[attr-defined]
        )

    def step(self, micro_batches: Sequence[MicroBatch], observe: Observer) -> Norms:
        """Forward, backward and gradient averaging per micro-batch; norm, clipping, AdamW; publication."""
        count = len(micro_batches)
        total: Tensor | None = None
        for i, batch in enumerate(micro_batches):
            observe("forward")
            self.sharded.begin(i, count)
            loss = self.model(batch.tokens, batch.targets, batch.place)
            observe("backward")
            scaled = loss / count if count > 1 else loss
            (scaled if self.scaler is None else scaled * self.scaler.scale).backward()
            self.sharded.finish()
            total = loss.detach() if total is None else total + loss.detach()
        observe("optimizer")
        assert total is not None
        with torch.no_grad():
            return self._update(total / count)

    def _update(self, loss: Tensor) -> Norms:
        scaler = self.scaler
        norms = self.gradients.agree(loss, None if scaler is None else scaler.scale)
        self.optimizer.update(
            learning_rate(self.training, self.optimizer.step_count),
            divisor_for(norms.gradient, self.training.clip, scaler),
            None if scaler is None else norms.overflow,
        )
        if scaler is not None:
            scaler.update(norms.overflow)
        self.sharded.publish()
        return norms

    def loss_scale(self) -> Tensor | None:
        """The dynamic loss scale (fp16)."""
        return None if self.scaler is None else self.scaler.scale

    def synchronize(self) -> None:
        """Wait for the parameters that the last step published."""
        self.sharded.wait()

    def local_parameters(self) -> int:
        """Parameters of this rank's tp share."""
        return sum(bucket.plan.numel for bucket in self.sharded.buckets)

    def full_parameters(self) -> dict[str, Tensor]:
        """A copy of every (tp-local) parameter by name."""
        return self.sharded.full_parameters()

    def padding(self) -> int:
        """Elements of padding in the buckets."""
        return self.sharded.padding
