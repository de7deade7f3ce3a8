"""The engine `torch`: a plain module under torch's strategies, the same `Engine` interface as ours."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from repro.config import Experiment
from repro.config.enums import Category, Phase
from repro.engines.about import EngineReport
from repro.engines.native.part import MicroBatch
from repro.engines.torch import data_parallel, tensor_parallel
from repro.engines.torch.data_parallel import Strategy, strategy_of
from repro.engines.torch.grid import device_mesh
from repro.engines.torch.model import Dropout, PlainGPT
from repro.engines.torch.pipeline import TorchPipeline
from repro.engines.torch.update import Update, local
from repro.engines.torch.weights import from_plain, initialise, name_of
from repro.model.gpt import Part
from repro.parallel.mesh import Mesh
from repro.parallel.pipeline.runner import Observer
from repro.parallel.storage import DTYPES, mark
from repro.parallel.zero.optimizer import Norms


class TorchEngine:
    """Modules, optimizer and step of one experiment on one rank."""

    def __init__(self, experiment: Experiment, mesh: Mesh, device: torch.device):
        layout = experiment.layout
        self.experiment, self.layout, self.mesh = experiment, layout, mesh
        self.strategy = strategy_of(layout)
        grid = device_mesh(layout, device.type)
        self.count = 0
        self.parts: list[PlainGPT] = []
        """The rank's parts of the model, one a chunk."""
        self.modules: list[nn.Module] = []
        """The same as they are called."""
        for chunk in range(layout.chunks):
            module = self._part(chunk)
            if grid is not None and layout.tp > 1:
                tensor_parallel.split(module, grid["tp"], sp=layout.sp)
            self.count += sum(local(parameter).numel() for parameter in module.parameters())
            if grid is not None and self.strategy.composable:
                data_parallel.compose(module, layout, grid)
            module.to_empty(device=device)
            module.tie()
            initialise(module, experiment, device)
            self.parts.append(module)
            self.modules.append(module)
            if grid is not None and self.strategy in (Strategy.DDP, Strategy.ZERO1):
                self.modules[-1] = data_parallel.distribute(module, layout, grid)
        optimizer = data_parallel.optimizer_of(self.parts, experiment.training, self.strategy)
        parameters = list(chain.from_iterable(part.parameters() for part in self.parts))
        self.update = Update(experiment, mesh, optimizer, parameters, self._tied(), device)
        self.pipeline: TorchPipeline | None = None
        if grid is not None and layout.pp > 1:
            self.pipeline = TorchPipeline(experiment, self.modules, grid, device)

    def _part(self, chunk: int) -> PlainGPT:
        """On `meta`."""
        experiment, layout, mesh = self.experiment, self.layout, self.mesh
        parts = layout.parts(experiment.model.layers)
        number = chunk * layout.pp + mesh.pp.rank
        part = Part(parts[number], first=number == 0, last=number == len(parts) - 1)
        seq, heads = experiment.seq, experiment.model.heads
        dropout = Dropout(
            experiment.training,
            experiment.model,
            seq,
            mesh.tp.rank * seq // layout.tp if layout.sp else 0,
            mesh.tp.rank * heads // layout.tp,
        )
        cast = layout.precision != "fp32" and not self.strategy.composable
        with torch.device("meta"):
            return PlainGPT(
                experiment.model,
                dropout,
                part,
                recompute=layout.recompute,
                autocast=DTYPES[layout.precision] if cast else None,
            )

    def _tied(self) -> nn.Parameter | None:
        """The embedding that first and last stage of a pipeline both hold."""
        for part in self.parts:
            if part.part.first != part.part.last:
                return part.embed.tokens.weight if part.part.first else part.head.output.weight  # type: ignore[return-value]
        return None

    def step(self, micro_batches: Sequence[MicroBatch], observe: Observer) -> Norms:
        """The step as torch's documentation writes it, with clipping and the mean loss over replicas."""
        for part in self.parts:
            part.batches = iter(micro_batches)
        scale = self.loss_scale()
        with loss_parallel() if self.layout.tp > 1 else nullcontext():
            if self.pipeline is None:
                loss = self._accumulate(micro_batches, scale, observe)
            else:
                loss = self.pipeline.run(micro_batches, scale, observe)
        observe(Phase.OPTIMIZER)
        return self.update(loss)

    def _accumulate(
        self, micro_batches: Sequence[MicroBatch], scale: Tensor | None, observe: Observer
    ) -> Tensor:
        """Forward and backward of one micro-batch after the other; their mean loss."""
        (module,) = self.modules
        count, total = len(micro_batches), torch.zeros(())
        for i, batch in enumerate(micro_batches):
            observe(Phase.FORWARD)
            last = i == count - 1
            quiet: Any = nullcontext()
            if isinstance(module, nn.parallel.DistributedDataParallel):
                quiet = nullcontext() if last else module.no_sync()
            elif self.strategy.composable:
                module.set_requires_gradient_sync(last)  # type: ignore[operator]
            with quiet:
                loss = module(batch.tokens)
                observe(Phase.BACKWARD)
                scaled = loss / count if count > 1 else loss
                (scaled if scale is None else scaled * scale).backward()
            total = loss.detach() if not i else total + loss.detach()
        return total / count

    def loss_scale(self) -> Tensor | None:
        """GradScaler's (fp16)."""
        return self.update.scale()

    def synchronize(self) -> None:
        """torch's steps leave nothing under way."""

    def local_parameters(self) -> int:
        """Parameters of this rank's tp share of its stage."""
        return self.count

    def full_parameters(self) -> dict[str, Tensor]:
        """A copy of every parameter of the stage, complete over dp and tp, by our names."""
        found = {}
        for part in self.parts:
            for plain, parameter in part.named_parameters():
                whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                name = name_of(plain)
                found[name] = from_plain(name, whole.detach(), self.experiment.model).clone()
        return found

    def padding(self) -> int:
        """Not known of torch's buffers."""
        return 0

    def mark_states(self) -> None:
        """Parameters, their gradients and Adam's moments; FSDP2's are the rank's shards."""
        for parameter in self.update.parameters:
            mark(local(parameter), Category.PARAMETERS)
            if parameter.grad is not None:
                mark(local(parameter.grad), Category.GRADIENTS)
        # Of ZeroRedundancyOptimizer: the rank's part.
        optimizer = getattr(self.update.optimizer, "optim", self.update.optimizer)
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    mark(local(value), Category.OPTIMIZER)

    def about(self) -> EngineReport:
        """torch's strategies on a plain module of torch's layers."""
        layout = self.layout
        told: dict[str, Any] = {"strategy": str(self.strategy)}
        if layout.precision != "fp32":
            cast = self.strategy.composable
            told["precision"] = "MixedPrecisionPolicy" if cast else "autocast"
            told["gradients in"] = layout.precision if cast else "fp32"
        if layout.tp > 1:
            told["tensor parallelism"] = "DTensor, loss_parallel" + (
                ", SequenceParallel" if layout.sp else ""
            )
        if self.pipeline is not None:
            told["schedule"] = type(self.pipeline.schedule).__name__
        return EngineReport(
            f"torch {torch.__version__}",
            "modules, parallelism, precision and optimizer; weights, data and dropout are this suite's",
            told,
        )

    def pipeline_report(self) -> dict[str, Any]:
        """This rank's stage and the most micro-batches that were in flight; empty without a pipeline."""
        if self.pipeline is None:
            return {}
        return {"stage": self.mesh.pp.rank, "in_flight": self.pipeline.flying.most}
