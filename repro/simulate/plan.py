"""Which layouts of a model fit a system, what they hold and send, and which come first.

Three kinds of answers, cheapest first, and each row says which it is:

    states     the model states alone, in closed form, are more than a device has: nothing is traced
    shallow    live bytes and traffic from shallow traces (:mod:`repro.simulate.estimate`)
    full       the whole step was traced and its allocations replayed (:mod:`repro.simulate.step`)

What the allocator reserves beyond live bytes decides where these are within :data:`MARGIN` of the limit: such
rows are traced in full, and so are the first ones of the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from repro.config import Experiment, Layout, Training
from repro.config.errors import ConfigError
from repro.models import flops
from repro.models.parameters import total
from repro.simulate import estimate
from repro.simulate.closed import ruled_out, stage_parameters, state_bytes
from repro.simulate.layouts import Request, candidates
from repro.simulate.shallow import Family, family_of, trace_family
from repro.simulate.terms import TERMS, binding
from repro.simulate.workers import Workers

STATES, SHALLOW, FULL = "states", "shallow", "full"
OK, OOM, UNDECIDED = "ok", "oom", "undecided"
MARGIN = 1.12
"""Reserved over live bytes at most, seen in full traces of models of published size (1.01 to 1.10)."""
CONFIRMED = 3
"""So many of the first rows are traced in full ..."""
MOST_FULL = 16
"""... and at most so many layouts altogether."""


@dataclass
class Row:
    """One layout of a plan.  Bytes; ``comm`` and parts of ``memory`` are empty where nothing was traced."""

    layout: Layout
    outcome: str
    """``ok``, ``oom``, or ``undecided`` where only a full trace could tell and none was made."""
    evidence: str
    memory: dict[str, Any]
    comm: dict[str, Any] = field(default_factory=dict)
    ideal_s: float | None = None
    """Seconds of a step at the devices' and the links' peak, nothing overlapped: an order, not a prediction."""
    ruled_out_by: str = ""
    """The term that rules it out: model states, activations, ... or fragmentation."""
    reason: str = ""
    trace_seconds: float = 0.0

    @property
    def bubble(self) -> float:
        """Idle over busy time of the pipeline, (p - 1) / (v m) (2104.04473 sec. 2.2)."""
        return (self.layout.pp - 1) / (self.layout.chunks * self.layout.accumulation)


class Planner:
    """Answers for layouts of one request; keeps the shallow traces that they share."""

    def __init__(self, request: Request, workers: Workers):
        self.request, self.workers = request, workers
        self.traces = 0
        self._families: dict[Layout, tuple[int, dict[str, Family]]] = {}

    def rows(self, layouts: Sequence[Layout]) -> list[Row]:
        """``states`` and ``shallow`` answers."""
        found = {layout: self._without_trace(layout) for layout in layouts}
        open_ones = [layout for layout, row in found.items() if row is None]
        self._trace(open_ones)
        return [row or self._shallow(layout) for layout, row in found.items()]

    def full(self, rows: Sequence[Row]) -> list[Row]:
        """The same rows from full traces."""
        request = self.request
        tasks = [(request, row.layout) for row in rows]
        self.traces += sum(min(3, row.layout.pp) for row in rows)
        return self.workers.map(_full, tasks)

    def _without_trace(self, layout: Layout) -> Row | None:
        request = self.request
        out = ruled_out(request.model, layout, request.allocatable)
        if out is None:
            return None
        category, states = out
        size, reason = sum(states.values()), f"model states alone are {_gb(sum(states.values()))} GB"
        by_role = {}
        for role, parameters in stage_parameters(request.model, layout).items():
            held = round(sum(state_bytes(parameters, layout).values()))
            by_role[role] = {"peak_bytes": held, "states_bytes": held}
        memory = {
            "peak_bytes": round(size),
            "by_category": {key: round(states[key]) for key in states},
            "by_role": by_role,
        }
        return Row(layout, OOM, STATES, memory, ruled_out_by=TERMS[category], reason=reason)

    def _trace(self, layouts: Iterable[Layout]) -> None:
        """Have the families of ``layouts`` traced as far as they are not."""
        widest: dict[Layout, int] = {}
        for layout in layouts:
            key = family_of(layout)
            widest[key] = max(widest.get(key, 1), layout.micro_batch)
        wanted = {key: size for key, size in widest.items() if self._families.get(key, (0, None))[0] < size}
        request = self.request
        made = self.workers.map(
            trace_family, [(request.model, request.seq, key, size) for key, size in wanted.items()]
        )
        for (key, size), (families, traces) in zip(wanted.items(), made, strict=True):
            self._families[key] = size, families
            self.traces += traces

    def _shallow(self, layout: Layout) -> Row:
        request = self.request
        families = self._families[family_of(layout)][1]
        roles = estimate.memory(request.model, layout, families)
        sent = estimate.traffic(request.model, layout, families, request.system)
        fullest = max(roles.values(), key=lambda role: role.peak_bytes)
        busiest = max(sent, key=lambda role: sum(sent[role].by_group.values()))
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
        comm = {
            "role": busiest,
            "sent_bytes": sum(sent[busiest].by_group.values()),
            "bytes_by_group": sent[busiest].by_group,
            "bytes_by_link": sent[busiest].by_link,
        }
        ideal = max(ideal_s(request, layout, rank.by_link) for rank in sent.values())
        row = Row(layout, OK, SHALLOW, memory, comm, ideal)
        if fullest.peak_bytes > request.allocatable:
            row.outcome = OOM
            row.ruled_out_by = binding(fullest.by_category)
            row.reason = f"{_gb(fullest.peak_bytes)} GB are live in {fullest.phase}"
        elif fullest.peak_bytes * MARGIN > request.allocatable:
            row.outcome = UNDECIDED
            row.reason = f"{_gb(fullest.peak_bytes)} GB are live: the allocator decides"
        return row


def plan(request: Request, workers: Workers) -> tuple[list[Row], int]:
    """All sensible layouts, best first, and the number of traces made.  Raises ``ConfigError`` if none exists."""
    if request.system.device.peak_flops:
        precision = candidates(request)[0].precision
        try:
            request.system.peak(precision)
        except ConfigError as error:
            raise ConfigError("--precision", error.value, error.expected) from None
    planner = Planner(request, workers)
    rows = planner.rows(candidates(request))
    rows += planner.rows(_partitioned(request, rows))
    full: dict[Layout, Row] = {}
    while len(full) < MOST_FULL:
        rows = sorted((full.get(row.layout, row) for row in rows), key=order)
        first = [row for row in rows if row.outcome == OK][:CONFIRMED]
        # An undecided layout may come before these.
        last = order(first[-1])[1:] if len(first) == CONFIRMED else ()
        close = [row for row in rows if row.outcome == UNDECIDED and (not last or order(row)[1:] < last)]
        wanted = [row for row in (*first, *close) if row.evidence != FULL][: MOST_FULL - len(full)]
        if not wanted:
            break
        full.update((row.layout, row) for row in planner.full(wanted[: max(CONFIRMED, workers.count)]))
    rows = sorted((full.get(row.layout, row) for row in rows), key=order)
    return rows, planner.traces


def _partitioned(request: Request, rows: Iterable[Row]) -> list[Layout]:
    """With P_a, what does not fit (or may not) without it for other reasons than its model states."""
    if "pa" in request.given:
        return []
    return [
        replace(row.layout, pa=True)
        for row in rows
        if row.evidence == SHALLOW
        and row.outcome != OK
        and row.layout.recompute
        and row.layout.tp > 1
        and not row.layout.sp
    ]


def order(row: Row) -> tuple[Any, ...]:
    """Best first: what fits, then the least :func:`ideal_s`, then what asks for least."""
    layout = row.layout
    rank = (OK, UNDECIDED, OOM).index(row.outcome)
    ideal = row.ideal_s if row.ideal_s is not None else float("inf")
    by_link = row.comm.get("bytes_by_link", {})
    simpler = (layout.recompute, layout.zero, layout.pp, layout.tp, layout.pa, -layout.micro_batch, layout.sp)
    if row.outcome == OOM:
        return (rank, row.evidence == STATES, row.memory["peak_bytes"], *simpler)
    return (rank, ideal, by_link.get("inter-node", 0), sum(by_link.values()), *simpler)


RULE = (
    "seconds of a step if arithmetic ran at the devices' peak (recomputation and the pipeline's bubble included) "
    "and messages at the links' full bandwidth, nothing overlapped; best first means the least of what fits"
)
"""What :func:`order` does, for people."""


def unknown(request: Request, precision: str) -> list[str]:
    """What the rule would need of the system and nobody knows; it counts as taking no time."""
    system = request.system
    found = []
    if system.device.peak_flops.get(precision) is None or system.device.peak_flops[precision].value is None:
        found.append(f"{precision} peak")
    return found + [
        f"{name} bandwidth" for name, link in system.links.items() if link.bandwidth.value is None
    ]


def ideal_s(request: Request, layout: Layout, by_link: dict[str, int]) -> float:
    """Seconds of a step at peak rates (:data:`RULE`); what is unknown takes none."""
    system, model = request.system, request.model
    bubble = (layout.pp - 1) / (layout.chunks * layout.accumulation)
    work = flops.hardware_flops(model, request.seq, layout.global_batch, layout.recompute) / layout.world
    peak = system.device.peak_flops.get(layout.precision)
    seconds = work * (1 + bubble) / peak.value if peak is not None and peak.value else 0.0
    for link, size in by_link.items():
        if link in system.links and system.links[link].bandwidth.value is not None:
            seconds += size / system.link_per_device(link)
    return seconds


def _full(request: Request, layout: Layout) -> Row:
    """A row from a full trace; runs in a worker."""
    from repro.simulate.shallow import freeze
    from repro.simulate.step import simulate

    freeze()
    found = simulate(
        experiment(request, layout),
        request.system,
        memory_limit=request.limit,
        expandable=request.expandable,
    )
    document = found.as_dict()
    ideal = 0.0
    for role in found.roles:
        by_link: dict[str, int] = {}
        for sent in role.traffic:
            by_link[sent.link] = by_link.get(sent.link, 0) + sent.sent_bytes
        ideal = max(ideal, ideal_s(request, layout, by_link))
    row = Row(layout, found.outcome, FULL, document["memory"], document["comm"], ideal)
    row.trace_seconds = document["trace_seconds"]
    if found.outcome == OOM:
        row.ruled_out_by = binding(found.fullest.memory.by_category)
        error = found.fullest.replay.out_of_memory
        if error is not None and found.fullest.memory.peak_bytes <= request.allocatable:
            row.ruled_out_by = "fragmentation"
        row.reason = found.reason
    return row


def experiment(request: Request, layout: Layout) -> Experiment:
    """The experiment of one layout."""
    training = Training(seq=request.seq)
    return Experiment(
        name="plan", model=request.model, layout=layout, training=training, system=request.system.name
    )


def document(request: Request, row: Row) -> dict[str, Any]:
    """One entry of ``repro plan --json``: the keys of ``repro simulate --json``, and why it is where it is."""
    layout, model = row.layout, request.model
    memory: dict[str, Any] = {"peak_bytes": None, "reserved_bytes": None, "by_category": {}, "by_role": {}}
    memory |= {"limit_bytes": request.allocatable, "context_bytes": request.system.context()} | row.memory
    comm: dict[str, Any] = {"bytes_by_group": None, "bytes_by_link": None} | row.comm
    return {
        "outcome": row.outcome,
        "reason": row.reason,
        "ruled_out_by": row.ruled_out_by,
        "evidence": row.evidence,
        "model": model.name,
        "system": request.system.name,
        "gpus": request.gpus,
        "layout": vars(layout),
        "params": total(model),
        "memory": memory,
        "comm": comm,
        "flops": {
            "model": flops.model_flops(model, request.seq, layout.global_batch),
            "hardware": flops.hardware_flops(model, request.seq, layout.global_batch, layout.recompute),
            "formula": flops.FORMULA,
        },
        "bubble": row.bubble,
        "ideal_s": row.ideal_s,
        "trace_seconds": row.trace_seconds,
    }


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"
