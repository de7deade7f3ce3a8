"""Plan of a calibration: the training steps whose operators it measures, the message sizes, and the groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from repro.config import Experiment, Layout, Limits, Model, OperatorSet, Training
from repro.config.errors import ConfigError
from repro.config.suites import Suite
from repro.simulate.time.network import GroupSpan

if TYPE_CHECKING:
    from repro.parallel.comm import Group


LIMITS = Limits(timeout_s=3600.0, hang_s=120.0)
"""Time limits of a calibration: enough for long suites on sixteen ranks, and a short limit to detect a hang."""
CPU_SIZES = ((64, 64, 1, 512), (256, 128, 4, 2048), (768, 256, 4, 8192))
"""Sizes (width, tokens per sample, samples per micro-batch, vocabulary) of the models measured on processors, from the
size of a test to the largest size for a laptop."""
GPU_SIZES = ((256, 128, 4, 2048), (1024, 1024, 4, 50304), (3072, 1024, 4, 8192))
CPU_QUICK_SIZES = ((32, 32, 1, 128), (64, 64, 4, 512))
GPU_QUICK_SIZES = ((256, 128, 4, 2048), (1024, 1024, 4, 50304))
UNALIGNED_SIZES = ((256, 128, 4, 2049), (1024, 1024, 4, 50257), (2048, 1024, 8, 50257))
"""Sizes of additional models on GPUs; their vocabulary is no multiple of 8, for which tensor cores are slow."""
CPU_HEAD, GPU_HEAD = 32, 64
"""Widths of an attention head in the models measured on processors and GPUs."""
PAYLOADS = tuple(2**k for k in range(10, 27, 2))
"""Payloads of the measured messages and collectives, in bytes: 1 KiB to 64 MiB."""
QUICK_PAYLOADS = (2**10, 2**14, 2**18, 2**24)
REPEATS, QUICK_REPEATS = 7, 3


def suite_experiments(suites: Sequence[Suite], system: str, ranks: int, quick: bool) -> list[Experiment]:
    """Return the distinct experiments of `suites` on `system` with `ranks` ranks, without their emulated networks.

    Raises:
        ConfigError: A suite has no such experiment.
    """
    repeats = QUICK_REPEATS if quick else REPEATS
    found: dict[str, Experiment] = {}
    for suite in suites:
        every = [entry.experiment for entry in suite.entries]
        here = [e for e in every if (e.system, e.layout.world) == (system, ranks)]
        if not here:
            right = f"a suite with experiments of {ranks} ranks on system {system}"
            raise ConfigError("--suite", suite.file, right)
        for e in here:
            training = replace(e.training, steps=repeats, untimed_steps=1)
            alone = replace(e, network=None, training=training, limits=LIMITS)
            found.setdefault(alone.key, alone)
    return list(found.values())


def step_experiments(
    system: str, gpus: int, precision: str, quick: bool, *, per_node: int = 0
) -> list[Experiment]:
    """Return the experiments whose operators a calibration measures; `training.steps` is the number of repeats.

    Every size runs with data parallelism. The smaller sizes also run with every strategy that has additional operators:
    ZeRO 3 with recomputation, dropout, the kernels of earlier software, and tensor, sequence and pipeline parallelism.
    On GPUs, models with `UNALIGNED_SIZES` follow. `gpus` is the total number of ranks. The tensor-parallel degree is
    the number of ranks per node, `per_node` (0: all ranks).
    """
    tp = per_node or gpus
    on_cpu = system == "local"
    head = CPU_HEAD if on_cpu else GPU_HEAD
    full, few = (CPU_SIZES, CPU_QUICK_SIZES) if on_cpu else (GPU_SIZES, GPU_QUICK_SIZES)
    shapes: Sequence[tuple[int, int, int, int]] = few if quick else full
    repeats = QUICK_REPEATS if quick else REPEATS
    found = []

    def add(
        name: str, size: tuple[int, int, int, int], layers: int = 2, dropout: float = 0.0, **keys: Any
    ) -> None:
        hidden, seq, micro_batch, vocab = size
        replicas = keys.get("dp", 1)
        # Three micro-batches, because the first, the middle and the last one run different operators.
        batch = 3 * micro_batch * replicas
        sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": hidden // head}
        model = Model(name=f"calibrate-{hidden}", vocab=vocab, seq=seq, **sizes)
        layout = Layout(micro_batch=micro_batch, global_batch=batch, precision=precision, **keys)
        training = Training(steps=repeats, untimed_steps=1, dropout=dropout)
        parts: dict[str, Any] = {"model": model, "layout": layout, "training": training}
        found.append(Experiment(name=name, system=system, limits=LIMITS, **parts))

    for size in shapes:
        add(f"dp-{size[0]}", size, dp=gpus, zero=1 if gpus > 1 else 0)
    for size in shapes[: 1 if quick else 2]:
        add(f"zero3-{size[0]}", size, dp=gpus, zero=3, recompute=True)
        add(f"dropout-{size[0]}", size, dp=gpus, dropout=0.1)
        for operators in (OperatorSet.SOFTMAX, OperatorSet.UNFUSED):
            add(f"{operators}-{size[0]}", size, dp=gpus, kernels=operators)
        if tp > 1 and size[0] // head % tp == 0:
            add(f"tp-{size[0]}", size, tp=tp, dp=gpus // tp)
            add(f"sp-{size[0]}", size, tp=tp, dp=gpus // tp, sp=True)
    if gpus > 1:
        add("pp", shapes[0], layers=gpus, pp=gpus)
    if not on_cpu:
        for size in UNALIGNED_SIZES[: 2 if quick else None]:
            add(f"unaligned-{size[0]}", size, layers=1, dp=gpus)
    return found


INSIDE, BETWEEN = "inside", "between"
"""Locations of a communication group: inside one node, or between nodes."""


class GroupKind(GroupSpan):
    """Kind of communication groups that together contain all ranks, such as the tp groups, and communicate at once."""

    @property
    def place(self) -> str:
        """Return the location of the groups: `INSIDE` one node, or `BETWEEN` nodes if they span several."""
        return INSIDE if self.per_node == self.ranks else BETWEEN


def group_kinds(world: int, per_node: int, device_type: str) -> dict[GroupKind, Group]:
    """Return this rank's communication group of each kind, the largest group first.

    The kinds are the tp and dp groups of every tensor-parallel degree that divides a node, and the group of all ranks.
    """
    from repro.parallel import mesh as meshes

    if world == 1:
        return {}
    found = {GroupKind(world, per_node, 1): meshes.distributed_mesh(Layout(dp=world), device_type).world}
    for tp in range(2, per_node + 1):
        if per_node % tp or tp == world:
            continue
        mesh = meshes.distributed_mesh(Layout(tp=tp, dp=world // tp), device_type)
        found[GroupKind(tp, tp, 1)] = mesh.tp
        found[GroupKind(world // tp, per_node // tp, tp)] = mesh.dp
    return dict(sorted(found.items(), key=lambda item: (-item[0].ranks, item[0].stride)))


def pipeline_groups(world: int, per_node: int, device_type: str) -> dict[str, Group]:
    """Return this rank's pipeline groups by location: the ranks of one node, and one rank of each node."""
    from repro.parallel import mesh as meshes

    found = {}
    if per_node > 1:
        layout = Layout(pp=per_node, dp=world // per_node, order="pp-dp-tp")
        found[INSIDE] = meshes.distributed_mesh(layout, device_type).pp
    if world > per_node:
        layout = Layout(dp=per_node, pp=world // per_node)
        found[BETWEEN] = meshes.distributed_mesh(layout, device_type).pp
    return found
