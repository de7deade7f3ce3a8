"""DeepSpeed engine: the `forward`, `backward` and `step` of DeepSpeed's own engine for every micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from repro.config import Experiment
from repro.config.enums import Phase
from repro.engines import EngineReport
from repro.engines.deepspeed import library, model_states
from repro.engines.deepspeed.model_states import States
from repro.engines.native.model_part import MicroBatch, learning_rate
from repro.parallel.mesh import Mesh
from repro.parallel.pipeline.runner import Observer
from repro.parallel.zero.optimizer import Norms


class DeepSpeedEngine:
    """Engine `deepspeed`: the suite's GPT under DeepSpeed."""

    def __init__(self, experiment: Experiment, mesh: Mesh, device: torch.device):
        layout, training = experiment.layout, experiment.training
        self.layout, self.training, self.mesh, self.device = layout, training, mesh, device
        deepspeed = library.import_deepspeed(device.type)
        library.join_process_group(device)
        self.version: str = deepspeed.__version__
        self.module_state = library.ModuleState()
        mpu = library.ModelParallelUnit(layout, mesh) if layout.tp > 1 else None
        self.configuration = library.configuration(experiment)
        with self.module_state.in_place():
            built = model_states.build_model(
                experiment, mesh, device, self._partition(mpu) if layout.zero == 3 else None
            )
            self.engine, *_ = deepspeed.initialize(
                model=built.model,
                optimizer=model_states.fused_adamw(built, training),
                lr_scheduler=self._schedule,
                mpu=mpu,
                dist_init_required=False,
                config=dict(self.configuration),
            )
            self.states = States(self.engine, layout)
            self.states.mark_whole_gradients()
            if layout.precision != "fp32":
                self.states.set_initial_values(built.values)
            if layout.has_checkpoints:
                deepspeed.checkpointing.configure(mpu, deepspeed_config=dict(self.configuration))
        self._splits, self.count = built.splits, built.count
        self._norm: Tensor | None = None
        """Gradient norm of stage 0 in fp32, which DeepSpeed's engine does not store."""
        if layout.zero == 0 and layout.precision == "fp32":
            self._store_norm()
        # DeepSpeed does not scale the loss of stage 0 (github.com/deepspeedai/DeepSpeed/pull/8393).
        is_unscaled = layout.zero == 0 and layout.precision == "fp16"
        self._unscaled: Any = self.engine.optimizer if is_unscaled else None
        """Optimizer whose loss scale this engine applies to the loss; None if DeepSpeed applies it."""

    def _partition(self, mpu: library.ModelParallelUnit | None) -> Callable[[Module], object]:
        """Return the function that partitions a new module in stage 3, so that no rank holds the full model."""
        from deepspeed.runtime.zero import Init

        group = None if mpu is None else mpu.get_data_parallel_group()
        settings = dict(self.configuration)
        return lambda module: Init(module, group, config_dict_or_path=settings, mpu=mpu)

    def _schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the suite's learning rate schedule; DeepSpeed does not advance it in a skipped step."""
        training = self.training
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda taken: float(learning_rate(training, torch.tensor(float(taken)))) / training.lr
        )

    def _store_norm(self) -> None:
        """Clip as DeepSpeed's engine does and store the norm; without clipping, compute the norm."""
        from deepspeed.runtime.utils import clip_grad_norm_

        engine, limit = self.engine, self.training.clip or float("inf")

        def clip() -> None:
            self._norm = clip_grad_norm_(engine.module.parameters(), limit, mpu=engine.mpu)

        engine.clip_fp32_gradients = clip
        engine.gradient_clipping = lambda: limit

    def step(self, micro_batches: Sequence[MicroBatch], observe: Observer) -> Norms:
        """Run the loop of DeepSpeed's documentation; the last `step` is the optimizer step."""
        total = torch.zeros((), device=self.device)
        last = len(micro_batches) - 1
        scale = self._unscaled.loss_scale if self._unscaled is not None else None
        with self.module_state.in_place():
            for i, batch in enumerate(micro_batches):
                observe(Phase.FORWARD)
                loss = self.engine(batch.tokens, batch.targets, batch.place)
                observe(Phase.BACKWARD)
                self.engine.backward(loss if scale is None else loss * scale)
                total += loss.detach()
                if i == last:
                    observe(Phase.OPTIMIZER)
                self.engine.step()
        mean = total / (len(micro_batches) * self.mesh.dp.size)
        self.mesh.dp.all_reduce(mean, purpose="loss").wait()
        skipped = float(not self.engine.was_step_applied())
        norm = self._gradient_norm(skipped) / (scale or 1.0)
        return Norms(norm, mean, torch.full_like(mean, skipped))

    def _gradient_norm(self, skipped: float) -> Tensor:
        norm = self._norm if self._norm is not None else self.engine.get_global_grad_norm()
        if skipped:
            norm = float("inf")
        return torch.as_tensor(norm, dtype=torch.float32, device=self.device).reshape(())

    def loss_scale(self) -> Tensor | None:
        """Return the dynamic loss scale (fp16)."""
        if self.layout.precision != "fp16":
            return None
        return torch.tensor(float(self.engine.optimizer.loss_scale), device=self.device)

    def synchronize(self) -> None:
        """Do nothing: DeepSpeed's step is synchronous."""

    def local_parameters(self) -> int:
        """Return the number of parameters of this rank's tp share."""
        return self.count

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a full copy of every (tp-local) parameter, by name."""
        with self.module_state.in_place():
            return self.states.full_parameters()

    def splits(self) -> dict[str, int | None]:
        """Return the dimension along which tp splits each parameter, by name."""
        return self._splits

    def padding(self) -> int:
        """Return the padding elements of the flat buffers over all ranks of dp."""
        return self.states.elements() - self.count

    def mark_states(self) -> None:
        """Mark the states of DeepSpeed's optimizer and its communication buffers."""
        self.states.mark()

    def report(self) -> EngineReport:
        """Report DeepSpeed around this suite's model."""
        return EngineReport(
            f"DeepSpeed {self.version}",
            "engine, ZeRO and activation checkpointing; the model, its kernels and tensor parallelism are this "
            "suite's, AdamW is torch's",
            self.configuration,
        )

    def pipeline_report(self) -> dict[str, Any]:
        """Return {}: DeepSpeed runs one stage."""
        return {}
