"""Evaluation of the layouts of one layout search. The plan row of a layout names its evidence, the cheapest kind first:

    states     closed form of the model states, which exceed the device's memory
    retained   lower bound of model states plus retained activations, which exceeds the device's memory
    bound      lower bound of the step time, which is too long for the first rows of the plan
    full       simulation of the step (`repro.simulate.step`), as `repro simulate` prints it

Layouts that do not fit get no step time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from repro.config import Experiment, Layout, Training
from repro.config.errors import ConfigError
from repro.simulate.plan import closed_form
from repro.simulate.plan.candidates import PlanRequest, communicator_bytes, is_tight
from repro.simulate.plan.closed_form import FRAGMENTATION, TERMS, largest_term
from repro.simulate.plan.lower_bound import memory_lower_bound, sent_bytes_lower_bound, step_time_lower_bound
from repro.simulate.plan.rows import BOUND, FULL, OOM, OPEN, RETAINED, STATES, PlanRow, ideal_s
from repro.simulate.time.calibration import Generation, calibration_point_of
from repro.simulate.time.device import DeviceCost, Kernels
from repro.simulate.time.network import Network
from repro.util import units
from repro.util.processes import Workers, pause_garbage_collection


class Planner:
    """Evaluation of the layouts of one layout search, by lower bounds and by simulation."""

    def __init__(self, request: PlanRequest, workers: Workers):
        self.request, self.workers = request, workers
        self.simulated = 0
        """Number of simulated layouts."""
        self.no_time = ""
        """Reason why step times cannot be predicted; empty if they can."""
        self._cost: DeviceCost | None = None
        self._networks: dict[Layout, Network] = {}

    def bounded(self, layouts: Iterable[Layout]) -> list[PlanRow]:
        """Return plan rows from lower bounds, without simulation: out of memory, or open with a bound of step time."""
        request = self.request
        found = [self._excluded(layout) or PlanRow(layout, OPEN, BOUND, {}) for layout in layouts]
        try:
            for row in found:
                if row.outcome == OPEN and not self.no_time:
                    cost, network = self._cost_of(row.layout), self._network(row.layout)
                    row.least_s = step_time_lower_bound(request.model, row.layout, request.seq, cost, network)
        except ConfigError as error:
            self.no_time = str(error)
        if self.no_time:
            self.remove_times(found)
        return found

    def remove_times(self, rows: Iterable[PlanRow]) -> None:
        """Remove predicted step times of plan rows, so that times at peak rates (`ideal_s`) order all the rows."""
        request = self.request
        for row in rows:
            row.time = {}
            if row.outcome == OPEN:
                sent = sent_bytes_lower_bound(request.model, row.layout, request.seq)
                by_link: dict[str, float] = defaultdict(float)
                for group, size in sent.items():
                    by_link[self._network(row.layout).link(group)] += size
                row.least_s = ideal_s(request, row.layout, by_link)

    def rows(self, layouts: Sequence[Layout]) -> list[PlanRow]:
        """Return the plan rows of `layouts` without step times, from lower bounds of memory or a simulation."""
        found = {layout: self._excluded(layout) for layout in layouts}
        waits = {layout: self.begin(layout, time=False) for layout, row in found.items() if row is None}
        return [found[layout] or waits[layout]() for layout in layouts]

    def begin(
        self, layout: Layout, *, time: bool = True, interval_below_s: float = 0.0
    ) -> Callable[[], PlanRow]:
        """Begin to simulate `layout` in a worker process, and return a function that waits for the layout's plan row.

        `time`: also predict the step time. `interval_below_s`: also predict the interval of a step time up to this.
        """
        task = self.request, layout, time and not self.no_time, interval_below_s
        wait = self.workers.begin(_simulated_row, [task])

        def row() -> PlanRow:
            ((found, no_time),) = wait()
            self.simulated += 1
            self.no_time = self.no_time or no_time
            return found

        return row

    def _excluded(self, layout: Layout) -> PlanRow | None:
        """Return the out-of-memory row of a layout whose lower bound of memory exceeds the device's memory, or None."""
        request = self.request
        memory = memory_lower_bound(request.model, layout, request.seq)
        limit = request.allocatable - communicator_bytes(layout, request.system)

        def size(of_role: dict[str, float]) -> int:
            return round(sum(of_role.values()))

        states = {
            role: {key: size for key, size in of_role.items() if key in closed_form.STATES}
            for role, of_role in memory.items()
        }
        for evidence, bound, what in (
            (STATES, states, "model states alone are"),
            (RETAINED, memory, "model states and retained activations are at least"),
        ):
            fullest = max(bound.values(), key=size)
            if (peak := size(fullest)) > limit:
                by_role = {
                    role: {"peak_bytes": size(of_role), "states_bytes": size(states[role])}
                    for role, of_role in bound.items()
                }
                by_category = {key: round(each) for key, each in fullest.items()}
                document = {"peak_bytes": peak, "by_category": by_category, "by_role": by_role}
                term, reason = TERMS[max(fullest, key=lambda key: fullest[key])], f"{what} {units.size(peak)}"
                return PlanRow(layout, OOM, evidence, document, ruled_out_by=term, reason=reason)
        return None

    def _cost_of(self, layout: Layout) -> DeviceCost:
        """Return the model of operator times on the system's device, which is equal for all layouts of a request."""
        if self._cost is None:  # Each worker caches the kernel efficiencies for its predictions.
            system = self.request.system
            task = (calibration_point_of(layout.kernels, system),)
            kernels = self.workers.map(_kernels_in_worker, [task] * self.workers.count)[0]
            self._cost = DeviceCost(system, layout.precision, kernels, layout.world)
        return self._cost

    def _network(self, layout: Layout) -> Network:
        """Return the model of the communication times of `layout` on the system's links."""
        groups = Layout(tp=layout.tp, cp=layout.cp, dp=layout.dp, pp=layout.pp, order=layout.order)
        if groups not in self._networks:
            self._networks[groups] = Network(self.request.system, groups)
        return self._networks[groups]


