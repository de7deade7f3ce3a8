"""One step by DeepSpeed: its engine's `forward`, `backward` and `step` for every micro-batch, as its users write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from repro.config import Experiment
from repro.config.enums import Phase
from repro.engines.about import EngineReport
from repro.engines.deepspeed import library, model
from repro.engines.deepspeed.config import configuration
from repro.engines.deepspeed.states import States
from repro.engines.deepspeed.topology import Topology
from repro.engines.native.learning_rate import learning_rate
from repro.engines.native.part import MicroBatch
from repro.parallel.mesh import Mesh
from repro.parallel.pipeline.runner import Observer
from repro.parallel.zero.optimizer import Norms


class DeepSpeedEngine:
    """The suite's GPT under DeepSpeed; the same `Engine` interface as ours."""

    def __init__(self, experiment: Experiment, mesh: Mesh, device: torch.device):
        layout, training = experiment.layout, experiment.training
        self.layout, self.training, self.mesh, self.device = layout, training, mesh, device
        deepspeed = library.load(device.type)
        library.join(device)
        self.version: str = deepspeed.__version__
        self.globals = library.Globals()
        topology = Topology(layout, mesh) if layout.tp > 1 else None
        self.configuration = configuration(experiment.model, layout, training)
        with self.globals.in_place():
            built = model.build(
                experiment, mesh, device, self._partition(topology) if layout.zero == 3 else None
            )
            self.engine, *_ = deepspeed.initialize(
                model=built.model,
                optimizer=model.optimizer(built, training),
                lr_scheduler=self._schedule,
                mpu=topology,
                dist_init_required=False,
                config=dict(self.configuration),
            )
            self.states = States(self.engine, layout)
            self.states.mark_whole_gradients()
            if layout.precision != "fp32":
                self.states.begin(built.values)
            if layout.recompute:
                deepspeed.checkpointing.configure(topology, deepspeed_config=dict(self.configuration))
        self._splits, self.count = built.splits, built.count
        self._norm: Tensor | None = None
        """Of the gradients of stage 0 in fp32, whose norm DeepSpeed's engine does not keep."""
        if layout.zero == 0 and layout.precision == "fp32":
            self._keep_norm()
        # Its engine forgets to scale the loss of stage 0 (github.com/deepspeedai/DeepSpeed/pull/8393).
        forgets = layout.zero == 0 and layout.precision == "fp16"
        self._unscaled: Any = self.engine.optimizer if forgets else None
        """The optimizer whose loss scale the loss has to be given here."""

    def _partition(self, topology: Topology | None) -> Callable[[Module], object]:
        """Stage 3 partitions a module as soon as it is there: no rank ever holds the whole model."""
        from deepspeed.runtime.zero import Init

        group = None if topology is None else topology.get_data_parallel_group()
        settings = dict(self.configuration)
        return lambda module: Init(module, group, config_dict_or_path=settings, mpu=topology)

    def _schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """The suite's learning rate; DeepSpeed does not step it when it skips one."""
        training = self.training
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda taken: float(learning_rate(training, torch.tensor(float(taken)))) / training.lr
        )

    def _keep_norm(self) -> None:
        """Clip as its engine does, but keep what the clipping returns; without clipping, take the norm."""
        from deepspeed.runtime.utils import clip_grad_norm_

        engine, limit = self.engine, self.training.clip or float("inf")

        def clip() -> None:
            self._norm = clip_grad_norm_(engine.module.parameters(), limit, mpu=engine.mpu)

        engine.clip_fp32_gradients = clip
        engine.gradient_clipping = lambda: limit

    def step(self, micro_batches: Sequence[MicroBatch], observe: Observer) -> Norms:
        """The loop of DeepSpeed's documentation; its last `step` is the optimizer's."""
        total = torch.zeros((), device=self.device)
        last = len(micro_batches) - 1
        scale = self._unscaled.loss_scale if self._unscaled is not None else None
        with self.globals.in_place():
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
        """The dynamic loss scale (fp16)."""
        if self.layout.precision != "fp16":
            return None
        return torch.tensor(float(self.engine.optimizer.loss_scale), device=self.device)

    def synchronize(self) -> None:
        """DeepSpeed's steps leave nothing under way."""

    def local_parameters(self) -> int:
        """Parameters of this rank's tp share."""
        return self.count

    def full_parameters(self) -> dict[str, Tensor]:
        """A copy of every (tp-local) parameter, complete, by name."""
        with self.globals.in_place():
            return self.states.full_parameters()

    def splits(self) -> dict[str, int | None]:
        """The dimension along which tp splits each parameter, by name."""
        return self._splits

    def padding(self) -> int:
        """Elements of the flat buffers, over all ranks of dp, beyond the parameters."""
        return self.states.elements() - self.count

    def mark_states(self) -> None:
        """Mark what DeepSpeed's optimizer holds now, and what it sends gradients from."""
        self.states.mark()

    def about(self) -> EngineReport:
        """DeepSpeed around this suite's model."""
        return EngineReport(
            f"DeepSpeed {self.version}",
            "engine, ZeRO and activation checkpointing; the model, its kernels and tensor parallelism are this "
            "suite's, AdamW is torch's",
            self.configuration,
        )

    def pipeline_report(self) -> dict[str, Any]:
        """Nothing: there is one stage."""
        return {}
