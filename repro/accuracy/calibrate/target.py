"""Rank process of a calibration, which measures operators, copies, host overhead and links while all ranks do so."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch

from repro.accuracy.calibrate import plan
from repro.accuracy.calibrate.benchmarks import (
    COLLECTIVES,
    OVERLAPPED,
    LaunchBench,
    LinkBench,
    time_silent_step,
)
from repro.accuracy.calibrate.calls import Call, bind, calls_of, choose
from repro.accuracy.calibrate.clock import OperatorClock
from repro.config import Experiment
from repro.config.enums import Phase
from repro.emulate import compute_rate
from repro.launch.job import Job
from repro.launch.rank.device_settings import rank_device
from repro.launch.rank.session import joined_process_group
from repro.launch.rank_process import HeartbeatWriter
from repro.measure.local_system import has_nvlink
from repro.measure.provenance import cpu, gpus, host_memory, versions
from repro.parallel import mesh as meshes
from repro.parallel.comm import Group
from repro.parallel.ledger import EXCHANGED, messages_of
from repro.parallel.transports import ranks_per_node
from repro.simulate.time.device import ALIGNMENT
from repro.simulate.time.emulated import RING_COLLECTIVE
from repro.util import processes
from repro.util.processes import CoreAssignment, count_compute_cores, usable_cores

CALLS_PER_OPERATOR, QUICK_CALLS_PER_OPERATOR = 6, 3
"""Number of measured calls of each operator, by default and with `--quick`; twice for matrix products and attention."""


def _measure(
    job: Job,
    *,
    rank: int,
    world: int,
    device: str,
    rendezvous: str,
    heartbeat: HeartbeatWriter,
    collectives: bool,
) -> dict[str, dict[str, Any]]:
    """Return this rank's measurements by experiment key: the first experiment has all of them, the others have none.

    `collectives`: measure the collectives of all groups, and not only messages and one ring collective of all ranks.
    """
    place = rank_device(device)
    quick = job.experiments[0].training.steps == plan.QUICK_REPEATS
    cores, carrying = usable_cores(), 0
    with joined_process_group(rank, world, place, rendezvous):
        per_node = ranks_per_node(world)
        groups = plan.group_kinds(world, per_node, device)
        chains = plan.pipeline_groups(world, per_node, device)
        if not collectives:
            processes.keep_freed_memory()
            divided = CoreAssignment(rank)
            divided.apply()
            cores, carrying = count_compute_cores(cores), len(divided.messages)
        all_ranks = next(iter(groups.values()), meshes.single_rank_mesh().world)
        clock = OperatorClock(place, all_ranks, job.experiments[0].training.steps, per_node, cores)
        count = 0

        def beat() -> None:
            nonlocal count
            count += 1
            heartbeat.phase(0, count, Phase.MEASURE)

        beat()
        result: dict[str, Any] = {
            "machine": machine(cores),
            "per_node": per_node,
            "threads": torch.get_num_threads(),
            "cache_bytes": clock.cache,
            "carrying": carrying,
        }
        began = time.perf_counter()
        launch = LaunchBench(clock, job.experiments[0])

        def between() -> None:
            beat()
            launch.sample()

        result["operators"] = operators(job.experiments, clock, quick, beat, between)
        result["launch"] = launch.result()
        if clock.ranks_per_core > 1:
            result["silent"] = []
            for experiment in job.experiments:
                if not experiment.training.dropout:  # operator rates do not include random-number generation
                    result["silent"].append(time_silent_step(experiment, clock, beat))
        result["copy"] = copies(clock, clock.device)
        if device == "cpu":
            result["products"] = products_of_a_core(rank % per_node, cores, all_ranks)
        if device == "cuda":
            result["host_copy"] = copies(clock, torch.device("cpu"))
        result["operators_s"] = time.perf_counter() - began
        if world > 1:
            began = time.perf_counter()
            payloads = plan.QUICK_PAYLOADS if quick else plan.PAYLOADS
            bench = LinkBench(clock, payloads[-1])
            measured = groups if collectives else dict(list(groups.items())[:1])
            timed = COLLECTIVES if collectives else (RING_COLLECTIVE,)
            result["links"] = bench.by_payload(measured, chains, payloads, beat, timed)
            # If collectives are not measured, the CPU thread's work on messages is measured separately.
            if not collectives:
                result["message_s"] = bench.message_s(RING_COLLECTIVE, all_ranks)
                exchanged = [bench.message_s(op, all_ranks) for op in EXCHANGED]
                result["exchange_s"] = statistics.fmean(exchanged) / messages_of(EXCHANGED[0], all_ranks.size)
                beat()
            result["overlap"] = {}
            for where in (plan.INSIDE, plan.BETWEEN):
                largest = next((group for kind, group in groups.items() if kind.place == where), None)
                if largest is not None:
                    ops = OVERLAPPED if collectives else (RING_COLLECTIVE,)
                    size = payloads[-1] // 4
                    costs = {op: bench.overlap_cost(op, size, largest, beat) for op in ops}
                    result["overlap"][where] = costs
            result["links_s"] = time.perf_counter() - began
        if clock.load:
            result["gpu_state"] = clock.load.medians()
        if device == "cuda":
            result["context_bytes"] = meshes.non_torch_bytes(place)
    return {experiment.key: result if i == 0 else {} for i, experiment in enumerate(job.experiments)}


run_rank = partial(_measure, collectives=True)
"""Function that each rank process of a machine's calibration runs."""
run_rank_of_twin = partial(_measure, collectives=False)
"""Function that each rank process runs to calibrate for scaled-down twins: only messages and one ring collective."""


