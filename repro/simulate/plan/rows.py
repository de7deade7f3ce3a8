"""Rows of a plan, their order, and ties: pairs of rows whose order depends on uncertain inputs of the prediction.

Two layouts are timed in the same sampled cases (`repro.config.systems.unknowns`): one input at an end of its range, or
random draws of all inputs. The ratio of both step times in each case decides, because an input that slows both layouts
alike has no effect on the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import log
from operator import lt
from random import Random
from typing import Any

from repro.config import Layout
from repro.config.layout import SELECTIVE
from repro.config.systems.unknowns import DRAWS
from repro.measure.statistics import quantile
from repro.model import counts
from repro.model.counts import total_parameters
from repro.results.interval import Sensitivity, StepInterval
from repro.simulate.plan.candidates import RANK_QUANTILES, PlanRequest, communicator_bytes

TimedStep = tuple[float, StepInterval]
"""Step time in seconds at the best values of all uncertain inputs, and the uncertainty interval of the step time."""
MIN_TIE_SHARE = 0.05
"""Minimum share of joint draws in which a later layout of a plan must be faster to be tied with an earlier layout. With
a smaller share, the 90 % interval of the ratio of their step times is on one side of 1."""


@dataclass(frozen=True)
class Tie:
    """Uncertain order of two layouts of a plan: the earlier layout may be slower than the later one."""

    than: int
    """Position of the earlier layout in the plan, from 1."""
    part: float
    """Share of the random draws of all uncertain inputs in which the later layout is faster."""
    by: tuple[str, ...]
    """Uncertain inputs because of which the later layout may be faster, sorted by effect on the ratio of step times.

    Each input alone can reverse the order of the two layouts. If no input can, only the most effective one is given.
    """


def find_ties(steps: Sequence[TimedStep]) -> list[list[Tie]]:
    """Return, for each step, the ties with preceding steps that may be slower. `steps`: timed layouts, best first."""
    found = []
    for place, mine in enumerate(steps):
        possible = [
            Tie(number, _share_faster(mine, its), _deciding_unknowns(mine, its))
            for number, its in enumerate(steps[:place], 1)
        ]
        found.append([one for one in possible if one.part > MIN_TIE_SHARE])
    return found


def _share_faster(mine: TimedStep, its: TimedStep) -> float:
    """Return the share of random draws of uncertain inputs in which the step `mine` is faster than the step `its`."""
    return sum(map(lt, mine[1].draws, its[1].draws)) / len(mine[1].draws)


def _deciding_unknowns(mine: TimedStep, its: TimedStep) -> tuple[str, ...]:
    def ratio(case: tuple[str, bool]) -> float:
        return mine[1].seconds_in(case, mine[0]) / its[1].seconds_in(case, its[0])

    moves: list[Sensitivity] = [*mine[1].moves, *its[1].moves]
    ends = {move.key: [ratio((move.key, end)) for end in (False, True)] for move in moves}
    order = sorted(ends, key=lambda key: -abs(log(ends[key][1] / ends[key][0])))
    return tuple([key for key in order if min(ends[key]) < 1] or order[:1])


STATES, RETAINED, BOUND, FULL = "states", "retained", "bound", "full"
"""Kinds of evidence for a layout's row in a plan: two lower bounds of memory, a lower bound of time, a simulation."""
OK, OOM, OPEN = "ok", "oom", "open"
"""Outcomes of a layout in a plan. An open layout may fit; its lower bound of step time exceeds the first step times."""


