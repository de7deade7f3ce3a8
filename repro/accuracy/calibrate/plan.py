"""What is measured: the steps whose operators are taken, and the sizes of messages.  Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from repro.config import Experiment, Layout, Limits, Model, OperatorSet, Training
from repro.config.errors import ConfigError
from repro.config.suites import Suite

LIMITS = Limits(timeout_s=3600.0, hang_s=120.0)
"""Many suites of sixteen ranks take long; one that makes no progress is given up soon."""
CPU_SIZES = ((64, 64, 1, 512), (256, 128, 4, 2048), (768, 256, 4, 8192))
"""Width, tokens of a sample, samples of a micro-batch and vocabulary of the models whose operators are measured
on processors, from what a test trains to what a laptop can."""
GPU_SIZES = ((256, 128, 4, 2048), (1024, 1024, 4, 50304), (3072, 1024, 4, 8192))
QUICK_SIZES = ((32, 32, 1, 128), (64, 64, 4, 512))
CPU_HEAD, GPU_HEAD = 32, 64
"""Width of a head."""
PAYLOADS = tuple(2**k for k in range(10, 27, 2))
"""1 KiB to 64 MiB."""
QUICK_PAYLOADS = (2**10, 2**14, 2**18, 2**24)
REPEATS, QUICK_REPEATS = 7, 3


def of_suites(suites: Sequence[Suite], system: str, ranks: int, quick: bool) -> list[Experiment]:
    """The steps of suites that are run here with so many ranks: their operators in their own sizes.

    Those that differ in their network alone are one.  Raises `ConfigError` if a suite has none.
    """
    repeats = QUICK_REPEATS if quick else REPEATS
    found: dict[str, Experiment] = {}
    for suite in suites:
        here = [
            e.experiment
            for e in suite.entries
            if (e.experiment.system, e.experiment.layout.world) == (system, ranks)
        ]
        if not here:
            raise ConfigError(
                "--suite", suite.file, f"a suite with experiments of {ranks} ranks of system {system}"
            )
        for e in here:
            training = replace(e.training, steps=repeats, untimed_steps=1)
            alone = replace(e, network=None, training=training, limits=LIMITS)
            found.setdefault(alone.key, alone)
    return list(found.values())


def experiments(
    system: str, gpus: int, precision: str, quick: bool, *, per_node: int = 0
) -> list[Experiment]:
    """The steps whose operators are measured, and as `training.steps` the repeats.  `gpus`: all ranks.

    Each size under data parallelism; all but the largest also under ZeRO 3 with recomputation, with dropout, with
    the kernels of earlier software, and under tensor and sequence parallelism within a node (`per_node` ranks,
    by default all) and pipeline parallelism where the devices divide: these have operators of their own.
    """
    tp = per_node or gpus
    on_cpu = system == "local"
    sizes = QUICK_SIZES if quick else CPU_SIZES if on_cpu else GPU_SIZES
    head = CPU_HEAD if on_cpu else GPU_HEAD
    repeats = QUICK_REPEATS if quick else REPEATS
    found = []

    def add(
        name: str, size: tuple[int, int, int, int], layers: int = 2, dropout: float = 0.0, **keys: Any
    ) -> None:
        hidden, seq, micro_batch, vocab = size
        replicas = keys.get("dp", 1)
        # Three micro-batches: the first, an ordinary one and the last one differ.
        batch = 3 * micro_batch * replicas
        model = Model(
            name=f"calibrate-{hidden}",
            layers=layers,
            hidden=hidden,
            heads=hidden // head,
            vocab=vocab,
            seq=seq,
        )
        layout = Layout(micro_batch=micro_batch, global_batch=batch, precision=precision, **keys)
        training = Training(steps=repeats, untimed_steps=1, dropout=dropout)
        found.append(
            Experiment(name=name, model=model, layout=layout, training=training, system=system, limits=LIMITS)
        )

    for size in sizes:
        add(f"dp-{size[0]}", size, dp=gpus, zero=1 if gpus > 1 else 0)
    for size in sizes[: 1 if quick else 2]:
        add(f"zero3-{size[0]}", size, dp=gpus, zero=3, recompute=True)
        add(f"dropout-{size[0]}", size, dp=gpus, dropout=0.1)
        for operators in (OperatorSet.SOFTMAX, OperatorSet.UNFUSED):
            add(f"{operators}-{size[0]}", size, dp=gpus, kernels=operators)
        if tp > 1 and size[0] // head % tp == 0:
            add(f"tp-{size[0]}", size, tp=tp, dp=gpus // tp)
            add(f"sp-{size[0]}", size, tp=tp, dp=gpus // tp, sp=True)
    if gpus > 1:
        add("pp", sizes[0], layers=gpus, pp=gpus)
    return found