def _kernels_in_worker(generation: Generation | None) -> Kernels:
    """Return the calibrated kernel efficiencies of a software generation, computed in a worker that imports torch."""
    from repro.simulate.time.predict import calibrated_kernels

    return calibrated_kernels(generation)


@pause_garbage_collection()
def _simulated_row(
    request: PlanRequest, layout: Layout, time: bool, interval_below_s: float
) -> tuple[PlanRow, str]:
    """Simulate `layout` in a worker process, and return its plan row and the reason why a step time is missing."""
    from repro.simulate.step import sent_bytes_by, simulate
    from repro.simulate.time.predict import predict

    system, experiment, no_time = request.system, plan_experiment(request, layout), ""
    further = communicator_bytes(layout, system)
    found = simulate(experiment, system, memory_limit=request.limit - further, expandable=request.expandable)
    try:
        if time and found.fits:
            found.time = predict(experiment, system, found.traces)
            if found.time.step_s <= interval_below_s:
                found.time.interval = predict(experiment, system, found.traces, interval=True).interval
    except ConfigError as error:  # A missing hardware rate prevents the prediction of time only.
        no_time = str(error)
    document = found.as_dict()
    row = PlanRow(layout, found.outcome, FULL, document["memory"], document["comm"], reason=found.reason)
    row.trace_seconds = document["trace_seconds"]
    row.ideal_s = max(ideal_s(request, layout, sent_bytes_by(role.traffic, "link")) for role in found.roles)
    left = request.allocatable - further - document["memory"]["reserved_bytes"]
    row.is_tight = found.fits and is_tight(left, request.limit)
    if found.time is not None:
        row.time, row.interval = document["time"], found.time.interval
    if not found.fits:
        fullest = found.fullest
        live = fullest.memory.by_category
        row.ruled_out_by = FRAGMENTATION if fullest.by_fragmentation else largest_term(live)
    return row, no_time


def plan_experiment(request: PlanRequest, layout: Layout) -> Experiment:
    """Return the experiment of one training step with `layout`, for the model and system of `request`."""
    training, system = Training(seq=request.seq), request.system.name
    return Experiment(name="plan", model=request.model, layout=layout, training=training, system=system)