def operators(
    experiments: Sequence[Experiment],
    clock: OperatorClock,
    quick: bool,
    beat: Callable[[], None],
    between: Callable[[], None],
) -> list[dict[str, Any]]:
    """Return a row for each measured operator call: name, bytes, flops, shapes and timing.

    Dropout and a vocabulary that is not a multiple of 8 make some operators slower, although their recorded calls are
    equal. Experiments with dropout or such a vocabulary add only operators that other experiments do not have. On a
    GPU, unaligned products are separate operators. `beat` reports progress; `between` is called after each operator.
    """
    on_gpu = clock.device.type == "cuda"
    by_name: dict[tuple[str, bool], list[Call]] = {}

    def kind(experiment: Experiment) -> tuple[bool, bool]:
        return experiment.training.dropout > 0, on_gpu and experiment.model.vocab % ALIGNMENT > 0

    for special, members in groupby(sorted(experiments, key=kind), key=kind):
        known = set(by_name) if any(special) else set()
        for experiment in members:
            for call in calls_of(experiment, gloo=not on_gpu):
                key = call.name, on_gpu and call.is_unaligned_product
                if key not in known:
                    by_name.setdefault(key, []).append(call)
            beat()
    rows = []
    generator = torch.Generator(device=clock.device).manual_seed(0)
    for (name, is_unaligned), calls in sorted(by_name.items()):
        few = QUICK_CALLS_PER_OPERATOR if quick else CALLS_PER_OPERATOR
        most = 2 * few if any(call.operator.shapes for call in calls) else few
        for call in choose(calls, most):
            found = clock.time(partial(bind, call, clock.device, generator), call.nbytes)
            row = {"name": name, "nbytes": call.nbytes, "flops": call.operator.flops}
            row |= {"shapes": call.operator.shapes, "is_unaligned": is_unaligned}
            rows.append(row | found._asdict())
            beat()
        between()
    return rows


def products_of_a_core(place: int, cores: int, group: Group) -> float | None:
    """Return this rank's FLOP/s of matrix products while `cores` ranks compute on one core each; None on other ranks.

    `place` is the index of this rank on its node; the first `cores` ranks measure. A run on an emulated network
    measures the same number to scale its link rates (`repro.emulate.compute_rate.rank_flops_per_s`).
    """
    group.barrier()
    found = compute_rate.core_flops_per_s() if place < cores else None
    group.barrier()
    return found


def machine(cores: int) -> dict[str, Any]:
    """Return processor, memory, GPUs and library versions of this rank's node; `cores` cores run computing ranks."""
    return {
        "cpu": cpu()["model"],
        "cores": cores,
        "memory": host_memory(),
        "gpus": gpus(),
        "nvlink": has_nvlink(),
        "versions": versions(["torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13"]),
    }


def copies(clock: OperatorClock, source: torch.device) -> dict[str, Any]:
    """Return bytes and timing of a copy of four times the cache size, on the device or from pinned host memory."""
    count = clock.cache
    here = source == clock.device
    original = torch.ones(count, device=source, pin_memory=not here)

    def make() -> Any:
        target = torch.empty(count, device=clock.device)
        return lambda: target.copy_(original, non_blocking=True)

    moved = 4 * count * (2 if here else 1)
    return {"nbytes": moved, **clock.time(make, moved)._asdict()}
