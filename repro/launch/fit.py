"""Search for the largest model that this machine can train, by trials on its devices (`repro fit --measure`).

Every trial is a separate launch, so that allocator or driver state of one trial cannot affect the next trial.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from repro.config import Limits, Model, Training
from repro.config.errors import ConfigError, require
from repro.config.quantity import Quantity
from repro.config.sizes import at_most
from repro.config.system import System
from repro.launch import local_launch
from repro.launch.job import Interrupt, Job
from repro.launch.local_launch import run_once
from repro.measure.local_system import discover
from repro.measure.provenance import cpu, provenance
from repro.model.counts import total_parameters
from repro.results.record_parts import MeasuredTrial, RankMemory
from repro.results.schema import MEASURED, FitRecord
from repro.simulate.plan import fit
from repro.simulate.plan.candidates import LayoutQuery, parse_memory_size
from repro.simulate.plan.closed_form import FRAGMENTATION

ALLOCATION_FAILURE, HOST_MEMORY_FAILURE = "allocation", "host memory"
TRIAL_TARGET = "repro.launch.rank.session:run_memory_trial"
RECORD_SUITE = "fit"
"""Suite name in the records of searches for the largest model (`repro fit --measure`), which have no suite file."""
TRIAL_LIMITS = Limits(timeout_s=600.0, hang_s=120.0)


def plan_trials(
    query: LayoutQuery, model: Model | None, sizes: dict[str, int], search: str, as_rank: int | None, of: int
) -> Trials:
    """Return a search, by trial runs, for the largest model that fits `query` (devices, layout).  Raises `ConfigError`.

    `as_rank`: rank of a layout of `of` ranks whose memory one process allocates in each trial; None: all ranks run.
    """
    system, gpus = query.system, query.gpus
    if system not in local_launch.DEVICES:
        right = f"a system of this machine with --measure: {', '.join(local_launch.DEVICES)}"
        raise ConfigError("system", system, right)
    if query.expandable:
        what = "this option does not work with --measure: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True instead"
        raise ConfigError("expandable", says=what)
    limit = parse_memory_size(query.memory_limit)
    on = _local_system(system, limit)
    world = gpus
    if as_rank is not None:
        require(gpus == 1, "gpus", gpus, "1 device, because --as-rank runs a single process")
        require(of >= 1, "of", of, "the number of ranks of the layout, 1 or more")
        require(0 <= as_rank < of, "as_rank", as_rank, f"a rank from 0 to {of - 1}")
        world = of
    question = fit.question_of(on, replace(query, gpus=world), model, sizes, search)
    if local_launch.DEVICES[system] == "cuda":
        visible = local_launch.count_cuda_devices()
        require(gpus <= visible, "gpus", gpus, f"at most the {visible} CUDA devices that are visible here")
    else:
        at_most("gpus", gpus, local_launch.max_ranks())
    return Trials(question, system, limit, as_rank)


def _local_system(system: str, limit: int | None) -> System:
    """Return a description of this machine's hardware. Raises `ConfigError` on a CPU without memory `limit`."""
    if local_launch.DEVICES[system] != "cpu":
        return discover()
    if limit is None:
        what = "a limit is required on processor cores: set the memory of each process, for example 500MB"
        raise ConfigError("memory_limit", says=what)
    nothing = Quantity(value=0, source="a processor has no CUDA context")
    return replace(discover(), context_bytes=nothing)


