"""Engine `torch`: training step of a GPT of torch.nn layers under PyTorch's parallelism, and its optimizer update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from repro.config import Experiment
from repro.config.enums import Category, Phase
from repro.engines import EngineReport
from repro.engines.native.model_part import MicroBatch, learning_rate
from repro.engines.torch import parallelism
from repro.engines.torch.model import Dropout, PlainGPT, from_plain, initialise, suite_name
from repro.engines.torch.parallelism import Strategy, TorchPipeline, device_mesh, strategy_of
from repro.model.gpt import Part
from repro.parallel.comm import MAX
from repro.parallel.mesh import Mesh
from repro.parallel.pipeline.runner import Observer
from repro.parallel.storage import DTYPES, mark
from repro.parallel.zero.optimizer import Norms


class TorchEngine:
    """Engine `torch`: modules, optimizer and training step of one experiment on one rank."""

    def __init__(self, experiment: Experiment, mesh: Mesh, device: torch.device):
        layout = experiment.layout
        self.experiment, self.layout, self.mesh = experiment, layout, mesh
        self.strategy = strategy_of(layout)
        grid = device_mesh(layout, device.type)
        self.count = 0
        self.parts: list[PlainGPT] = []
        """Parts of the model on this rank, one for each chunk of its pipeline stage."""
        self.modules: list[nn.Module] = []
        """Modules that a step calls: the parts of the model, or their DistributedDataParallel wrappers."""
        for chunk in range(layout.chunks):
            module = self._part(chunk)
            if grid is not None and layout.tp > 1:
                parallelism.apply_tensor_parallel(module, grid["tp"], sp=layout.sp)
            self.count += sum(local_part(parameter).numel() for parameter in module.parameters())
            if grid is not None and self.strategy.composable:
                parallelism.apply_composable(module, layout, grid)
            module.to_empty(device=device)
            module.tie()
            initialise(module, experiment, device)
            self.parts.append(module)
            self.modules.append(module)
            if grid is not None and self.strategy in (Strategy.DDP, Strategy.ZERO1):
                self.modules[-1] = parallelism.wrap_in_ddp(module, layout, grid)
        optimizer = parallelism.adamw(self.parts, experiment.training, self.strategy)
        parameters = list(chain.from_iterable(part.parameters() for part in self.parts))
        self.update = OptimizerUpdate(experiment, mesh, optimizer, parameters, self._tied(), device)
        self.pipeline: TorchPipeline | None = None
        if grid is not None and layout.pp > 1:
            self.pipeline = TorchPipeline(experiment, self.modules, grid, device)

    def _part(self, chunk: int) -> PlainGPT:
        """Build the layers of chunk number `chunk` of this pipeline stage on `meta`."""
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
                recompute=layout.has_checkpoints,
                autocast=DTYPES[layout.precision] if cast else None,
            )

    def _tied(self) -> nn.Parameter | None:
        """Return this rank's copy of the embedding that first and last pipeline stage share; None on other stages."""
        for part in self.parts:
            if part.part.first != part.part.last:
                return part.embed.tokens.weight if part.part.first else part.head.output.weight  # type: ignore[return-value]
        return None

    def step(self, micro_batches: Sequence[MicroBatch], observe: Observer) -> Norms:
        """Run forward and backward of all micro-batches, clip the gradients, and update the parameters."""
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
        """Run forward and backward of all micro-batches without a pipeline, and return their mean loss."""
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
        """Return the scale of GradScaler in fp16 training, 0-dim; None in other precisions."""
        return self.update.scale()

    def synchronize(self) -> None:
        """Do nothing: no communication of torch continues after a step."""

    def local_parameters(self) -> int:
        """Return the number of model parameters on this tp rank and pipeline stage."""
        return self.count

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter of the stage, gathered over dp and tp, by its name in this suite."""
        found = {}
        for part in self.parts:
            for plain, parameter in part.named_parameters():
                full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                name = suite_name(plain)
                found[name] = from_plain(name, full.detach(), self.experiment.model).clone()
        return found

    def padding(self) -> int:
        """Return 0, because the padding of torch's flat buffers is unknown."""
        return 0

    def mark_states(self) -> None:
        """Set the memory category of parameters, gradients and Adam's moments, or of this rank's shards (FSDP2)."""
        for parameter in self.update.parameters:
            mark(local_part(parameter), Category.PARAMETERS)
            if parameter.grad is not None:
                mark(local_part(parameter.grad), Category.GRADIENTS)
        # The attribute `optim` of ZeroRedundancyOptimizer contains the optimizer states of this rank.
        optimizer = getattr(self.update.optimizer, "optim", self.update.optimizer)
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    mark(local_part(value), Category.OPTIMIZER)

    def report(self) -> EngineReport:
        """Return the version of torch and the parallelism strategies that it applies to the layout."""
        layout = self.layout
        settings: dict[str, Any] = {"strategy": str(self.strategy)}
        if layout.precision != "fp32":
            cast = self.strategy.composable
            settings["precision"] = "MixedPrecisionPolicy" if cast else "autocast"
            in_fp32 = layout.grad_dtype == "fp32" or not cast
            settings["gradients in"] = "fp32" if in_fp32 else layout.precision
        if layout.tp > 1:
            settings["tensor parallelism"] = "DTensor, loss_parallel" + (
                ", SequenceParallel" if layout.sp else ""
            )
        if self.pipeline is not None:
            settings["schedule"] = type(self.pipeline.schedule).__name__
        return EngineReport(
            f"torch {torch.__version__}",
            "torch provides modules, parallelism, precision and optimizer; this suite provides initial weights, data "
            "and dropout",
            settings,
        )

    def pipeline_report(self) -> dict[str, Any]:
        """Return pipeline stage and maximum number of in-flight (micro-batch, chunk) pairs; {} without a pipeline."""
        if self.pipeline is None:
            return {}
        return {"stage": self.mesh.pp.rank, "in_flight": self.pipeline.flying.most}


