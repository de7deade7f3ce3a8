"""What one rank of `repro calibrate` does: measure operators, copies, launches and links, all ranks at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from repro.accuracy.calibrate.calls import Call, bind, calls_of, choose
from repro.accuracy.calibrate.clock import OperatorClock
from repro.accuracy.calibrate.launch import LaunchBench
from repro.accuracy.calibrate.links import COLLECTIVES, OVERLAPPED, LinkBench
from repro.accuracy.calibrate.plan import PAYLOADS, QUICK_PAYLOADS, QUICK_REPEATS
from repro.accuracy.calibrate.silent import silent_step
from repro.accuracy.calibrate.spans import BETWEEN, INSIDE, kinds, pipelines
from repro.config import Experiment
from repro.config.enums import Phase
from repro.emulate import compute_rate
from repro.launch.heartbeat import HeartbeatWriter
from repro.launch.job import Job
from repro.launch.rank.device_settings import rank_device
from repro.launch.rank.session import process_group
from repro.measure.local_system import has_nvlink
from repro.measure.provenance import cpu, gpus, host_memory, versions
from repro.parallel import mesh as meshes
from repro.parallel.comm import Group
from repro.parallel.gloo_ring import ranks_per_node
from repro.parallel.ledger import EXCHANGED, messages_of
from repro.simulate.time.emulated import RING_COLLECTIVE
from repro.util import processes
from repro.util.processes import CoreAssignment, count_compute_cores, usable_cores

MOST_CALLS, QUICK_CALLS = 6, 3
"""Sizes at which an operator is measured; products and attention, whose shapes matter, at twice as many."""


def run_rank(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, heartbeat: HeartbeatWriter
) -> dict[str, dict[str, Any]]:
    """Measure on this rank.  The first experiment's result holds everything; the others are only traced."""
    return _measure(job, rank, world, device, rendezvous, heartbeat, collectives=True)


def run_rank_of_twin(
    job: Job, *, rank: int, world: int, device: str, rendezvous: str, heartbeat: HeartbeatWriter
) -> dict[str, dict[str, Any]]:
    """As `run_rank`, but of what ranks send each other only single messages and the ring of all of them, which says
    what messages cost the cores: the links of a twin are emulated."""
    return _measure(job, rank, world, device, rendezvous, heartbeat, collectives=False)


