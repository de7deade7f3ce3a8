"""megatron-core's training step under the `Engine` interface."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from repro.config import Experiment
from repro.config.enums import Category, Phase
from repro.engines.about import EngineReport
from repro.engines.megatron import exchange, messages, model, settings, shim, weights
from repro.engines.megatron.passes import Passes
from repro.engines.native.learning_rate import learning_rate
from repro.engines.native.part import MicroBatch
from repro.parallel.mesh import Mesh
from repro.parallel.pipeline.runner import Observer
from repro.parallel.storage import mark
from repro.parallel.zero.optimizer import Norms


class MegatronEngine:
    """The experiment's model, data parallelism and optimizer, all the library's."""

    def __init__(self, experiment: Experiment, mesh: Mesh, device: torch.device):
        self.experiment, self.mesh, self.device = experiment, mesh, device
        self.heads = experiment.model.heads // mesh.tp.size
        self.passes = Passes(experiment.layout.pp)
        values = exchange.variables() | messages.replacements()
        if device.type == "cpu":
            values |= shim.replacements()
        self.active = exchange.Exchange(values)
        """Inside it the library is as this experiment needs it."""
        with self.active:
            exchange.initialize(experiment.layout)
            exchange.seed(device, experiment.training.seed)
            self.config = settings.transformer(experiment, device, self.passes)
            self.models = [chunk.to(device) for chunk in model.build(experiment, self.config)]
            initial = weights.initial(experiment, mesh, device)
            weights.load(self.models, initial, self.heads)
            self.chunks = [self._wrap(chunk, i) for i, chunk in enumerate(self.models)]
            self.optimizer = self._optimizer()
            weights.load_masters(self.models, initial, self.heads, self.optimizer)
            self._schedule()
        self.taken = torch.zeros(())
        """Steps that were not skipped."""
        self.mark_states()
        weakref.finalize(self, _let_go, self.optimizer)

    def _wrap(self, chunk: GPTModel, index: int) -> DistributedDataParallel:
        """As the library's training script does; later chunks of an interleaved stage have one bucket each."""
        module = chunk if self.experiment.layout.precision == "fp32" else Float16Module(self.config, chunk)
        return DistributedDataParallel(
            self.config, settings.data_parallel(self.experiment), module, disable_bucketing=index > 0
        )

    def _optimizer(self) -> Any:
        made = get_megatron_optimizer(
            settings.optimizer(self.experiment), self.chunks, use_gloo_process_groups=False
        )
        for group in made.param_groups:
            group["weight_decay"] = self.experiment.training.weight_decay * group["wd_mult"]
            # AdamW of Transformer Engine or APEX is one kernel; torch's, without them, can be one too.
            if USING_PYTORCH_OPTIMIZER:
                group["fused"] = True
        # The moments are made here, or memory would be watched in the one step whose passes run without them.
        (inner,) = made.chained_optimizers
        inner.init_state_fn(inner.optimizer, inner.config)
        if USING_PYTORCH_OPTIMIZER:
            for parameter, state in inner.optimizer.state.items():
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return made

    def _schedule(self) -> None:
        """Connect schedule, gradients and optimizer by the functions that the configuration has for that."""
        config, layout = self.config, self.experiment.layout
        config.grad_scale_func = self.optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        if layout.overlap and layout.dp > 1:
            one = len(self.chunks) == 1
            stops = [chunk.no_sync for chunk in self.chunks]
            starts = [chunk.start_grad_sync for chunk in self.chunks]
            config.no_sync_func = stops[0] if one else stops
            config.grad_sync_func = starts[0] if one else starts
        self.run = get_forward_backward_func()

    def step(self, micro_batches: Sequence[MicroBatch], observe: Observer) -> Norms:
        """One step as the library's training script takes it."""
        layout = self.experiment.layout
        with self.active:
            self.passes.begin(observe)
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = self.run(
                forward_step_func=_forward,
                data_iterator=[iter(micro_batches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=layout.accumulation,
                seq_length=self.experiment.seq,
                micro_batch_size=layout.micro_batch,
            )
            observe(Phase.OPTIMIZER)
            with torch.no_grad():
                return self._update(losses, observe)

    def _update(self, losses: list[Tensor], observe: Observer) -> Norms:
        rate = float(learning_rate(self.experiment.training, self.taken))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        mean = torch.stack(losses).mean() if losses else torch.zeros((), device=self.device)
        mean = mean * (self.mesh.pp.size / self.mesh.world.size)
        if self.mesh.world.size > 1:
            dist.all_reduce(mean)
        success, norm, _ = self.optimizer.step()
        # Once more: the states that it made, and fp32 copies of fp16 gradients, are there.
        observe(Phase.OPTIMIZER)
        self.taken += float(success)
        return Norms(
            torch.tensor(norm if success else math.inf, device=self.device),
            mean,
            torch.tensor(0.0 if success else 1.0, device=self.device),
        )

    def loss_scale(self) -> Tensor | None:
        """The dynamic loss scale (fp16)."""
        if self.experiment.layout.precision != "fp16":
            return None
        with self.active:
            scale: Tensor = self.optimizer.get_loss_scale()
        return scale.view(())

    def synchronize(self) -> None:
        """A step leaves nothing under way: parameters that are gathered beside the forward pass begin with it."""

    def local_parameters(self) -> int:
        """Parameters of this rank's tp share of its stage."""
        return sum(p.numel() for chunk in self.models for p in chunk.parameters())

    def full_parameters(self) -> dict[str, Tensor]:
        """A copy of every (tp-local) parameter of the stage, complete, by our name for it and in our shape."""
        if settings.overlaps_gather(self.experiment):
            with self.active:
                for chunk in self.chunks:
                    chunk.start_param_sync(force_sync=True)
        return {
            name: weights.to_ours(name, parameter.detach(), self.heads).clone()
            for chunk in self.models
            for name, parameter in weights.named(chunk)
        }

    def padding(self) -> int:
        """Elements that gradient buffers hold beyond the parameters."""
        return (
            sum(buffer.numel for chunk in self.chunks for buffer in chunk.buffers) - self.local_parameters()
        )

    def mark_states(self) -> None:
        """Its buffers of parameters and gradients, or the parameters by themselves; masters and moments."""
        for chunk in self.chunks:
            for buffer in chunk.buffers:
                mark(buffer.grad_data, Category.GRADIENTS)
            for parameter in chunk.parameters():
                mark(parameter.data, Category.PARAMETERS)
                if (master := getattr(parameter, "main_param", None)) is not None:
                    mark(master, Category.OPTIMIZER)
                    if master.grad is not None:
                        mark(master.grad, Category.GRADIENTS)
        (inner,) = self.optimizer.chained_optimizers
        for state in inner.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    mark(value, Category.OPTIMIZER)

    def about(self) -> EngineReport:
        """The library's version and what it was told that differs from its defaults."""
        return EngineReport(
            f"Megatron-core {megatron.core.__version__}",
            "layers (with torch's attention and layer norm), schedule, data parallelism and optimizer",
            {
                "transformer": settings.told(self.config),
                "ddp": settings.told(self.chunks[0].ddp_config),
                "optimizer": settings.told(self.optimizer.config),
            },
        )

    def pipeline_report(self) -> dict[str, Any]:
        """This rank's stage and the most micro-batches that were in flight; empty without a pipeline."""
        if self.mesh.pp.size == 1:
            return {}
        return {"stage": self.mesh.pp.rank, "in_flight": self.passes.in_flight}


def _let_go(optimizer: Any) -> None:
    """Clear the optimizer of an engine that is gone, or its model would stay for as long as the process.

    In fp32 the distributed optimizer updates views of the parameters that belong to their graph, whose nodes hold the
    hooks of data parallelism, which hold the parameters: a circle that Python's collector does not see all of.
    """
    (inner,) = optimizer.chained_optimizers
    inner.optimizer.state.clear()
    for group in inner.optimizer.param_groups:
        group["params"].clear()
    getattr(inner, "shard_fp32_groups", []).clear()


def _forward(batches: Any, chunk: DistributedDataParallel) -> tuple[Tensor, Any]:
    """The library's forward step: the output of a chunk, and what makes the mean loss of a last one's."""
    batch: MicroBatch = next(batches)
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    output = chunk(batch.tokens, positions, None, labels=batch.targets)
    return output, _mean


def _mean(losses: Tensor) -> tuple[Tensor, Tensor]:
    """From losses [b, s]: what backward starts from, and what is told."""
    mean = losses.float().mean()
    return mean, mean.detach().clone()