def local_part(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor on this rank; return any other `tensor` unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class OptimizerUpdate:
    """End of a training step: norm and clipping of gradients that are averaged over dp, and optimizer step."""

    def __init__(
        self,
        experiment: Experiment,
        mesh: Mesh,
        optimizer: Any,
        parameters: Sequence[Parameter],
        tied: Parameter | None,
        device: torch.device,
    ):
        """Prepare parameter updates. `tied`: embedding that first and last stage share; None on other stages."""
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
            # The first call of `scale` creates the scale tensor.
            self.scaler.scale(torch.zeros((), device=device))

    def scale(self) -> Tensor | None:
        """Return the loss scale of fp16 training, 0-dim; None without loss scaling."""
        return None if self.scaler is None else torch.tensor(self.scaler.get_scale(), device=self.device)

    def __call__(self, loss: Tensor) -> Norms:
        """Update the parameters; return norm, loss and overflow. `loss` (0-dim): mean of the replica (last stage)."""
        self._finish_gradients()
        overflow = torch.zeros((), device=self.device)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
            # The scaler's overflow flag covers only the gradients of this stage, so reduce it over the pipeline.
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
        """Sum gradients of sequence-parallel norms over tp, and of the tied embedding over first and last stage."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        if self.tied is not None and self.tied.grad is not None:
            self.mesh.embedding.all_reduce(local_part(self.tied.grad)).wait()

    def _agree(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the global gradient norm and the mean loss over all replicas, equal on all ranks."""
        by_placements: dict[Any, list[Tensor]] = defaultdict(list)
        for parameter in self.counted:
            assert parameter.grad is not None
            by_placements[getattr(parameter.grad, "placements", None)].append(parameter.grad)
        # torch computes the norm of several DTensors in one call only if their placements are equal.
        norms = [get_total_norm(gradients) for gradients in by_placements.values()]
        wholes = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        square = torch.stack(wholes).square().sum()
        loss = loss / self.mesh.dp.size
        self.mesh.dp.all_reduce(loss).wait()
        both = torch.stack([square, loss])
        self.mesh.pp.all_reduce(both).wait()
        return both[0].sqrt(), both[1]
