"""Training step of megatron-core, in the order in which the training script of Megatron-LM runs it."""

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
from repro.engines import EngineReport, Exchange
from repro.engines.megatron import exchange, model
from repro.engines.native.model_part import MicroBatch, learning_rate
from repro.parallel.mesh import Mesh
from repro.parallel.pipeline.runner import Observer
from repro.parallel.storage import mark
from repro.parallel.zero.optimizer import Norms


class MegatronEngine:
    """Engine `megatron`: model, data parallelism, pipeline schedule and optimizer of megatron-core on one rank."""

    def __init__(self, experiment: Experiment, mesh: Mesh, device: torch.device):
        self.experiment, self.mesh, self.device = experiment, mesh, device
        self.heads = experiment.model.heads // mesh.tp.size
        self.passes = PassTimers(experiment.layout.pp)
        values = exchange.module_variables() | exchange.message_replacements()
        if device.type == "cpu":
            values |= exchange.cpu_replacements()
        self.active = Exchange(values)
        """Context in which the module variables of megatron-core are those of this experiment."""
        with self.active:
            exchange.initialize_groups(experiment.layout, device)
            exchange.seed_random_states(device, experiment.training.seed)
            self.config = model.transformer_config(experiment, device, self.passes)
            self.models = [chunk.to(device) for chunk in model.build_chunks(experiment, self.config)]
            initial = model.initial_values_by_name(experiment, mesh, device)
            model.load_weights(self.models, initial, self.heads)
            self.chunks = [self._wrap(chunk, i) for i, chunk in enumerate(self.models)]
            self.optimizer = self._optimizer()
            model.load_masters(self.models, initial, self.heads, self.optimizer)
            self._schedule()
        self.taken = torch.zeros(())
        """Number of optimizer steps, without steps that were skipped for an overflow of gradients."""
        self.mark_states()
        weakref.finalize(self, _release_optimizer, self.optimizer)

    def _wrap(self, chunk: GPTModel, index: int) -> DistributedDataParallel:
        """Wrap a model chunk in megatron-core's data parallelism; later interleaved chunks have a single bucket."""
        module = chunk if self.experiment.layout.precision == "fp32" else Float16Module(self.config, chunk)
        return DistributedDataParallel(
            self.config, model.data_parallel_config(self.experiment), module, disable_bucketing=index > 0
        )

    def _optimizer(self) -> Any:
        made = get_megatron_optimizer(
            model.optimizer_config(self.experiment), self.chunks, use_gloo_process_groups=False
        )
        for group in made.param_groups:
            group["weight_decay"] = self.experiment.training.weight_decay * group["wd_mult"]
            # With `fused`, torch's AdamW runs in one kernel, like AdamW of Transformer Engine or APEX.
            if USING_PYTORCH_OPTIMIZER:
                group["fused"] = True
        # AdamW's moments must exist before the first step, in which memory is measured.
        (inner,) = made.chained_optimizers
        inner.init_state_fn(inner.optimizer, inner.config)
        if USING_PYTORCH_OPTIMIZER:
            for parameter, state in inner.optimizer.state.items():
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        return made

    def _schedule(self) -> None:
        """Set the functions by which megatron-core's pipeline schedule calls data parallelism and optimizer."""
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
        """Run one training step as the training script of Megatron-LM does."""
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
        # Report the optimizer phase a second time, so that `observe` also assigns a memory category to the fp32 copies
        # of fp16 gradients, which `optimizer.step` allocated.
        observe(Phase.OPTIMIZER)
        self.taken += float(success)
        return Norms(
            torch.tensor(norm if success else math.inf, device=self.device),
            mean,
            torch.tensor(0.0 if success else 1.0, device=self.device),
        )

    def loss_scale(self) -> Tensor | None:
        """Return the dynamic loss scale of fp16 training, 0-dim; None in other precisions."""
        if self.experiment.layout.precision != "fp16":
            return None
        with self.active:
            scale: Tensor = self.optimizer.get_loss_scale()
        return scale.view(())

    def synchronize(self) -> None:
        """Do nothing: no communication continues after a step, since the forward pass starts the parameter gather."""

    def local_parameters(self) -> int:
        """Return the number of model parameters on this tp rank and pipeline stage."""
        return sum(p.numel() for chunk in self.models for p in chunk.parameters())

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every (tp-local) parameter of the pipeline stage, with this suite's names and shapes."""
        if model.overlaps_gather(self.experiment):
            with self.active:
                for chunk in self.chunks:
                    chunk.start_param_sync(force_sync=True)
        return {
            name: model.to_suite_shape(name, parameter.detach(), self.heads).clone()
            for chunk in self.models
            for name, parameter in model.named_parameters(chunk)
        }

    def padding(self) -> int:
        """Return the number of padding elements in megatron-core's gradient buffers."""
        return (
            sum(buffer.numel for chunk in self.chunks for buffer in chunk.buffers) - self.local_parameters()
        )

    def mark_states(self) -> None:
        """Set the memory category of megatron-core's parameters, gradients, master weights and moments."""
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

    def report(self) -> EngineReport:
        """Return the version of megatron-core, and its settings that differ from their defaults."""
        return EngineReport(
            f"Megatron-core {megatron.core.__version__}",
            "megatron-core provides layers, schedule, data parallelism and optimizer; torch provides attention and "
            "layer norm",
            {
                "transformer": model.non_default_settings(self.config),
                "ddp": model.non_default_settings(self.chunks[0].ddp_config),
                "optimizer": model.non_default_settings(self.optimizer.config),
            },
        )

    def pipeline_report(self) -> dict[str, Any]:
        """Return pipeline stage and maximum number of in-flight (micro-batch, chunk) pairs; {} without a pipeline."""
        if self.mesh.pp.size == 1:
            return {}
        return {"stage": self.mesh.pp.rank, "in_flight": self.passes.in_flight}


