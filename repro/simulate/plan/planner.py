"""Evaluation of the layouts of one request. Each row names its evidence, the cheapest that decides the row:

    states     closed form of the model states, which exceed the device
    retained   lower bound of the model states and the retained activations, which exceed the device
    bound      lower bound of the step time, with which the layout cannot be among the first
    full       simulation of the step (`repro.simulate.step`), as `repro simulate` prints it

Layouts that do not fit get no step time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from repro.config import Experiment, Layout, Training
from repro.config.errors import ConfigError
from repro.simulate.plan import closed_form
from repro.simulate.plan.candidates import PlanRequest
from repro.simulate.plan.closed_form import FRAGMENTATION, TERMS, largest_term
from repro.simulate.plan.lower_bound import (
    memory_lower_bound,
    sent_bytes_lower_bound,
    step_time_lower_bound,
)
from repro.simulate.plan.rows import BOUND, FULL, OK, OOM, OPEN, RETAINED, STATES, PlanRow, ideal_s
from repro.simulate.time.calibration import Generation, calibration_point_of
from repro.simulate.time.device import MODELLED_KERNELS, DeviceCost, Kernels
from repro.simulate.time.network import Network
from repro.util import units
from repro.util.workers import Workers


class Planner:
    """Evaluates layouts of one request."""

    def __init__(self, request: PlanRequest, workers: Workers):
        self.request, self.workers = request, workers
        self.simulated = 0
        """Number of simulated layouts."""
        self.no_time = ""
        """Reason why times cannot be predicted."""
        self._costs: dict[tuple[str, str], DeviceCost] = {}
        self._networks: dict[Layout, Network] = {}

    def bounded(self, layouts: Iterable[Layout]) -> list[PlanRow]:
        """Return the rows of `layouts` from lower bounds: out of memory, or open with the least step time."""
        found = [self._excluded(layout) or PlanRow(layout, OPEN, BOUND, {}) for layout in layouts]
        try:
            for row in found:
                if row.outcome == OPEN and not self.no_time:
                    row.least_s = self._least_seconds(row.layout)
        except ConfigError as error:
            self.no_time = str(error)
        if self.no_time:
            self.remove_times(found)
        return found

    def remove_times(self, rows: Iterable[PlanRow]) -> None:
        """Remove the times of `rows`, which `ideal_s` orders; open rows get a lower bound of it."""
        request = self.request
        for row in rows:
            row.time = {}
            if row.outcome == OPEN:
                sent = sent_bytes_lower_bound(request.model, row.layout, request.seq)
                by_link: dict[str, float] = {}
                for group, size in sent.items():
                    link = self._network(row.layout).link(group)
                    by_link[link] = by_link.get(link, 0.0) + size
                row.least_s = ideal_s(request, row.layout, by_link)

    def rows(self, layouts: Sequence[Layout]) -> list[PlanRow]:
        """Return the rows of `layouts` without times. Layouts that no lower bound excludes are simulated."""
        excluded = {layout: row for layout in layouts if (row := self._excluded(layout)) is not None}
        made = self.simulate([layout for layout in layouts if layout not in excluded], time=False)
        found = excluded | {row.layout: row for row in made}
        return [found[layout] for layout in layouts]

    def simulate(
        self, layouts: Iterable[Layout], *, time: bool = True, interval_below_s: float = 0.0
    ) -> list[PlanRow]:
        """Return the rows of `layouts` from simulations, in any order.

        `time`: with times. `interval_below_s`: shorter steps get an interval. Layouts of equal widths go to one worker,
        because their traces have common parts.
        """
        by_width: dict[tuple[object, ...], list[Layout]] = {}
        for one in layouts:
            width = one.tp, one.cp, one.sp, one.micro_batch, one.recompute, one.pa
            by_width.setdefault(width, []).append(one)
        time = time and not self.no_time
        tasks = [(self.request, some, time, interval_below_s) for some in by_width.values()]
        made = [answer for answers in self.workers.map(_simulated_rows, tasks) for answer in answers]
        self.simulated += len(made)
        self.no_time = next((no_time for _, no_time in made if no_time), self.no_time)
        return [row for row, _ in made]

    def _excluded(self, layout: Layout) -> PlanRow | None:
        """Return the row of a layout that does not fit by a lower bound of its memory."""
        request = self.request
        memory = memory_lower_bound(request.model, layout, request.seq)
        states = {
            role: {key: size for key, size in of_role.items() if key in closed_form.STATES}
            for role, of_role in memory.items()
        }
        for evidence, bound, what in (
            (STATES, states, "model states alone are"),
            (RETAINED, memory, "model states and retained activations are at least"),
        ):
            fullest = max(bound.values(), key=lambda of_role: sum(of_role.values()))
            peak = round(sum(fullest.values()))
            if peak > request.allocatable:
                by_role = {
                    role: {
                        "peak_bytes": round(sum(of_role.values())),
                        "states_bytes": round(sum(states[role].values())),
                    }
                    for role, of_role in bound.items()
                }
                by_category = {key: round(size) for key, size in fullest.items()}
                document = {"peak_bytes": peak, "by_category": by_category, "by_role": by_role}
                term, reason = TERMS[max(fullest, key=lambda key: fullest[key])], f"{what} {units.size(peak)}"
                return PlanRow(layout, OOM, evidence, document, ruled_out_by=term, reason=reason)
        return None

    def _least_seconds(self, layout: Layout) -> float:
        """Return a lower bound of the step time of `layout`; `ConfigError` if numbers are missing."""
        request = self.request
        cost, network = self._cost(layout), self._network(layout)
        return step_time_lower_bound(request.model, layout, request.seq, cost, network)

    def _cost(self, layout: Layout) -> DeviceCost:
        """Return the cost of operators with the layout's kernels."""
        key, system = (layout.precision, layout.kernels), self.request.system
        if key not in self._costs:
            generation = calibration_point_of(layout.kernels, system)
            kernels = MODELLED_KERNELS
            if generation is not None:  # each worker needs these kernels for its simulations
                kernels = self.workers.map(_kernels_in_worker, [(generation,)] * self.workers.count)[0]
            self._costs[key] = DeviceCost(system, layout.precision, kernels, layout.world)
        return self._costs[key]

    def _network(self, layout: Layout) -> Network:
        """Return the links as the groups of `layout` use them."""
        groups = Layout(tp=layout.tp, cp=layout.cp, dp=layout.dp, pp=layout.pp, order=layout.order)
        if groups not in self._networks:
            self._networks[groups] = Network(self.request.system, groups)
        return self._networks[groups]


