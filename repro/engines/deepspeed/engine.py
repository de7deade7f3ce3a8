"""Training step by `forward`, `backward` and `step` of DeepSpeed's engine, and the setup of the library.

A process runs several experiments, but DeepSpeed stores the `mpu` and activation checkpointing in module variables and
replaces `torch.nn.functional.linear`. An `Exchange` activates an experiment's values of these variables.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from repro.config import Experiment, Layout
from repro.config.enums import Phase
from repro.engines import Attribute, EngineReport, Exchange
from repro.engines.deepspeed import model_states
from repro.engines.deepspeed.model_states import States
from repro.engines.frameworks.files import nested
from repro.engines.frameworks.rules import load_framework
from repro.engines.frameworks.table import settings_of
from repro.engines.native.model_part import MicroBatch, learning_rate
from repro.parallel import mesh as meshes
from repro.parallel.mesh import Mesh
from repro.parallel.pipeline.runner import Observer
from repro.parallel.zero.optimizer import Norms

_MODULE_VARIABLES = {
    "torch.nn.functional": ("linear",),  # ZeRO stage 3 of DeepSpeed replaces `torch.nn.functional.linear`.
    "deepspeed.utils.groups": ("mpu",),
    "deepspeed.runtime.activation_checkpointing.checkpointing": (
        *("mpu", "mp_rank", "mp_size", "mp_group", "num_layers", "deepspeed_checkpointing_enabled"),
        *(
            "PARTITION_ACTIVATIONS",
            "CPU_CHECKPOINT",
            "CONTIGUOUS_CHECKPOINTING",
            "SYNCHRONIZE",
            "PROFILE_TIME",
        ),
        *("contiguous_data_buffers", "data_offsets", "contiguous_size_buffers", "size_offsets"),
        *("timers", "_cpu_offload_engine", "_checkpoint_grad_enabled"),
    ),
}
"""Attributes of Python modules that DeepSpeed sets for an experiment, by module."""


def import_deepspeed(device_type: str) -> ModuleType:
    """Import DeepSpeed for the device type `cpu` or `cuda`, and limit its log to errors."""
    if device_type == "cpu":
        # Without the environment variable DS_ACCELERATOR, DeepSpeed queries the GPU driver.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The import makes setuptools warn about distutils.
        library = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Ignore warnings, since DeepSpeed calls torch's collectives by deprecated names.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if device_type == "cpu":
        # DeepSpeed refuses fp16 on CPUs without fp16 instructions, on which torch can compute in fp16.
        library.accelerator.get_accelerator().is_fp16_supported = lambda: True
    # Prevent the first collective from compiling DeepSpeed's shared-memory reduction, which only inference needs.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return library


def join_process_group(device: torch.device) -> None:
    """Initialise the process group of torch and of DeepSpeed, which DeepSpeed needs even with one rank."""
    os.environ["LOCAL_RANK"] = str(device.index or 0)  # DeepSpeed reads the GPU's index from LOCAL_RANK.
    meshes.ensure_process_group(device)
    from deepspeed import comm

    comm.init_distributed(verbose=False)


def library_variables() -> dict[Attribute, Any]:
    """Return DeepSpeed's module variables that depend on an experiment, with their values after the import."""
    owners = [(importlib.import_module(name), names) for name, names in _MODULE_VARIABLES.items()]
    values = {(owner, name): getattr(owner, name) for owner, names in owners for name in names}
    return {key: type(value)() if isinstance(value, list) else value for key, value in values.items()}


def configuration(experiment: Experiment) -> dict[str, Any]:
    """Return the experiment's `config` for `deepspeed.initialize`, with the options in `frameworks/deepspeed.toml`.

    Settings that no key of the layout determines have DeepSpeed's defaults, except four sizes of stage 3. With the
    default sizes, DeepSpeed would gather a small model once and retain it.
    """
    return nested(load_framework("deepspeed").options_of(settings_of(experiment)))


def model_parallel_unit(layout: Layout, mesh: Mesh) -> SimpleNamespace:
    """Return the tp and dp groups of a layout as the `mpu` (Megatron-LM's model-parallel unit) that DeepSpeed expects.

    This suite implements tensor parallelism, and DeepSpeed applies ZeRO over dp, as in its release of February 2020.
    Every rank must call this function, because it creates the process groups of all ranks.
    """
    unit = SimpleNamespace()
    for kind, axis, group in (("model", "tp", mesh.tp), ("data", "dp", mesh.dp)):
        values = {"rank": group.rank, "world_size": group.size, "group": _process_group(layout, axis)}
        for name, value in values.items():
            setattr(unit, f"get_{kind}_parallel_{name}", partial(lambda value: value, value))
    return unit


