"""Search for the largest model (or micro-batch) that fits the devices' memory, and the smallest that does not.

Memory is nearly linear in the number of layers, so two trials with few layers predict the limit. Trials near the limit
decide it: the answer is a value that fits next to a value that does not. Each trial is a simulation of the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from repro.config import Experiment, Layout, Model, Training
from repro.config.errors import ConfigError, require
from repro.config.system import System
from repro.model.counts import total_parameters
from repro.simulate.plan.candidates import (
    LayoutQuery,
    communicator_bytes,
    complete_layout,
    device_memory_limit,
    parse_memory_size,
)
from repro.simulate.plan.closed_form import FRAGMENTATION, largest_term, suggested_width

MAX_LAYERS = 1000
"""Maximum number of layers that a search for the largest model tries. The trace of a deeper model takes minutes."""
MAX_SAMPLES = 4096
LAYERS, MICRO_BATCH = "layers", "micro-batch"
SEARCHES = (LAYERS, MICRO_BATCH)


@dataclass(frozen=True)
class FitQuestion:
    """Search for the largest number of layers or the largest micro-batch: model, layout, system and limits."""

    model: Model
    """Model whose number of layers the search varies. A search for the micro-batch leaves the model unchanged."""
    layout: Layout
    system: System
    limit: int
    """Bytes of one device's memory, including the CUDA context."""
    search: str
    seq: int
    """Tokens of a sample; 0 selects the model's maximum."""
    free_batch: bool
    """Whether the global batch grows with the micro-batch; otherwise, the micro-batch must divide the global batch."""
    expandable: bool

    @property
    def allocatable(self) -> int:
        """Bytes of a device's memory less the CUDA context."""
        return self.limit - self.system.context()

    @property
    def communicators(self) -> int:
        """Bytes of NCCL's communicator buffers on a device, which a trial subtracts from the memory limit."""
        return communicator_bytes(self.layout, self.system)

    def values(self) -> range | list[int]:
        """Return the numbers of layers, or the micro-batches, that a search for the largest one tries, ascending."""
        layout = self.layout
        if self.search == LAYERS:
            step = layout.pp * layout.chunks
            return range(step, max(MAX_LAYERS, step) + 1, step)
        if self.free_batch:
            return range(1, MAX_SAMPLES + 1)
        stages = layout.pp if layout.schedule == "interleaved" else 1
        sizes = range(1, min(layout.replica_batch, MAX_SAMPLES) + 1)
        return [size for size in sizes if layout.replica_batch % (size * stages) == 0]

    def experiment(self, value: int) -> Experiment:
        """Return the experiment of a trial with `value` layers, or with `value` samples per micro-batch."""
        model, layout = self.model, self.layout
        if self.search == LAYERS:
            model = replace(model, layers=value, name=f"gpt-{value}x{model.hidden}")
        else:
            global_batch = value * layout.dp * layout.accumulation if self.free_batch else layout.global_batch
            layout = replace(layout, micro_batch=value, global_batch=global_batch)
        training = Training(seq=self.seq)
        return Experiment(name="fit", model=model, layout=layout, training=training, system=self.system.name)


@dataclass(frozen=True)
class FitTrial:
    """Trial of a search for the largest number of layers or micro-batch: one training step with the tried value."""

    value: int
    outcome: str
    """Outcome of the trial: `ok`, `oom`, or another failure on real devices."""
    needed: int | None
    """Bytes of device memory that the trial requires; None if a failed trial does not report them."""
    binding: str = ""
    """Cause of an out-of-memory trial: its largest memory category, or fragmentation; empty if the trial fits."""
    reason: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether the tried step fits the devices' memory."""
        return self.outcome == "ok"


@dataclass(frozen=True)
class FitAnswer:
    """Largest trial of a search that fits (None: none fits), and smallest trial that does not (None: all fit)."""

    largest: FitTrial | None
    first_failing: FitTrial | None
    trials: list[FitTrial]


