"""One experiment on one rank: initialises the engine, runs untimed and timed steps, and collects the measurements."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from repro.config import Experiment
from repro.config.engines import NATIVE
from repro.config.enums import MODEL_STATES, STEP_PHASES, Category, Phase
from repro.engines import build_engine
from repro.engines.native.engine import NativeEngine
from repro.launch.job import Stopped
from repro.launch.rank import device_settings
from repro.launch.rank.checkpoints import CheckpointManager, CheckpointPlace
from repro.launch.rank.device_settings import deterministic_algorithms
from repro.launch.rank.emulated_network import EmulatedNetworkRank
from repro.launch.rank.step_data import BatchLoader, StepHistory
from repro.measure.memory import AllocationHistory, MemoryTracker, write_memory_snapshot
from repro.measure.operators import CollectiveCounter, KernelCounter
from repro.measure.timing import COMPUTE_PHASES, CORE_TIME, StageWaits, StepClock
from repro.model.data import open_stream
from repro.parallel import storage
from repro.parallel.mesh import END, Mesh, non_torch_bytes
from repro.results.metrics import per_layer
from repro.results.record_parts import CheckpointReport, RankMemory, RankResult, StageReport, TrafficRow
from repro.simulate.trace.recorder import line_of_step

Report = Callable[[int, Phase], None]
"""Callback that receives the training step and the new phase at every change of phase."""


class ExperimentRun:
    """One experiment on this rank. Call `prelude` (warm-up) once, `steps` once or more, and then `result`."""

    def __init__(
        self,
        experiment: Experiment,
        mesh: Mesh,
        device: torch.device,
        report: Report,
        checkpoints: CheckpointPlace | None = None,
        network: EmulatedNetworkRank | None = None,
        *,
        watched: bool = True,
        profiles: Path | None = None,
    ):
        """Initialise the engine, and resume from the newest checkpoint if the experiment writes checkpoints.

        `watched`: whether untimed steps measure memory and count collectives, which slows the steps. `network`: rank
        on an emulated network; None for a real network. `profiles`: folder for profiles; None writes no profiles.
        """
        self.experiment, self.mesh, self.device, self.report = experiment, mesh, device, report
        self.index = 0
        """Number of completed steps, which is the index of the next step."""
        self.series = StepHistory()
        self.rounds: list[list[float]] = []
        """Seconds of each timed step, as one list per round (turn of the experiment in a comparison)."""
        self.phase_rows: list[dict[str, float]] = []
        """Seconds of each phase of a step, such as forward, by phase; one dictionary per timed step."""
        self.clock = StepClock(device)
        stream = open_stream(experiment.training, experiment.model)
        self.batches = BatchLoader(stream, experiment.layout, mesh.rank, device)
        self.kernels = KernelCounter(device.type, plain=experiment.layout.kernels.plain)
        self.memory = RankMemory()
        self.comm: list[TrafficRow] = []
        self.network = network
        self.link_bytes: list[int] = []
        """Increase of the emulated network's byte counters in the timed steps; empty on a real network."""
        report(0, Phase.INIT)
        self.watched, self.profiles = watched, profiles
        if profiles is not None:
            profiles.mkdir(parents=True, exist_ok=True)
            if device.type == "cuda":
                torch.cuda.memory._record_memory_history()
        has_history = profiles is not None and device.type != "cuda"
        history = AllocationHistory(line_of_step) if has_history else None
        self.tracker = MemoryTracker(history) if watched else None
        with self.tracker or nullcontext():
            self.engine = build_engine(experiment, mesh, device)
        self.checkpoints: CheckpointManager | None = None
        self.resumed: list[dict[str, Any]] = []
        """For each checkpoint from which this training was resumed: its step, and the experiment that wrote it."""
        if checkpoints is not None:
            assert isinstance(self.engine, NativeEngine)
            self.checkpoints = CheckpointManager(
                experiment,
                mesh,
                self.engine,
                device,
                checkpoints,
                lambda: report(self.index, Phase.CHECKPOINT),
            )
            self._resume(self.checkpoints)

    @property
    def left(self) -> int:
        return self.experiment.training.steps - self.index

    def _resume(self, checkpoints: CheckpointManager) -> None:
        found = checkpoints.resume()
        if found is None:
            return
        self.index, series, history = found.step, self.series, found.history
        series.loss, series.grad_norm = list(history["loss"]), list(history["grad_norm"])
        series.loss_scale, series.skipped = list(history["loss_scale"]), list(history["skipped_steps"])
        self.resumed = [*history["resumed"], {"step": found.step, **found.written_by}]

    def prelude(self) -> None:
        """Run warm-up steps. The first measures memory; the last counts collectives of engines other than our own."""
        if self.tracker is None:
            self._step(lambda phase: None)
        else:
            self._watched_step(self.tracker)
            self.tracker = None
        self._write_due_checkpoint()
        further = min(self.experiment.training.untimed_steps - 1, self.left)
        for step in range(further):
            with self._counting() if step == further - 1 else nullcontext():
                self._step(lambda phase: None)
            self._write_due_checkpoint()
        self.engine.synchronize()
        self._read()
        if self.network is not None:
            self.network.begin_timed_steps((self.memory.peak or {}).get("total", 0))

    def steps(self, count: int) -> None:
        """Run and time `count` steps. With this package's own engine, count the collectives of the last timed step."""
        rows: list[dict[str, float]] = []
        before = self._count_link_bytes()
        for i in range(count):
            self.clock.begin()
            if i == count - 1:
                self.mesh.ledger.reset()
            with self._clocked() as mark:
                self._step(mark)
            if i == count - 1:
                self.engine.synchronize()
                if self.experiment.engine == NATIVE:
                    self.comm = [TrafficRow.read(row) for row in self.mesh.ledger.rows()]
            self.clock.mark("end")
            if self._write_due_checkpoint():
                rows += self.clock.read()  # A long run must not accumulate the CUDA events of its steps.
        rows += self.clock.read()
        grown = [b - a for a, b in zip(before, self._count_link_bytes(), strict=True)]
        self.link_bytes = [sum(pair) for pair in zip_longest(self.link_bytes, grown, fillvalue=0)]
        first = self.index - count
        self._read()
        ordinary = [row for i, row in enumerate(rows) if first + i not in self.series.skipped]
        self.rounds.append([row["step"] for row in ordinary])
        self.phase_rows += ordinary

    def _clocked(self) -> AbstractContextManager[Callable[[Phase], None]]:
        """Return a context whose value is a function to call when a phase of a timed step, such as forward, begins."""
        if self._has_known_waits and self.experiment.engine != NATIVE:
            return StageWaits(self.clock.mark)
        return nullcontext(self.clock.mark)

    @property
    def _has_known_waits(self) -> bool:
        """Return whether a pipeline stage's idle time is measurable: always in our engine, in others if tp = dp = 1."""
        layout = self.experiment.layout
        return layout.pp > 1 and (self.experiment.engine == NATIVE or layout.tp == layout.dp == 1)

    def _count_link_bytes(self) -> list[int]:
        """Return the emulated network's byte counters, which are read while no rank sends; empty on a real network."""
        if self.network is None:
            return []
        self.mesh.world.barrier()
        found = self.network.counters()
        self.mesh.world.barrier()
        return found

    def _write_due_checkpoint(self) -> bool:
        """Write a checkpoint if one is due, and return whether it was due.  Raises `Stopped` after a stop request."""
        checkpoints = self.checkpoints
        if checkpoints is None:
            return False
        stop = checkpoints.asked_to_stop() and self.left > 0
        if not stop and self.left and self.index % self.experiment.training.checkpoint_every:
            return False
        self._read()
        self.report(self.index, Phase.CHECKPOINT)
        history = {
            "loss": self.series.loss,
            "grad_norm": self.series.grad_norm,
            "loss_scale": self.series.loss_scale,
            "skipped_steps": self.series.skipped,
            "resumed": self.resumed,
        }
        is_written = checkpoints.write(self.index, history)
        if stop:
            from_here = "the next run resumes from this step"
            resumes = from_here if is_written else "no checkpoint could be written"
            raise Stopped(f"stopped on request after step {self.index}; {resumes}")
        return True

    def _watched_step(self, tracker: MemoryTracker) -> None:
        """Run one step and measure its memory with `tracker`, which has also measured the engine's initialisation."""
        init_peak = tracker.peak["total"]

        def observe(phase: Phase) -> None:
            if phase == Phase.OPTIMIZER:
                self.engine.mark_states()
            tracker.phase = phase

        with self._counting(), tracker:
            self._step(observe)
            self.engine.synchronize()
        if self.profiles is not None:
            self._write_memory_profile(self.profiles / f"rank-{self.mesh.rank}.pickle", tracker)
        self.engine.mark_states()
        live, most = tracker.live(), tracker.most
        states = {category: live[category] for category in MODEL_STATES}
        if self.experiment.engine != NATIVE:
            # Libraries free gradients within the step, so report their maximum bytes, not their bytes after the step.
            states[Category.GRADIENTS] = most[Category.GRADIENTS]
        self.memory = RankMemory(
            states=states,
            peak=tracker.peak,
            most=most,
            peak_phase=tracker.peak_phase,
            init_peak_bytes=init_peak,
        )

    def _write_memory_profile(self, path: Path, tracker: MemoryTracker) -> None:
        """Write all allocations of this rank since its start as a snapshot for PyTorch's memory viewer."""
        if tracker.history is not None:
            write_memory_snapshot(path, [tracker.history])
            tracker.history = None
        else:
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _profile_step(self, path: Path) -> None:
        """Run one step under `torch.profiler` and write its trace in Chrome's format."""
        with torch.profiler.profile() as profile, ExitStack() as annotation:

            def annotate(phase: Phase) -> None:
                annotation.close()
                annotation.enter_context(torch.profiler.record_function(str(phase)))

            self._step(annotate)
            self.engine.synchronize()
        profile.export_chrome_trace(str(path))

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Inside the context, count collectives of another engine such as DeepSpeed; our engine counts its own."""
        if self.experiment.engine == NATIVE or not self.watched:
            yield
            return
        with CollectiveCounter(self.mesh) as watch:
            yield
            self.engine.synchronize()
        self.comm = [TrafficRow.read(row) for row in watch.ledger.rows()]

    def _step(self, observe: Callable[[Phase], None]) -> None:
        step, report = self.index, self.report

        def phase(name: Phase) -> None:
            report(step, name)
            observe(name)

        phase(Phase.INPUT)
        micro_batches = self.batches.micro_batches(step)
        phase(Phase.FORWARD)
        scale = self.engine.loss_scale()
        if scale is not None:
            self.series.scales.append(storage.mark(scale.clone(), Category.SHAPE))
        with deterministic_algorithms(self.experiment.training.deterministic), self.kernels.counting():
            self.series.norms.append(self.engine.step(micro_batches, phase))
        self.index += 1
        if self.left and self.batches.can_prefetch:
            # The copy of the next batch overlaps with the device's work on this step.
            phase(Phase.INPUT)
            self.batches.prefetch(self.index)

    def _read(self) -> None:
        self.series.read(self.experiment.layout.precision == "fp16")

    def result(self, diverged: str = "") -> RankResult:
        """Return this rank's results, and profile a step if requested. `diverged`: why training diverged, or empty."""
        e, series = self.experiment, self.series
        phases = [p for p in STEP_PHASES if p != Phase.IDLE or e.layout.pp > 1]
        timed = max(1, len(self.phase_rows))
        found = RankResult(
            rank=self.mesh.rank,
            outcome="diverged" if diverged else "ok",
            reason=diverged,
            loss=series.loss,
            grad_norm=series.grad_norm,
            loss_scale=series.loss_scale,
            skipped_steps=series.skipped,
            checkpoints=self._checkpoints(),
            rounds=self.rounds,
            phase_seconds={p: sum(row[p] for row in self.phase_rows) / timed for p in phases},
            pipeline=self._pipeline(),
            software=asdict(self.engine.report()),
            environment=device_settings.current_gpu_environment() if self.device.type == "cuda" else None,
            kernels=self.kernels.as_dict(),
            memory=process_memory(self.memory, self.device, self.mesh),
            comm=self.comm,
            comm_per_layer=per_layer(e, self.mesh.pp.rank, self.comm),
            network=self.network.report(self.link_bytes, timed) if self.network else None,
            parameters=self.engine.local_parameters(),
            padding=self.engine.padding(),
        )
        if self.profiles is not None and not diverged:
            self._profile_step(self.profiles / f"rank-{self.mesh.rank}.json")
        return found

    def _checkpoints(self) -> CheckpointReport | None:
        """Return the report on read and written checkpoints; None if the experiment writes no checkpoints."""
        checkpoints = self.checkpoints
        if checkpoints is None:
            return None
        return CheckpointReport(
            resumed=self.resumed,
            written=checkpoints.written,
            write_seconds=checkpoints.seconds,
            failures=checkpoints.failures,
        )

    def _pipeline(self) -> StageReport | None:
        """Return a report on the pipeline stage (None without pipeline), with idle times if they can be measured."""
        if self.experiment.layout.pp == 1:
            return None
        rows = self.phase_rows if self._has_known_waits else []
        return StageReport(
            **self.engine.pipeline_report(),
            idle_s=[row[Phase.IDLE] for row in rows],
            busy_s=[sum(row[phase] for phase in COMPUTE_PHASES) for row in rows],
            core_s=[row[CORE_TIME] for row in rows],
        )


def process_memory(categories: RankMemory, device: torch.device, mesh: Mesh) -> RankMemory:
    """Return `categories` (bytes by tensor category), peak resident set and, on CUDA, allocator and driver bytes."""
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resident = replace(categories, rss_peak_bytes=peak_bytes)
    if device.type != "cuda":
        return resident
    stats = torch.cuda.memory_stats(device)
    return replace(
        resident,
        cuda={
            "allocated_peak": stats.get("allocated_bytes.all.peak", 0),
            "reserved_peak": stats.get("reserved_bytes.all.peak", 0),
            "retries": stats.get("num_alloc_retries", 0),
        },
        beside_torch={**mesh.beside_torch, END: non_torch_bytes(device)},
    )
