"""Evaluation of the layouts of one request. Each row names its evidence, the cheapest that decides the row:

    states     model states in closed form, which exceed the device: nothing is traced
    shallow    live bytes, traffic and time from shallow traces (`repro.simulate.plan.extrapolation`)
    full       trace of the full step, replay of its allocations, schedule of its events (`repro.simulate.step`)

A row with live bytes within `MAX_RESERVED_OVER_LIVE` of the limit needs a full trace, because the memory that the
allocator reserves beyond live bytes decides whether it fits. Layouts that do not fit get no step time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from repro.config import Experiment, Layout, Training
from repro.config.errors import ConfigError
from repro.results.interval import StepInterval
from repro.simulate.plan.candidates import PlanRequest
from repro.simulate.plan.closed_form import (
    FRAGMENTATION,
    MIDDLE,
    TERMS,
    exceeding_states,
    largest_term,
    stage_parameters,
    state_bytes,
)
from repro.simulate.plan.extrapolation import linear
from repro.simulate.plan.extrapolation.lower_bound import SystemRates, kernels_of
from repro.simulate.plan.extrapolation.shallow_traces import (
    END_ROLES,
    MIDDLE_ROLES,
    LayoutFamily,
    family_of,
    trace_family,
)
from repro.simulate.plan.rows import FULL, OK, OOM, SHALLOW, STATES, PlanRow, find_ties, ideal_s
from repro.util import units
from repro.util.workers import Workers

MAX_RESERVED_OVER_LIVE = 1.12
"""Largest ratio of reserved to live bytes; full traces of models of published size have 1.01 to 1.10."""
UNUSED_SEGMENT_BYTES = 40 * 2**20
"""Bytes that the allocator may leave unused in its last segments (`repro.simulate.memory.pools`)."""
MIN_FULL_OVER_SHALLOW = 0.97
"""Minimum ratio of a full step's time to the shallow estimate (tests/simulate/test_steptime.py: within 1 %)."""
SHARES_PER_WORKER = 2
"""Shares of the families that each worker predicts, one after the other."""