def _kernels_in_worker(generation: Generation) -> Kernels:
    """Return `calibrated_kernels`, whose module needs torch."""
    from repro.simulate.time.predict import calibrated_kernels

    return calibrated_kernels(generation)


def _simulated_rows(
    request: PlanRequest, layouts: Sequence[Layout], time: bool, interval_below_s: float
) -> list[tuple[PlanRow, str]]:
    """Return the rows of `layouts`, each with the reason why it has no times; runs in a worker."""
    return [_simulated_row(request, layout, time, interval_below_s) for layout in layouts]


def _simulated_row(
    request: PlanRequest, layout: Layout, time: bool, interval_below_s: float
) -> tuple[PlanRow, str]:
    from repro.simulate.step import sent_bytes_by, simulate
    from repro.simulate.time.predict import prediction_interval

    system, experiment = request.system, plan_experiment(request, layout)
    found = simulate(experiment, system, memory_limit=request.limit, expandable=request.expandable, time=time)
    if found.fits and found.time is not None and found.time.step_s <= interval_below_s:
        found.time.interval = prediction_interval(experiment, system, found.traces)
    document = found.as_dict()
    row = PlanRow(layout, found.outcome, FULL, document["memory"], document["comm"])
    row.trace_seconds = document["trace_seconds"]
    row.ideal_s = max(ideal_s(request, layout, sent_bytes_by(role.traffic, "link")) for role in found.roles)
    if found.outcome == OK:
        row.time = document["time"] or {}
        row.interval = found.time.interval if found.time is not None else None
    else:
        fullest = found.fullest
        live = fullest.memory.by_category
        row.ruled_out_by = FRAGMENTATION if fullest.by_fragmentation else largest_term(live)
        row.reason = found.reason
    return row, found.no_time


def plan_experiment(request: PlanRequest, layout: Layout) -> Experiment:
    """Return the experiment of one layout."""
    training = Training(seq=request.seq)
    return Experiment(
        name="plan", model=request.model, layout=layout, training=training, system=request.system.name
    )