@dataclass
class Trials:
    """Search for the largest model that this machine can train, by trial runs of models of different size."""

    question: fit.FitQuestion
    system: str
    limit: int | None
    """Memory limit of a device in bytes, including the CUDA context; None for all of the device's memory."""
    as_rank: int | None
    """Rank of a larger layout whose memory a single process allocates in each trial run; None: trials run all ranks."""

    @property
    def limit_bytes(self) -> int:
        """Return the memory limit of a process's allocator in bytes, without the CUDA context; 0 means no limit."""
        return 0 if self.limit is None else self.question.allocatable

    def run(self, interrupt: Interrupt) -> fit.FitAnswer:
        """Run trials, beginning at the largest model that the simulation predicts, and return the largest that fits."""
        guess = fit.fit_by_simulation(self.question)
        start = [trial.value for trial in (guess.largest, guess.first_failing) if trial is not None]
        values, limit = self.question.values(), self.question.allocatable
        return fit.search_largest(values, lambda value: self._attempt(value, interrupt), limit, start)

    def document(self, answer: fit.FitAnswer, seconds: float) -> dict[str, Any]:
        """Return the search result as the JSON document of `repro fit --measure`. `seconds`: duration of the search."""
        document = fit.fit_document(self.question, answer)
        del document["traces"], document["trace_seconds"]
        one = self.as_rank is not None
        return document | {
            "evidence": f"measured (one rank of {self.question.layout.world})" if one else "measured",
            "limit_bytes": self.question.allocatable,
            # A measured trial reserves no memory for communicators, because it may use its full memory limit.
            "communicator_bytes": 0,
            "allocator_limit_bytes": self.limit_bytes,
            "seconds": round(seconds, 1),
        }

    def record(self, answer: fit.FitAnswer, seconds: float) -> FitRecord:
        """Return a record of the search whose result is `answer`. `seconds`: duration of the search."""
        question, one = self.question, self.as_rank is not None
        end = answer.largest or answer.first_failing
        value = question.values()[0] if end is None else end.value
        experiment = replace(question.experiment(value), system=self.system)
        layout = experiment.layout
        data, on_cpu = layout.world > 1 and not one, local_launch.DEVICES[self.system] == "cpu"
        return FitRecord(
            suite=RECORD_SUITE,
            name=f"{experiment.model.name}-zero{layout.zero}-on-{layout.world}",
            conditions=experiment.as_dict(),
            evidence=MEASURED,
            search=question.search,
            device=str(cpu()["model"] or "processor") if on_cpu else question.system.device.name,
            limit_bytes=question.limit,
            allocator_limit_bytes=self.limit_bytes,
            ranks=layout.world,
            one_rank=one,
            rank=self.as_rank,
            collectives="data" if data else "no data",
            largest=self._measured_trial(answer.largest),
            first_failing=self._measured_trial(answer.first_failing),
            provenance=provenance(),
            wall_s=round(seconds, 3),
        )

    def _measured_trial(self, trial: fit.FitTrial | None) -> MeasuredTrial | None:
        if trial is None:
            return None
        experiment = self.question.experiment(trial.value)
        memory = trial.detail.get("memory_of_process")
        return MeasuredTrial(
            layers=experiment.model.layers,
            micro_batch=experiment.layout.micro_batch,
            parameters=total_parameters(experiment.model),
            outcome=trial.outcome,
            reason=trial.reason,
            binding=trial.binding,
            memory=RankMemory.read(memory) if memory else None,
        )

    def _attempt(self, value: int, interrupt: Interrupt) -> fit.FitTrial:
        if interrupt:
            return fit.FitTrial(value, "interrupted", None)
        experiment = replace(
            self.question.experiment(value),
            system=self.system,
            limits=replace(TRIAL_LIMITS, memory_bytes=self.limit_bytes),
            training=Training(seq=self.question.seq, steps=2, untimed_steps=1),
        )
        job = Job(experiments=[experiment], as_rank=-1 if self.as_rank is None else self.as_rank)
        ending, results = run_once(job, interrupt, target=TRIAL_TARGET)
        memory = _largest_values([result["memory"] for result in results])
        why = "" if ending.outcome == "ok" else ending.outcome
        if why == "oom":
            device = local_launch.DEVICES[self.system]
            why = memory_failure_kind(ending.reason, device, self.question.allocatable)
        reserved, detail = memory.get("cuda", {}).get("reserved_peak"), {"memory_of_process": memory}
        return fit.FitTrial(value, ending.outcome, reserved, why, ending.reason, detail)


def _largest_values(memories: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the maximum over all ranks of each memory size that the ranks report."""
    if not memories:
        return {}
    found: dict[str, Any] = {"rss_peak_bytes": max(memory["rss_peak_bytes"] for memory in memories)}
    for part in ("cuda", "beside_torch", "states"):
        values = [memory.get(part, {}) for memory in memories]
        largest = {key: max(one.get(key, 0) for one in values) for each in values for key in each}
        if largest or part != "states":
            found[part] = largest
    return found


_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|[KMG]iB)"


def memory_failure_kind(reason: str, device: str, limit: int) -> str:
    """Return the kind of a rank's out-of-memory failure: `allocation`, `fragmentation` or `host memory`.

    A failure is fragmentation if the sum of allocated and requested bytes is at most `limit` bytes.
    """
    if "the kernel ran out of memory" in reason:
        return HOST_MEMORY_FAILURE
    if device == "cpu":
        return ALLOCATION_FAILURE
    if "CUDA out of memory" not in reason and "OutOfMemoryError" not in reason:
        return HOST_MEMORY_FAILURE
    requested = re.search(rf"Tried to allocate {_SIZE}", reason)
    allocated = re.search(rf"{_SIZE} is allocated by PyTorch", reason)
    if requested is None or allocated is None:
        return ALLOCATION_FAILURE
    total = sum(float(found[1]) * _UNITS[found[2]] for found in (requested, allocated))
    return FRAGMENTATION if total <= limit else ALLOCATION_FAILURE