def _measure(
    job: Job,
    rank: int,
    world: int,
    device: str,
    rendezvous: str,
    heartbeat: HeartbeatWriter,
    *,
    collectives: bool,
) -> dict[str, dict[str, Any]]:
    place = rank_device(device)
    quick = job.experiments[0].training.steps == QUICK_REPEATS
    cores, carrying = usable_cores(), 0
    with process_group(rank, world, place, rendezvous):
        per_node = ranks_per_node(world)
        groups = kinds(world, per_node, device)
        chains = pipelines(world, per_node, device)
        if not collectives:
            processes.keep_freed_memory()
            divided = CoreAssignment(rank)
            divided.apply()
            cores, carrying = count_compute_cores(cores), len(divided.messages)
        whole = next(iter(groups.values()), meshes.single().world)
        clock = OperatorClock(place, whole, job.experiments[0].training.steps, per_node, cores)
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
                if not experiment.training.dropout:  # whose random numbers no operator's rate has
                    result["silent"].append(silent_step(experiment, clock, beat))
        result["copy"] = copies(clock, clock.device)
        if device == "cpu":
            result["products"] = products_of_a_core(rank % per_node, cores, whole)
        if device == "cuda":
            result["host_copy"] = copies(clock, torch.device("cpu"))
        result["operators_s"] = time.perf_counter() - began
        if world > 1:
            began = time.perf_counter()
            payloads = QUICK_PAYLOADS if quick else PAYLOADS
            bench = LinkBench(clock, payloads[-1])
            measured = groups if collectives else dict(list(groups.items())[:1])
            result["links"] = bench.by_payload(
                measured,
                chains,
                payloads,
                beat,
                COLLECTIVES if collectives else (RING_COLLECTIVE,),
            )
            if not collectives:  # what is measured of these has it
                result["message_s"] = bench.message_s(RING_COLLECTIVE, whole)
                exchanged = [bench.message_s(op, whole) for op in EXCHANGED]
                result["exchange_s"] = statistics.fmean(exchanged) / messages_of(EXCHANGED[0], whole.size)
                beat()
            result["overlap"] = {}
            for where in (INSIDE, BETWEEN):
                largest = next((group for kind, group in groups.items() if kind.place == where), None)
                if largest is not None:
                    result["overlap"][where] = {
                        op: bench.overlap_cost(op, payloads[-1] // 4, largest, beat)
                        for op in (OVERLAPPED if collectives else (RING_COLLECTIVE,))
                    }
            result["links_s"] = time.perf_counter() - began
        if device == "cuda":
            result["context_bytes"] = meshes.bytes_outside_torch(place)
    return {experiment.key: result if i == 0 else {} for i, experiment in enumerate(job.experiments)}


def operators(
    experiments: Sequence[Experiment],
    clock: OperatorClock,
    quick: bool,
    beat: Callable[[], None],
    between: Callable[[], None],
) -> list[dict[str, Any]]:
    """A row for each measured call: name, bytes, flops, shapes and timing.

    With dropout the same operators take far longer, for the random numbers, and a trace does not tell them
    apart; what is measured of them is without.  `beat` is called often, `between` after each operator.
    """
    by_name: dict[str, list[Call]] = {}
    for experiment in sorted(experiments, key=lambda e: e.training.dropout):
        with_dropout = experiment.training.dropout > 0
        known = set(by_name) if with_dropout else set()
        for call in calls_of(experiment, gloo=clock.device.type == "cpu"):
            if call.name not in known:
                by_name.setdefault(call.name, []).append(call)
        beat()
    rows = []
    generator = torch.Generator(device=clock.device).manual_seed(0)
    for name, calls in sorted(by_name.items()):
        few = QUICK_CALLS if quick else MOST_CALLS
        most = 2 * few if any(call.operator.shapes for call in calls) else few
        for call in choose(calls, most):
            found = clock.time(lambda call=call: bind(call, clock.device, generator), call.nbytes)  # type: ignore[misc]
            rows.append(
                {
                    "name": name,
                    "nbytes": call.nbytes,
                    "flops": call.operator.flops,
                    "shapes": call.operator.shapes,
                    **found._asdict(),
                }
            )
            beat()
        between()
    return rows


def products_of_a_core(place: int, cores: int, group: Group) -> float | None:
    """FLOP/s of this core's products while each core runs one rank, as a run measures it to scale its links
    (`repro.emulate.compute_rate.rank_flops_per_s`): ranks that take turns on a core take its caches from each other.

    `place`: of this rank on its node; None on those that leave the `cores` to others meanwhile.
    """
    group.barrier()
    found = compute_rate.core_flops_per_s() if place < cores else None
    group.barrier()
    return found


def machine(cores: int) -> dict[str, Any]:
    """What this rank's node is, for the file's tables.  `cores`: those that ranks compute on."""
    return {
        "cpu": cpu()["model"],
        "cores": cores,
        "memory": host_memory(),
        "gpus": gpus(),
        "nvlink": has_nvlink(),
        "versions": versions(["torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13"]),
    }


def copies(clock: OperatorClock, source: torch.device) -> dict[str, Any]:
    """A copy of four caches' size to the device, from itself or from page-locked host memory: bytes moved, timing."""
    count = clock.cache
    here = source == clock.device
    original = torch.ones(count, device=source, pin_memory=not here)

    def make() -> Any:
        target = torch.empty(count, device=clock.device)
        return lambda: target.copy_(original, non_blocking=True)

    moved = 4 * count * (2 if here else 1)
    return {"nbytes": moved, **clock.time(make, moved)._asdict()}
