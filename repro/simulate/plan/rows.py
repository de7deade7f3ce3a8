"""Rows of a plan, their order, and ties between rows whose order the unknown numbers leave open.

Two layouts are timed in the same cases (`repro.config.systems.unknowns`): each unknown at an end of its range, and
joint draws of all. The ratio of their times in each case decides, because an unknown that slows both alike decides
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any

from repro.config import Layout
from repro.model import counts
from repro.model.counts import total_parameters
from repro.results.interval import Sensitivity, StepInterval
from repro.simulate.plan.candidates import PlanRequest

TimedStep = tuple[float, StepInterval]
"""Seconds at the best values, and what they may be instead."""
MIN_TIE_SHARE = 0.05
"""Of the joint draws: where the layout that comes later is faster in more of them, what is known does not say which
is; where it is in none of the rest either, the 90 % interval of the ratio is on one side of 1."""


@dataclass(frozen=True)
class Tie:
    """A layout that may be faster than one which comes before it."""

    than: int
    """The place of the other one, from 1."""
    part: float
    """Of the joint draws, in which it is."""
    by: tuple[str, ...]
    """Unknowns that turn their order when they alone are at an end of their range, or else the one that comes nearest,
    the one that moves their ratio most first."""

    def as_dict(self) -> dict[str, Any]:
        """An entry of `undecided` in `repro plan --json`."""
        return {"than": self.than, "part": self.part, "by": list(self.by)}


def find_ties(steps: Sequence[TimedStep]) -> list[list[Tie]]:
    """Of each of `steps`, best first, those before it that may be slower."""
    found = []
    for place, mine in enumerate(steps):
        beside = [
            Tie(number, _share_faster(mine, its), _deciding_unknowns(mine, its))
            for number, its in enumerate(steps[:place], 1)
        ]
        found.append([one for one in beside if one.part > MIN_TIE_SHARE])
    return found


def _share_faster(mine: TimedStep, its: TimedStep) -> float:
    """Of the draws, in which `mine` is faster."""
    pairs = list(zip(mine[1].draws, its[1].draws, strict=True))
    return sum(one < other for one, other in pairs) / len(pairs)


def _deciding_unknowns(mine: TimedStep, its: TimedStep) -> tuple[str, ...]:
    moves: list[Sensitivity] = [*mine[1].moves, *its[1].moves]
    ends = {move.key: [_time_ratio(mine, its, (move.key, end)) for end in (False, True)] for move in moves}
    order = sorted(ends, key=lambda key: -abs(log(ends[key][1] / ends[key][0])))
    turning = [key for key in order if min(ends[key]) < 1]
    return tuple(turning or order[:1])


def _time_ratio(mine: TimedStep, its: TimedStep, case: tuple[str, bool]) -> float:
    """Seconds of `mine` over those of `its` in one case."""
    return mine[1].seconds_in(case, mine[0]) / its[1].seconds_in(case, its[0])


STATES, SHALLOW, FULL = "states", "shallow", "full"
OK, OOM = "ok", "oom"


@dataclass
class PlanRow:
    """One layout of a plan.  Bytes; parts of `memory` are empty where nothing was traced."""

    layout: Layout
    outcome: str
    """`ok` or `oom`."""
    evidence: str
    memory: dict[str, Any]
    comm: dict[str, Any] = field(default_factory=dict)
    """Likewise, and of a row that is neither timed nor shown."""
    ideal_s: float | None = None
    """Seconds of a step at the devices' and the links' peak, nothing overlapped: an order, not a prediction."""
    time: dict[str, Any] = field(default_factory=dict)
    """The predicted step, as `repro.simulate.time.predict.Prediction.as_dict` has it; empty where the system lacks
    numbers for it, or nothing was traced."""
    interval: StepInterval | None = None
    """What the step may take instead, of the first rows."""
    undecided: list[Tie] | None = None
    """Rows before it that it may be faster than; None where it was compared with none."""
    ruled_out_by: str = ""
    """The term that rules it out: model states, activations, ... or fragmentation."""
    reason: str = ""
    trace_seconds: float = 0.0
    open: bool = False
    """It may fit, and nothing is decided that takes more: its time, or what the allocator makes of it.  As far as it is
    known it comes after all rows that were asked for."""
    least_s: float = 0.0
    """Seconds that its step takes at least, of one that is `open` (`repro.simulate.plan.extrapolation.lower_bound`)."""

    @property
    def seconds(self) -> float:
        """Of its step; the least that it takes while nothing more is known, without times `ideal_s`."""
        if self.open and self.least_s:
            return self.least_s
        ideal = self.ideal_s if self.ideal_s is not None else float("inf")
        seconds: float = self.time.get("step_s", ideal)
        return seconds

    @property
    def bubble(self) -> float:
        """Idle over busy time of the pipeline, (p - 1) / (v m) (2104.04473 sec. 2.2)."""
        return (self.layout.pp - 1) / (self.layout.chunks * self.layout.accumulation)


def plan_order(row: PlanRow) -> tuple[Any, ...]:
    """Best first: what fits, then the shortest step (without times: the least `ideal_s`), then what asks for
    least."""
    if row.outcome == OOM:
        return (1, row.evidence == STATES, row.memory["peak_bytes"], *_complexity(row.layout))
    by_link = row.comm.get("bytes_by_link", {})
    return (0, row.seconds, by_link.get("inter-node", 0), sum(by_link.values()), *_complexity(row.layout))


def _complexity(layout: Layout) -> tuple[Any, ...]:
    """What asks for least."""
    return (
        layout.recompute,
        layout.zero,
        layout.pp,
        layout.tp,
        layout.cp,
        layout.pa,
        -layout.micro_batch,
        layout.sp,
    )


TIME_ORDER_RULE = (
    "seconds of a step, predicted from the trace's operators and messages on this system; best first: "
    "the least"
)
"""What `order` does, for people."""
IDEAL_ORDER_RULE = (
    "seconds of a step if arithmetic ran at the devices' peak (recomputation and the pipeline's bubble included) "
    "and messages at the links' full bandwidth, nothing overlapped; best first means the least of what fits.  It "
    "puts layouts in order and predicts no time"
)
"""What it does where the system lacks the numbers for times."""


def unknown_rates(request: PlanRequest, precision: str) -> list[str]:
    """What `IDEAL_ORDER_RULE` would need of the system and nobody knows; it counts as taking no time."""
    system = request.system
    found = []
    if system.device.peak_flops.get(precision) is None or system.device.peak_flops[precision].value is None:
        found.append(f"{precision} peak")
    return found + [
        f"{name} bandwidth" for name, link in system.links.items() if link.bandwidth.value is None
    ]


def ideal_s(request: PlanRequest, layout: Layout, by_link: dict[str, int]) -> float:
    """Seconds of a step at peak rates (`IDEAL_ORDER_RULE`); what is unknown takes none."""
    system, model = request.system, request.model
    bubble = (layout.pp - 1) / (layout.chunks * layout.accumulation)
    work = counts.hardware_flops(model, request.seq, layout.global_batch, layout.recompute) / layout.world
    peak = system.device.peak_flops.get(layout.precision)
    seconds = work * (1 + bubble) / peak.value if peak is not None and peak.value else 0.0
    for link, size in by_link.items():
        if link in system.links and system.links[link].bandwidth.value is not None:
            seconds += size / system.link_per_device(link)
    return seconds


def training_cost(request: PlanRequest, row: PlanRow) -> dict[str, float] | None:
    """What it takes to train on `request.tokens` at the predicted speed, and what that costs."""
    if not row.time or not request.tokens:
        return None
    steps = request.tokens / (request.global_batch * request.seq)
    hours = steps * row.time["step_s"] / 3600
    found = {"tokens": request.tokens, "steps": steps, "days": hours / 24, "gpu_hours": hours * request.gpus}
    if request.price_per_gpu_hour:
        found["cost"] = found["gpu_hours"] * request.price_per_gpu_hour
    return found


def plan_entry(request: PlanRequest, row: PlanRow) -> dict[str, Any]:
    """One entry of `repro plan --json`: the keys of `repro simulate --json`, and why it is where it is."""
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
        "params": total_parameters(model),
        "memory": memory,
        "comm": comm,
        "flops": {
            "model": counts.model_flops(model, request.seq, layout.global_batch),
            "hardware": counts.hardware_flops(model, request.seq, layout.global_batch, layout.recompute),
            "formula": counts.flops_formula(model),
        },
        "bubble": row.bubble,
        "ideal_s": row.ideal_s,
        "time": row.time or None,
        "undecided": None if row.undecided is None else [one.as_dict() for one in row.undecided],
        "training": training_cost(request, row),
        "trace_seconds": row.trace_seconds,
    }