class Planner:
    """Evaluates layouts of one request, and stores the shallow traces that the layouts share."""

    def __init__(self, request: PlanRequest, workers: Workers):
        self.request, self.workers = request, workers
        self.traces = 0
        self._families: dict[Layout, tuple[int, int, dict[str, LayoutFamily]]] = {}
        """Smallest and largest micro-batch of the traces, and the traces of each role, by family."""
        self._rates = SystemRates(request.system, lambda one: workers.map(kernels_of, [(one,)])[0])
        self.no_time = ""
        """Reason why times cannot be predicted."""

    def rows(self, layouts: Sequence[Layout]) -> list[PlanRow]:
        """Return the rows of `layouts` without times; rows that only a full trace decides are `full`."""
        rows = {row.layout: row for row in self.estimated(layouts)}
        rows |= {row.layout: row for row in self.full([row for row in rows.values() if self._is_close(row)])}
        self.send(list(rows.values()))
        return list(rows.values())

    def estimated(self, layouts: Sequence[Layout]) -> list[PlanRow]:
        """Return the rows of `layouts` from closed forms or shallow traces."""
        found = {layout: self._without_trace(layout) for layout in layouts}
        self._trace([layout for layout, row in found.items() if row is None])
        return [row or self._shallow(layout) for layout, row in found.items()]

    def send(self, rows: Sequence[PlanRow]) -> None:
        """Add the bytes that the busiest rank sends to `rows`; traces middle stages if they are missing."""
        request = self.request
        unsaid = [row for row in rows if row.evidence == SHALLOW and not row.comm]
        self._trace_middle(row.layout for row in unsaid)
        for row in unsaid:
            families = self._families[self._family(row.layout)][2]
            sent = linear.estimate_traffic(request.model, row.layout, families, request.system)
            busiest = max(sent, key=lambda role: sum(sent[role].by_group.values()))
            row.comm = {
                "role": busiest,
                "sent_bytes": sum(sent[busiest].by_group.values()),
                "bytes_by_group": sent[busiest].by_group,
                "bytes_by_link": sent[busiest].by_link,
            }
            row.ideal_s = max(ideal_s(request, row.layout, rank.by_link) for rank in sent.values())

    def open(self, rows: Sequence[PlanRow]) -> None:
        """Mark the `rows` that may fit as open, with lower bounds of their step times."""
        for row in rows:
            if row.evidence == SHALLOW and row.outcome == OK:
                try:
                    families = self._families[self._family(row.layout)][2]
                    row.least_s = linear.lower_bound(self.request.model, row.layout, families, self._rates)
                except ConfigError as error:
                    self.no_time = str(error)
                row.open = not self.no_time or self._is_close(row)
        self.send([row for row in rows if row.outcome == OK and not row.least_s])

    def decide(self, rows: Sequence[PlanRow]) -> list[PlanRow]:
        """Return open rows with their next evidence: the step time, or a full trace if the row has a time."""
        untimed = [] if self.no_time else [row for row in rows if not row.time]
        timed = [row for row in rows if row.time or self.no_time]
        full = self.begin_full(timed)
        self.time(untimed)
        for row in untimed:
            row.open = self._is_close(row)
            if row.time:
                row.least_s = MIN_FULL_OVER_SHALLOW * row.time["step_s"]
        return [*untimed, *full()]

    def _is_close(self, row: PlanRow) -> bool:
        """Return whether the allocator decides if the row fits."""
        live = row.memory["peak_bytes"]
        return (
            row.evidence == SHALLOW
            and live <= self.request.allocatable < live * MAX_RESERVED_OVER_LIVE + UNUSED_SEGMENT_BYTES
        )

    def time(self, rows: Sequence[PlanRow]) -> None:
        """Predict the step time of every row that may fit, from the traces that its layout shares."""
        self.send(rows)
        by_family: dict[Layout, list[PlanRow]] = {}
        for row in rows:
            if row.evidence == SHALLOW and row.outcome != OOM and not self.no_time:
                by_family.setdefault(self._family(row.layout), []).append(row)
        request = self.request
        # The families of a share use the same networks. A few shares per worker balance the load.
        families = sorted(by_family.items(), key=lambda item: -len(item[1]))
        count = min(SHARES_PER_WORKER * self.workers.count, len(families))
        shares = [families[first::count] for first in range(count)]
        tasks = [
            (
                request.model,
                request.seq,
                request.system,
                [([row.layout for row in some], self._families[key][2]) for key, some in share],
            )
            for share in shares
        ]
        made = self.workers.map(_times_in_worker, tasks)
        for share, answers in zip(shares, made, strict=True):
            for (_, some), found in zip(share, answers, strict=True):
                for row, answer in zip(some, found, strict=True):
                    if isinstance(answer, str):
                        self.no_time = answer
                    else:
                        row.time = answer

    def intervals(self, rows: Sequence[PlanRow]) -> None:
        """Add intervals of the step time and ties to `rows`, which fit and have times."""
        self._trace_middle(row.layout for row in rows)
        request, count = self.request, min(self.workers.count, len(rows))
        shares = [rows[first::count] for first in range(count)]
        tasks = [
            (
                request.model,
                request.seq,
                request.system,
                [
                    (row.layout, self._families[self._family(row.layout)][2], row.time["step_s"])
                    for row in share
                ],
            )
            for share in shares
        ]
        for share, found in zip(shares, self.workers.map(_intervals_in_worker, tasks), strict=True):
            for row, interval in zip(share, found, strict=True):
                row.interval = interval
                row.time["interval"] = None if interval is None else interval.summary(row.time["step_s"])
        for row in rows:
            row.undecided = []
        steps = [(row, (row.time["step_s"], row.interval)) for row in rows if row.interval is not None]
        for (row, _), found_of in zip(steps, find_ties([step for _, step in steps]), strict=True):
            row.undecided = found_of

    def full(self, rows: Sequence[PlanRow]) -> list[PlanRow]:
        """Return the same rows from full traces."""
        return self.begin_full(rows)()

    def begin_full(self, rows: Sequence[PlanRow]) -> Callable[[], list[PlanRow]]:
        """Start `full` and return a function that waits for its rows."""
        request = self.request
        tasks = [(request, row.layout, not self.no_time) for row in rows]
        self.traces += sum(min(3, row.layout.pp) for row in rows)
        made = self.workers.begin(_full_row, tasks)

        def found() -> list[PlanRow]:
            answers = made()
            self.no_time = next((no_time for _, no_time in answers if no_time), self.no_time)
            return [row for row, _ in answers]

        return found

    def _without_trace(self, layout: Layout) -> PlanRow | None:
        request = self.request
        out = exceeding_states(request.model, layout, request.allocatable)
        if out is None:
            return None
        category, states = out
        size, reason = sum(states.values()), f"model states alone are {units.size(sum(states.values()))}"
        by_role = {}
        for role, parameters in stage_parameters(request.model, layout).items():
            held = round(sum(state_bytes(parameters, layout).values()))
            by_role[role] = {"peak_bytes": held, "states_bytes": held}
        memory = {
            "peak_bytes": round(size),
            "by_category": {key: round(states[key]) for key in states},
            "by_role": by_role,
        }
        return PlanRow(layout, OOM, STATES, memory, ruled_out_by=TERMS[category], reason=reason)

    def _family(self, layout: Layout) -> Layout:
        return family_of(layout, self.request.model.heads, self.request.seq)

    def _trace(self, layouts: Iterable[Layout]) -> None:
        """Trace the families of `layouts` that have no traces for their micro-batches yet."""
        wanted: dict[Layout, tuple[int, int]] = {}
        for layout in layouts:
            key = self._family(layout)
            least, most, _ = self._families.get(key, (layout.micro_batch, 0, {}))
            least, most = wanted.get(key, (least, most))
            span = min(least, layout.micro_batch), max(most, layout.micro_batch)
            if key in wanted or span != self._families.get(key, (0, 0))[:2]:
                wanted[key] = span
        request = self.request
        # Families with stages or gradient hooks take longest and go first, so that workers end at about the same time.
        ordered = sorted(wanted.items(), key=lambda item: (item[0].pp > 1, item[0].zero >= 2), reverse=True)
        made = self.workers.map(
            trace_family, [(request.model, request.seq, key, *span, END_ROLES) for key, span in ordered]
        )
        for (key, span), (families, traces) in zip(ordered, made, strict=True):
            self._families[key] = *span, families
            self.traces += traces

    def _trace_middle(self, layouts: Iterable[Layout]) -> None:
        """Trace the middle stages of the families of `layouts` that have middle stages without traces."""
        request = self.request
        keys = dict.fromkeys(self._family(layout) for layout in layouts if layout.pp > 2)
        tasks = [
            (request.model, request.seq, key, *self._families[key][:2], MIDDLE_ROLES)
            for key in keys
            if MIDDLE not in self._families[key][2]
        ]
        for (_, _, key, *_), (middle, traces) in zip(
            tasks, self.workers.map(trace_family, tasks), strict=True
        ):
            self._families[key][2].update(middle)
            self.traces += traces

    def _shallow(self, layout: Layout) -> PlanRow:
        request = self.request
        families = self._families[self._family(layout)][2]
        roles = linear.estimate_memory(request.model, layout, families)
        fullest = max(roles.values(), key=lambda role: role.peak_bytes)
        memory = {
            "peak_bytes": fullest.peak_bytes,
            "states_bytes": fullest.states_bytes,
            "by_category": fullest.by_category,
            "peak_phase": fullest.phase,
            "by_role": {
                name: {"peak_bytes": role.peak_bytes, "states_bytes": role.states_bytes}
                for name, role in roles.items()
            },
        }
        row = PlanRow(layout, OK, SHALLOW, memory)
        if fullest.peak_bytes > request.allocatable:
            row.outcome = OOM
            row.ruled_out_by = largest_term(fullest.by_category)
            row.reason = f"{units.size(fullest.peak_bytes)} are live in {fullest.phase}"
        return row