def _process_group(layout: Layout, axis: str) -> dist.ProcessGroup:
    """Return this rank's process group along parallel axis `axis`, even if the group has only one rank."""
    found = [(ranks, meshes.make_process_group(ranks)) for ranks in meshes.groups(layout, axis)]
    return next(group for ranks, group in found if dist.get_rank() in ranks)


class DeepSpeedEngine:
    """Engine `deepspeed`: the suite's GPT on one rank, trained by DeepSpeed."""

    def __init__(self, experiment: Experiment, mesh: Mesh, device: torch.device):
        layout, training = experiment.layout, experiment.training
        self.layout, self.training, self.mesh, self.device = layout, training, mesh, device
        deepspeed = import_deepspeed(device.type)
        join_process_group(device)
        self.version: str = deepspeed.__version__
        self.active = Exchange(library_variables())
        """Context in which the module variables of DeepSpeed are those of this experiment."""
        mpu = model_parallel_unit(layout, mesh) if layout.tp > 1 else None
        self.configuration = configuration(experiment)
        with self.active:
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
        """Global gradient norm of the last fp32 step at ZeRO stage 0, for which DeepSpeed stores no norm; else None."""
        if layout.zero == 0 and layout.precision == "fp32":
            self._store_norm()
        # Under stage 0, DeepSpeed does not apply the loss scale (github.com/deepspeedai/DeepSpeed/pull/8393).
        is_unscaled = layout.zero == 0 and layout.precision == "fp16"
        self._unscaled: Any = self.engine.optimizer if is_unscaled else None
        """DeepSpeed's optimizer if this engine must apply the loss scale to the loss; None if DeepSpeed applies it."""

    def _partition(self, mpu: SimpleNamespace | None) -> Callable[[Module], object]:
        """Return a function that partitions a new module by ZeRO stage 3, so that no rank ever has the full model."""
        from deepspeed.runtime.zero import Init

        group = None if mpu is None else mpu.get_data_parallel_group()
        settings = dict(self.configuration)
        return lambda module: Init(module, group, config_dict_or_path=settings, mpu=mpu)

    def _schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Return this suite's learning rates as a torch scheduler, which DeepSpeed advances except in skipped steps."""
        training = self.training
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda taken: float(learning_rate(training, torch.tensor(float(taken)))) / training.lr
        )

    def _store_norm(self) -> None:
        """Replace DeepSpeed's clipping of fp32 gradients by a function that stores the norm, even without a limit."""
        from deepspeed.runtime.utils import clip_grad_norm_

        engine, limit = self.engine, self.training.clip or float("inf")

        def clip() -> None:
            self._norm = clip_grad_norm_(engine.module.parameters(), limit, mpu=engine.mpu)

        engine.clip_fp32_gradients = clip
        engine.gradient_clipping = lambda: limit

    def step(self, micro_batches: Sequence[MicroBatch], observe: Observer) -> Norms:
        """Run DeepSpeed's forward, backward and `step` for each micro-batch; the last `step` updates the parameters."""
        total = torch.zeros((), device=self.device)
        last = len(micro_batches) - 1
        scale = self._unscaled.loss_scale if self._unscaled is not None else None
        with self.active:
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
        """Return the dynamic loss scale of fp16 training, 0-dim; None in other precisions."""
        if self.layout.precision != "fp16":
            return None
        return torch.tensor(float(self.engine.optimizer.loss_scale), device=self.device)

    def synchronize(self) -> None:
        """Do nothing: no communication of DeepSpeed continues after a step."""

    def local_parameters(self) -> int:
        """Return the number of model parameters on this tp rank, before ZeRO shards them."""
        return self.count

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter by name, gathered over dp but local to the tp rank."""
        with self.active:
            return self.states.full_parameters()

    def splits(self) -> dict[str, int | None]:
        """Return the dimension along which tp splits each parameter, by name; None if tp does not split it."""
        return self._splits

    def padding(self) -> int:
        """Return the number of padding elements in DeepSpeed's flat buffers, summed over the dp ranks."""
        return self.states.elements() - self.count

    def mark_states(self) -> None:
        """Set the memory category of DeepSpeed's parameters, gradients, optimizer states and communication buffers."""
        self.states.mark()

    def report(self) -> EngineReport:
        """Return the version and the configuration of DeepSpeed, for the record of an experiment."""
        return EngineReport(
            f"DeepSpeed {self.version}",
            "DeepSpeed provides engine, ZeRO and activation checkpointing; this suite provides the model, its kernels "
            "and tensor parallelism; torch provides AdamW",
            self.configuration,
        )

    def pipeline_report(self) -> dict[str, Any]:
        """Return {}, instead of in-flight micro-batches of a stage, because this engine has no pipeline parallelism."""
        return {}