def search_largest(
    values: Sequence[int], attempt: Callable[[int], FitTrial], limit: int, start: Sequence[int]
) -> FitAnswer:
    """Search for two neighbouring values of which the smaller fits the devices' memory and the larger does not.

    `values` ascend, and larger values need more memory. The search tries the values of `start` first. Each next value
    is the one at which the line through two trials reaches `limit` bytes. If trials do not report bytes, the search
    moves 1, 3, 7, ... values away from the first trial, and then halves the interval that contains the answer.
    """
    found: dict[int, FitTrial] = {}
    low, high = -1, len(values)
    queue = [value for value in start if value in values]
    halve = False
    while high - low > 1:
        if queue:
            index = bisect_right(values, queue.pop(0)) - 1
            if not low < index < high:
                continue
        else:
            index = (low + high) // 2 if halve else _next_index(values, found, limit, low, high)
        width, bracketed = high - low, low >= 0 and high < len(values)
        trial = found[values[index]] = attempt(values[index])
        # Failures other than out-of-memory do not report the required bytes, so the search ends.
        if trial.outcome not in ("ok", "oom"):
            high = index
            break
        if trial.fits:
            low = index
        else:
            high = index
        # If this trial excluded fewer than half of the remaining values, try the middle value next.
        halve = bracketed and not halve and high - low > width // 2
    largest = found[values[low]] if low >= 0 else None
    failing = found[values[high]] if high < len(values) else None
    return FitAnswer(largest, failing, list(found.values()))


def _next_index(values: Sequence[int], found: dict[int, FitTrial], limit: int, low: int, high: int) -> int:
    """Return the index of the next value to try, strictly between `low` (which fits) and `high` (which does not)."""
    points = sorted((t.value, t.needed) for t in found.values() if t.needed is not None)
    # Interpolate between the largest size that fits and the smallest that does not, if both trials report bytes.
    if high < len(values):
        points = [point for point in points if low >= 0 and point[0] in (values[low], values[high])]
    if len(points) >= 2:
        (a, at_a), (b, at_b) = points[-2:]
        if at_b > at_a:
            index = bisect_right(values, a + (limit - at_a) * (b - a) / (at_b - at_a)) - 1
            return min(max(index, low + 1), high - 1)
    first = values.index(next(iter(found), values[0]))
    if high == len(values):  # No trial has failed yet.
        return min(2 * low - first + 1, high - 1) if low >= 0 else 0
    if low < 0:  # No trial fits yet.
        return max(2 * high - first - 1, 0)
    return (low + high) // 2


def fit_by_simulation(question: FitQuestion) -> FitAnswer:
    """Search for the largest number of layers or micro-batch that fits, with a simulated step for each trial."""
    values = question.values()
    deep = question.layout.pp > 1 or question.search != LAYERS
    few = [values[i] for i in ((0, 1) if deep else (2, 5)) if i < len(values)]

    def attempt(value: int) -> FitTrial:
        if question.search == LAYERS and value == values[-1] and len(values) > 1:
            what = f"a larger width, because about {value} layers of this width or more would fit"
            raise ConfigError("hidden", question.model.hidden, what)
        return _simulate_trial(question, value)

    return search_largest(values, attempt, question.allocatable - question.communicators, few)


def _simulate_trial(question: FitQuestion, value: int) -> FitTrial:
    from repro.simulate.memory.allocator import replay
    from repro.simulate.step import simulate

    found = simulate(
        question.experiment(value),
        question.system,
        memory_limit=question.limit - question.communicators,
        expandable=question.expandable,
    )
    document = found.as_dict()
    fullest = found.fullest
    needed = max(
        replay(traced.events, expandable=question.expandable).peak_reserved for traced in found.traces
    )
    largest = largest_term(fullest.memory.by_category)
    term = ""
    if found.outcome != "ok":
        term = FRAGMENTATION if fullest.by_fragmentation else largest
    detail = {
        "largest_term": largest,
        **{key: document[key] for key in ("params", "layout", "memory", "trace_seconds")},
        "reserved_bytes": fullest.replay.peak_reserved,
        "traces": len(found.traces),
    }
    return FitTrial(value, found.outcome, needed, term, found.reason, detail)