def _times_in_worker(*arguments: Any) -> list[list[dict[str, Any] | str]]:
    """Call `times_of`, whose module needs torch, in a worker."""
    from repro.simulate.plan.extrapolation.step_time import times_of

    return times_of(*arguments)


def _intervals_in_worker(*arguments: Any) -> list[StepInterval | None]:
    """Call `intervals_of`, whose module needs torch, in a worker."""
    from repro.simulate.plan.extrapolation.step_time import intervals_of

    return intervals_of(*arguments)


def _full_row(request: PlanRequest, layout: Layout, time: bool) -> tuple[PlanRow, str]:
    """Return a row from a full trace, with times if `time`, and why it has no times; runs in a worker."""
    from repro.simulate.step import simulate

    found = simulate(
        plan_experiment(request, layout),
        request.system,
        memory_limit=request.limit,
        expandable=request.expandable,
        time=time,
    )
    document = found.as_dict()
    ideal = 0.0
    for role in found.roles:
        by_link: dict[str, int] = {}
        for sent in role.traffic:
            link = sent.link or ""
            by_link[link] = by_link.get(link, 0) + sent.sent_bytes
        ideal = max(ideal, ideal_s(request, layout, by_link))
    row = PlanRow(layout, found.outcome, FULL, document["memory"], document["comm"], ideal)
    row.trace_seconds = document["trace_seconds"]
    row.time = document["time"] or {} if found.outcome == OK else {}
    if found.outcome == OOM:
        fullest = found.fullest
        row.ruled_out_by = (
            FRAGMENTATION if fullest.by_fragmentation else largest_term(fullest.memory.by_category)
        )
        row.reason = found.reason
    return row, found.no_time


def plan_experiment(request: PlanRequest, layout: Layout) -> Experiment:
    """Return the experiment of one layout."""
    training = Training(seq=request.seq)
    return Experiment(
        name="plan", model=request.model, layout=layout, training=training, system=request.system.name
    )