def _release_optimizer(optimizer: Any) -> None:
    """Clear the optimizer of a deleted engine, so that the process can free the model.

    In fp32 the distributed optimizer updates views of the parameters. The autograd graph of these views refers to hooks
    that refer to the parameters, a cycle that Python's garbage collector cannot free.
    """
    (inner,) = optimizer.chained_optimizers
    inner.optimizer.state.clear()
    for group in inner.optimizer.param_groups:
        group["params"].clear()
    getattr(inner, "shard_fp32_groups", []).clear()


def _forward(batches: Any, chunk: DistributedDataParallel) -> tuple[Tensor, Any]:
    """Return a model chunk's output for the next micro-batch, and the function that computes the loss from it."""
    batch: MicroBatch = next(batches)
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    output = chunk(batch.tokens, positions, None, labels=batch.targets)
    return output, _mean


def _mean(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of losses [b, s] twice: for the backward pass, and as a copy for the result of the step."""
    mean = losses.float().mean()
    return mean, mean.detach().clone()


_PHASES = {
    "forward-compute": Phase.FORWARD,
    "backward-compute": Phase.BACKWARD,
    "all-grads-sync": Phase.BACKWARD,
}


class PassTimers:
    """Replacement of megatron-core's `Timers` that reports phases and records the order of all passes."""

    def __init__(self, stages: int) -> None:
        self.order: list[str] = []
        """Forward (`F`) and backward (`B`) passes of the step in the order in which they started."""
        self.in_flight = 0
        """Maximum number of (micro-batch, chunk) pairs that were between forward and backward at one time."""
        self._stages = stages
        self._observe: Observer = lambda phase: None

    def begin(self, observe: Observer) -> None:
        """Reset the recorded order of passes at the beginning of a step; report the step's phases to `observe`."""
        self._observe, self.order = observe, []

    def __call__(self, name: str, log_level: int = 0) -> _Timer:
        return _Timer(self, name)

    def started(self, name: str) -> None:
        """Report the phase and record the pass that begins when megatron-core starts its timer `name`."""
        if name in _PHASES:
            self._observe(_PHASES[name])
        elif self._stages > 1 and ("recv" in name or "send" in name or name == "embedding-grads-all-reduce"):
            # The start of a communication timer begins idle time. In interleaved schedules, the next pass ends it.
            self._observe(Phase.IDLE)
        if name.endswith("-compute"):
            self.order.append(name[0].upper())
            self.in_flight = max(self.in_flight, self.order.count("F") - self.order.count("B"))


class _Timer:
    """Replacement of a megatron-core timer: it reports its start to the recorder `PassTimers`, and measures no time."""

    def __init__(self, passes: PassTimers, name: str):
        self._passes, self._name = passes, name

    def start(self, barrier: bool = False) -> None:
        """Report to `PassTimers`, the recorder of a step's phases, that megatron-core starts this timer."""
        self._passes.started(self._name)

    def stop(self, barrier: bool = False) -> None:
        """Do nothing when megatron-core stops a timer, because the start of the next timer reports the next phase."""