@dataclass
class PlanRow:
    """Row of a plan: the outcome, memory (bytes) and times (seconds) of one layout."""

    layout: Layout
    outcome: str
    """Outcome of the layout: `ok`, `oom`, or `open` if it was not simulated."""
    evidence: str
    memory: dict[str, Any]
    """Memory of the layout, with the keys of `memory` in `repro simulate --json`. Layouts that a lower bound excludes
    have some of these keys; open layouts (neither excluded nor simulated) have none."""
    comm: dict[str, Any] = field(default_factory=dict)
    """Bytes that the busiest rank sends in a step, by group and by link; empty without a simulation."""
    ideal_s: float | None = None
    """Step time at the peak rates of devices and links, without overlap. It is a sort key, not a prediction."""
    time: dict[str, Any] = field(default_factory=dict)
    """Predicted step time and its parts, with the keys of `time` in `repro simulate --json`. Empty for layouts that
    were not simulated, and for systems that lack the numbers for a time prediction."""
    interval: StepInterval | None = None
    """Uncertainty interval of the step time; None except in the first rows of a plan."""
    is_tight: bool = False
    """Whether the layout fits and leaves less than `MIN_HEADROOM` of the device's memory."""
    rank_s: float | None = None
    """Quantile of the step time that orders a plan's first rows; the step time if no input is uncertain."""
    undecided: list[Tie] | None = None
    """Earlier rows of the plan that may be slower than this row (ties); None if the row was not compared."""
    ruled_out_by: str = ""
    """Memory category because of which the layout does not fit, or fragmentation; empty if the layout fits."""
    reason: str = ""
    trace_seconds: float = 0.0
    least_s: float = 0.0
    """Lower bound of an unsimulated layout's step time in seconds; of the time at peak rates if none is predicted."""

    @property
    def seconds(self) -> float:
        """Step time in seconds that orders a plan: predicted, else at peak rates; a lower bound for open layouts."""
        if self.outcome == OPEN:
            return self.least_s
        ideal = self.ideal_s if self.ideal_s is not None else float("inf")
        seconds: float = self.time.get("step_s", ideal)
        return seconds

    @property
    def bubble(self) -> float:
        """Ratio of idle time to busy time of the pipeline, (p - 1) / (v m) (2104.04473 sec. 2.2)."""
        return (self.layout.pp - 1) / (self.layout.chunks * self.layout.accumulation)


def rank_rows(rows: Sequence[PlanRow], rank_by: str) -> list[PlanRow]:
    """Return plan rows sorted by a step time quantile, and set ties; rows with little free memory are last, untied."""
    for row in rows:
        draws = [row.seconds] if row.interval is None else row.interval.draws
        row.rank_s, row.undecided = quantile(draws, RANK_QUANTILES[rank_by]), None if row.is_tight else []
    ordered = sorted(rows, key=lambda row: (row.is_tight, row.rank_s))
    some = [(row, row.interval) for row in ordered if row.interval is not None and not row.is_tight]
    ties = find_ties([(row.seconds, interval) for row, interval in some])
    for (row, _), its in zip(some, ties, strict=True):
        row.undecided = its
    return ordered


def rank_systems(found: Sequence[tuple[PlanRequest, Sequence[PlanRow]]]) -> list[tuple[PlanRequest, PlanRow]]:
    """Return the rows of the plans of several systems in one order, each with its request, and set their ties.

    `found`: each system's rows, for the same model and global batch. Rows that `rank_rows` compared come first. They
    are sorted by the same quantile of the step time, or of the cost if `rank_by` is `cost`.
    """
    pairs = [(request, row) for request, rows in found for row in rows]
    if len(found) == 1:
        return pairs

    def order(pair: tuple[PlanRequest, PlanRow]) -> tuple[Any, ...]:
        request, row = pair
        if row.rank_s is None:
            return (1, *plan_order(row))
        return (0, row.is_tight, row.rank_s * request.ranked_price)

    pairs.sort(key=order)
    compared = [pair for pair in pairs if pair[1].undecided is not None]
    for (_, row), ties in zip(compared, find_ties([_timed_cost(*pair) for pair in compared]), strict=True):
        row.undecided = ties
    return pairs


def _timed_cost(request: PlanRequest, row: PlanRow) -> TimedStep:
    """Return the step time and interval of a row, multiplied by the price of the system if `rank_by` is `cost`.

    Uncertain inputs of two systems are independent. Keys therefore get the system's name, and draws are shuffled.
    """
    unit, name = request.ranked_price, request.system.name
    interval = row.interval or StepInterval(draws=[row.seconds] * DRAWS, moves=[])
    moves = [
        replace(move, key=f"{move.key} ({name})", low_s=move.low_s * unit, high_s=move.high_s * unit)
        for move in interval.moves
    ]
    draws = Random(name).sample(interval.draws, len(interval.draws))
    return row.seconds * unit, StepInterval(draws=[seconds * unit for seconds in draws], moves=moves)


def plan_order(row: PlanRow) -> tuple[Any, ...]:
    """Return a plan row's sort key: fitting rows, rows with little free memory, open (unsimulated) rows, OOM rows.

    Among these, the shortest step time (or else time at peak rates) comes first, then the simplest layout.
    """
    if row.outcome == OOM:
        return (3, row.evidence != FULL, row.memory["peak_bytes"], *_complexity(row.layout))
    by_link = row.comm.get("bytes_by_link", {})
    sent = by_link.get("inter-node", 0), sum(by_link.values())
    return (2 if row.outcome == OPEN else row.is_tight, row.seconds, *sent, *_complexity(row.layout))