def question_of(
    system: System, query: LayoutQuery, model: Model | None, sizes: dict[str, int], what: str
) -> FitQuestion:
    """Return the search that the options of `repro fit` describe. Raises `ConfigError` for invalid options.

    `sizes`: hidden, heads and vocab if they are given, else 0. Missing sizes are those of `model`. Without a model, the
    width is one whose largest model has about width/64 layers, with heads of 128 (or 64). The vocabulary is then 51,200
    and the sequence 1,024, as in the ZeRO paper's models.
    """
    require(what in SEARCHES, "search", what, f"one of {', '.join(SEARCHES)}")
    hint = "is needed in a search for the largest micro-batch"
    require(what == LAYERS or model is not None, "model", "", says=hint)
    layout = complete_layout(query.layout, query.gpus, system)
    device_limit = device_memory_limit(system, parse_memory_size(query.memory_limit))
    sizes = {key: value for key, value in {**sizes, "seq": query.seq}.items() if value}
    for key, value in sizes.items():
        require(value >= 1, key, value, "an integer of at least 1")
    keys: dict[str, Any]
    if model is None:
        available = device_limit - system.context()
        hidden = sizes.get("hidden") or suggested_width(available, layout.tp * layout.pp, layout)
        keys = {"heads": _heads(hidden, layout.tp), "vocab": 51200, "seq": 1024, **sizes, "hidden": hidden}
        shape, tokens = Model(name="gpt", layers=1, **keys), 0
    else:
        known, tokens = model, sizes.get("seq", 0)
        keys = {key: value for key, value in sizes.items() if key != "seq"}
        shape = replace(known, **keys)
    free = not query.layout.get("global_batch")
    question = FitQuestion(shape, layout, system, device_limit, what, tokens, free, query.expandable)
    question.experiment(question.values()[0])
    return question


def _heads(hidden: int, tp: int) -> int:
    """Return a number of attention heads that tp divides: heads of width 128, else of width 64, else tp heads."""
    sizes = (hidden // width for width in (128, 64) if hidden % width == 0)
    return next((heads for heads in sizes if heads % tp == 0), tp)


def fit_document(question: FitQuestion, answer: FitAnswer) -> dict[str, Any]:
    """Return the document of `repro fit --json`."""
    model, failing = question.model, answer.first_failing
    return {
        "search": question.search,
        "system": question.system.name,
        "gpus": question.layout.world,
        "limit_bytes": question.allocatable - question.communicators,
        "context_bytes": question.system.context(),
        "communicator_bytes": question.communicators,
        "layout": asdict(question.layout),
        "sizes": {key: getattr(model, key) for key in ("hidden", "heads", "vocab", "seq")},
        "largest": _trial_document(question, answer.largest),
        "first_failing": _trial_document(question, failing),
        "binding": failing.binding if failing is not None else "",
        "trials": [{"value": t.value, "outcome": t.outcome, "needed_bytes": t.needed} for t in answer.trials],
        "traces": sum(t.detail.get("traces", 0) for t in answer.trials),
        "trace_seconds": round(sum(t.detail.get("trace_seconds", 0.0) for t in answer.trials), 3),
    }


def _trial_document(question: FitQuestion, trial: FitTrial | None) -> dict[str, Any] | None:
    if trial is None:
        return None
    experiment = question.experiment(trial.value)
    found = {
        "layers": experiment.model.layers,
        "micro_batch": experiment.layout.micro_batch,
        "params": total_parameters(experiment.model),
        "outcome": trial.outcome,
        "reason": trial.reason,
        # Near the limit, the allocator releases cached segments and may reserve less than without a limit.
        "needed_bytes": trial.detail.get("reserved_bytes", trial.needed) if trial.fits else trial.needed,
    }
    details = ("largest_term", "memory", "memory_of_process")
    return found | {key: trial.detail[key] for key in details if key in trial.detail}
