"""Engine `native`: the suite's own training step, on real devices or on `meta` tensors for a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from repro.config import Experiment
from repro.config.engines import capture_obstacle
from repro.config.enums import Category, Phase
from repro.engines import EngineReport
from repro.engines.native.cuda_graphs import CapturedMicroBatches
from repro.engines.native.model_part import MicroBatch, ModelPart, learning_rate
from repro.parallel.mesh import Mesh
from repro.parallel.pipeline.runner import Observer, Pipeline
from repro.parallel.pipeline.schedule import build_schedule, in_flight
from repro.parallel.storage import DTYPES, empty
from repro.parallel.zero.optimizer import GradientShards, LossScaler, Norms, ShardedAdamW, divisor_for
from repro.parallel.zero_r.activation_checkpointing import ActivationCheckpoints


class NativeEngine:
    """Engine `native`: model, sharded model states and training step of one experiment on one rank."""

    def __init__(self, experiment: Experiment, mesh: Mesh, device: torch.device):
        layout, training = experiment.layout, experiment.training
        self.layout, self.training, self.mesh = layout, training, mesh
        self.checkpoints: ActivationCheckpoints | None = None
        parts = layout.parts(experiment.model.layers)
        if layout.has_checkpoints:
            actions = build_schedule(layout.schedule, layout.pp, layout.accumulation, layout.chunks)[
                mesh.pp.rank
            ]
            most = max(len(layers) for layers in parts[mesh.pp.rank :: layout.pp])
            self.checkpoints = ActivationCheckpoints(layout, mesh.tp, capacity=in_flight(actions) * most)
        self.parts = [
            ModelPart(experiment, mesh, device, chunk, parts, self.checkpoints)
            for chunk in range(layout.chunks)
        ]
        """Parts of the model on this rank, one for each chunk of its pipeline stage."""
        seq = experiment.seq // layout.cp // (layout.tp if layout.sp else 1)
        self.pipeline = Pipeline(
            layout,
            mesh.pp,
            mesh.tp,
            self.parts,
            (layout.micro_batch, seq, experiment.model.hidden),
            torch.empty(0, dtype=DTYPES[layout.precision], device=device),
        )
        self.buckets = [bucket for part in self.parts for bucket in part.sharded.buckets]
        self.placeholders: list[Tensor] = []
        """Unused 16-bit gradients, one per shape of weight matrices, as Megatron-core of 2025 allocates them."""
        if layout.kernels.fuses_gradient_accumulation:
            shapes = set().union(*(part.model.matrix_shapes() for part in self.parts))
            like = self.buckets[0].full
            self.placeholders = [empty(m * n, like, Category.OTHER) for m, n in sorted(shapes)]
        self.gradients = GradientShards(self.buckets, mesh, layout.kernels)
        decays, betas = (training.weight_decay, 0.0), (training.beta1, training.beta2)
        self.optimizer = ShardedAdamW(self.buckets, decays, *betas, training.eps, layout.kernels)
        self.scaler: LossScaler | None = None
        if layout.precision == "fp16":
            self.scaler = LossScaler(
                training.loss_scale, training.loss_scale_window, training.loss_scale_hysteresis, device
            )
        self.captured: CapturedMicroBatches | None = None
        """Micro-batches that run as CUDA graphs; None if the layout does not request or allow graphs."""
        self._capture_obstacle = capture_obstacle(layout, training)
        if device.type != "cuda":
            self._capture_obstacle = f"the device is {device.type}, and CUDA graphs need a GPU"
        if layout.cuda_graphs and not self._capture_obstacle:
            self.captured = CapturedMicroBatches(self.parts[0], layout.accumulation, self.loss_scale())

    def step(self, micro_batches: Sequence[MicroBatch], observe: Observer) -> Norms:
        """Run all micro-batches, average and clip the gradients, and update and gather the parameters."""
        own = [batch.of_rank(self.mesh.cp) for batch in micro_batches]
        if self.captured is not None and self.captured.begin_step():
            loss = self.captured.run(own, observe)
        else:
            for part in self.parts:
                part.micro_batches = own
            loss = self.pipeline.run(self.loss_scale(), observe)
        for part in self.parts:
            part.finish()
        observe(Phase.OPTIMIZER)
        with torch.no_grad():
            return self._update(loss, observe if self.mesh.pp.size > 1 else lambda phase: None)

    def _update(self, loss: Tensor, observe: Observer) -> Norms:
        scaler = self.scaler
        scale = None if scaler is None else scaler.scale
        norms = self.gradients.agree(loss, scale, observe)
        carried = None if self.layout.kernels.in_passes else scale
        self.optimizer.update(
            self.gradients.shards,
            learning_rate(self.training, self.optimizer.step_count),
            divisor_for(norms.gradient, self.training.clip, carried),
            None if scaler is None else norms.overflow,
        )
        self.gradients.release()
        if scaler is not None:
            scaler.update(norms.overflow)
        for part in self.parts:
            part.sharded.all_gather_params()
        return norms

    def loss_scale(self) -> Tensor | None:
        """Return the dynamic loss scale of fp16 training, 0-dim; None in other precisions."""
        return None if self.scaler is None else self.scaler.scale

    def synchronize(self) -> None:
        """Wait for the all-gather of the parameters that the last step updated."""
        for part in self.parts:
            part.sharded.wait()

    def local_parameters(self) -> int:
        """Return the number of model parameters on this tp rank and pipeline stage."""
        return sum(bucket.plan.numel for bucket in self.buckets)

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter of the stage by name, gathered over dp but local to the tp rank."""
        return {name: value for part in self.parts for name, value in part.full_parameters().items()}

    def splits(self) -> dict[str, int | None]:
        """Return the dimension along which tp splits each parameter (None: not split), by its name in the model."""
        return {name: split for part in self.parts for name, split in part.splits().items()}

    def padding(self) -> int:
        """Return the number of padding elements in all parameter buckets."""
        return sum(part.sharded.padding for part in self.parts)

    def mark_states(self) -> None:
        """Do nothing, because buckets set the memory categories of their buffers at creation."""

    def report(self) -> EngineReport:
        """Return the description of the step's software (this suite), and whether CUDA graphs were captured."""
        graphs = {"cuda_graphs": self._capture_obstacle or "captured"} if self.layout.cuda_graphs else {}
        return EngineReport(
            "repro",
            "this suite provides model, parallelism and kernels; torch provides other operators",
            graphs,
        )

    def pipeline_report(self) -> dict[str, Any]:
        """Return pipeline stage and maximum number of in-flight (micro-batch, chunk) pairs; {} without a pipeline."""
        if self.mesh.pp.size == 1:
            return {}
        return {"stage": self.mesh.pp.rank, "in_flight": self.pipeline.in_flight}
