"""The end of a step: global norm, clipping, the learning rate, AdamW, and in fp16 torch's GradScaler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from repro.config import Experiment
from repro.engines.native.learning_rate import learning_rate
from repro.parallel.comm import MAX
from repro.parallel.mesh import Mesh
from repro.parallel.zero.optimizer import Norms


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Update:
    """The optimizer's part of every step; gradients are averaged over dp and the micro-batches when it begins."""

    def __init__(
        self,
        experiment: Experiment,
        mesh: Mesh,
        optimizer: Any,
        parameters: Sequence[Parameter],
        tied: Parameter | None,
        device: torch.device,
    ):
        """`tied` is the embedding that first and last stage of a pipeline both hold, None on other ranks."""
        self.training, self.mesh, self.optimizer, self.tied = experiment.training, mesh, optimizer, tied
        self.parameters = list(parameters)
        self.counted = [p for p in parameters if p is not tied or not mesh.pp.rank]
        self.device, self.taken = device, 0
        self.scaler: torch.amp.GradScaler | None = None
        if experiment.layout.precision == "fp16":
            self.scaler = torch.amp.GradScaler(
                device.type,
                init_scale=self.training.loss_scale,
                growth_interval=self.training.loss_scale_window,
            )
            self.scaler.scale(torch.zeros((), device=device))  # makes the scale

    def scale(self) -> Tensor | None:
        """The loss scale, 0-dim; None without loss scaling."""
        return None if self.scaler is None else torch.tensor(self.scaler.get_scale(), device=self.device)

    def __call__(self, loss: Tensor) -> Norms:
        """`loss` is the replica's mean, 0 on all but its last stage."""
        self._finish_gradients()
        overflow = torch.zeros((), device=self.device)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            # One tensor a device; a stage knows of its own gradients only.
            (overflow,) = self.scaler._found_inf_per_device(self.optimizer).values()
            self.mesh.pp.all_reduce(overflow, MAX).wait()
            overflow = overflow.clone()
        norm, loss = self._agree(loss)
        if self.training.clip:
            clip_grads_with_norm_(self.parameters, self.training.clip, norm)
        self._step()
        self.optimizer.zero_grad()
        self.taken += not overflow.item() if self.scaler is not None else 1
        return Norms(norm, loss, overflow)

    def _step(self) -> None:
        rate = learning_rate(self.training, torch.tensor(float(self.taken))).item()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _finish_gradients(self) -> None:
        """Add up what is still parts of a sum: over tp (sequence parallel norms), and over both tied embeddings."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        if self.tied is not None and self.tied.grad is not None:
            self.mesh.embedding.all_reduce(local(self.tied.grad)).wait()

    def _agree(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Global gradient norm and mean loss over all replicas."""
        alike: dict[Any, list[Tensor]] = defaultdict(list)
        for parameter in self.counted:
            assert parameter.grad is not None
            alike[getattr(parameter.grad, "placements", None)].append(parameter.grad)
        # DTensor adds up the norms of gradients that are split alike at once, of others one by one.
        norms = [get_total_norm(gradients) for gradients in alike.values()]
        wholes = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        square = torch.stack(wholes).square().sum()
        loss = loss / self.mesh.dp.size
        self.mesh.dp.all_reduce(loss).wait()
        both = torch.stack([square, loss])
        self.mesh.pp.all_reduce(both).wait()
        return both[0].sqrt(), both[1]