def _complexity(layout: Layout) -> tuple[Any, ...]:
    """Return the sort key by which a plan prefers the simpler one of two layouts with equal step times."""
    again, degrees = (
        (layout.has_checkpoints, layout.recompute == SELECTIVE),
        (layout.pp, layout.tp, layout.cp),
    )
    return (again, layout.zero, *degrees, layout.pa, -layout.micro_batch, layout.sp)


IDEAL_ORDER_RULE = (
    "the ideal time, the sum of arithmetic time and message time without overlap.  Arithmetic runs at the peak rate "
    "of the devices, including recomputation and the bubble of the pipeline.  Messages run at the full bandwidth of "
    "the links"
)
"""Printed rule by which a plan orders layouts if the system lacks the numbers for a time prediction."""


def unknown_rates(request: PlanRequest, precision: str) -> list[str]:
    """Return the peak rates and bandwidths that the step time at peak rates needs and the system's file lacks."""
    system = request.system
    found = []
    if system.device.peak_flops.get(precision) is None or system.device.peak_flops[precision].value is None:
        found.append(f"{precision} peak")
    return found + [
        f"{name} bandwidth" for name, link in system.links.items() if link.bandwidth.value is None
    ]


def ideal_s(request: PlanRequest, layout: Layout, by_link: Mapping[str, float]) -> float:
    """Return the step time in seconds at the peak rates of devices and links; work at an unknown rate is left out."""
    system, model = request.system, request.model
    bubble = (layout.pp - 1) / (layout.chunks * layout.accumulation)
    work = counts.hardware_flops(model, request.seq, layout.global_batch, layout.recompute) / layout.world
    peak = system.device.peak_flops.get(layout.precision)
    seconds = work * (1 + bubble) / peak.value if peak is not None and peak.value else 0.0
    for link, size in by_link.items():
        if link in system.links and system.links[link].bandwidth.value is not None:
            seconds += size / system.link_per_device(link)
    return seconds


def training_cost(request: PlanRequest, row: PlanRow) -> dict[str, Any] | None:
    """Return duration, energy and cost of training on `request.tokens` at the predicted speed.

    `energy_mwh` is an upper limit, at the maximum power of the nodes; `cost` is in US dollars. Either is missing if the
    system lacks the power or the price. `interval` has all values at both ends of the interval of the step time.
    """
    if not row.time or not request.tokens:
        return None
    steps, gpus = request.tokens / (request.global_batch * request.seq), request.gpus
    megawatts, price = gpus * (request.system.device.power_w.value or 0) / 1e6, gpus * (request.price or 0)
    per_hour = {"days": 1 / 24, "gpu_hours": gpus, "energy_mwh": megawatts, "cost": price}

    def amounts(step_s: float) -> dict[str, float]:
        return {key: steps * step_s / 3600 * rate for key, rate in per_hour.items() if rate}

    known = row.time["interval"]
    interval = {end: amounts(known[f"{end}_s"]) for end in ("low", "high")} if known else None
    return {"tokens": request.tokens, "steps": steps, **amounts(row.time["step_s"]), "interval": interval}


def plan_entry(request: PlanRequest, row: PlanRow) -> dict[str, Any]:
    """Return one entry of `repro plan --json`: the keys of `repro simulate --json`, and the keys of the plan row."""
    layout, model = row.layout, request.model
    memory: dict[str, Any] = {"peak_bytes": None, "reserved_bytes": None, "by_category": {}, "by_role": {}}
    communicators = communicator_bytes(layout, request.system)
    memory |= {
        "limit_bytes": request.allocatable - communicators,
        "context_bytes": request.system.context(),
        "communicator_bytes": communicators,
    } | row.memory
    comm: dict[str, Any] = {"bytes_by_group": None, "bytes_by_link": None} | row.comm
    return {
        "outcome": row.outcome,
        "reason": row.reason,
        "ruled_out_by": row.ruled_out_by,
        "evidence": row.evidence,
        "model": model.name,
        "system": request.system.name,
        "gpus": request.gpus,
        "layout": asdict(layout),
        "params": total_parameters(model),
        "memory": memory,
        "comm": comm,
        "flops": {
            "model": counts.model_flops(model, request.seq, layout.global_batch),
            "model_causal": counts.causal_flops(model, request.seq, layout.global_batch),
            "hardware": counts.hardware_flops(model, request.seq, layout.global_batch, layout.recompute),
            "formula": counts.flops_formula(model),
        },
        "bubble": row.bubble,
        "ideal_s": row.ideal_s,
        "time": row.time or None,
        "rank_s": row.rank_s,
        "tight": row.is_tight,
        "undecided": None if row.undecided is None else [asdict(one) for one in row.undecided],
        "training": training_cost(request, row),
        "trace_seconds": row.trace_seconds,
    }
