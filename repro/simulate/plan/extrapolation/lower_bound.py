"""Lower bound of a step time from shallow traces, and the rates of devices and links that it takes; no import of torch.

Each operator of a micro-batch takes at least its arithmetic at the rate of the largest products, or its bytes at the
memory's bandwidth. A collective over tp that is waited for at once takes at least its bytes at its rings' rate. A later
stage begins after the preceding stages have sent it a micro-batch, and they end after it:

    T  >=  m (f + b) of the last stage  +  f + b of one micro-batch on each stage before it (of v chunks, 1/v of it)
    T  >=  m (f + b) of the first stage

with m micro-batches (2104.04473 sec. 2.2 has the same sum for equal stages). A stage also reduces gradients and gathers
parameters, one collective of a group after the other, all of them in every step:

    T  >=  bytes that a rank sends in a group  /  its rings' rate

Waits, latencies, the host, partly empty waves and the update only add to these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from repro.config import Layout, Model
from repro.config.system import System
from repro.parallel.ledger import RING_PASSES, SEND
from repro.simulate.plan.closed_form import ALL, FIRST, LAST
from repro.simulate.time import calibration
from repro.simulate.time.calibration import Generation
from repro.simulate.time.device import (
    ATTENTION,
    BIASED_ATTENTION,
    MATMULS,
    MODELLED_KERNELS,
    STREAMED,
    DeviceCost,
    Kernels,
    bytes_moved,
)
from repro.simulate.time.network import Network
from repro.simulate.trace.events import Event, Message, Operator, PhaseStart, Wait

if TYPE_CHECKING:
    from repro.simulate.trace.roles import Trace


def kernels_of(generation: Generation) -> Kernels:
    """Return `calibrated_kernels`, whose module needs torch."""
    from repro.simulate.time.predict import calibrated_kernels

    return calibrated_kernels(generation)


class SystemRates:
    """Rates of devices and links of one system, with a cache that layouts share."""

    def __init__(self, system: System, kernels: Callable[[Generation], Kernels] = kernels_of):
        """`kernels`: `kernels_of`, or a function that calls it in a worker."""
        self.system, self._kernels = system, kernels
        self._costs: dict[tuple[str, str], DeviceCost] = {}
        self._networks: dict[Layout, Network] = {}

    def cost(self, layout: Layout) -> DeviceCost:
        """Return the cost of operators with the layout's kernels; `ConfigError` if numbers are missing."""
        key = layout.precision, layout.kernels
        if key not in self._costs:
            generation = calibration.calibration_point_of(layout.kernels, self.system)
            kernels = self._kernels(generation) if generation is not None else MODELLED_KERNELS
            self._costs[key] = DeviceCost(self.system, layout.precision, kernels, layout.world)
        return self._costs[key]

    def network(self, layout: Layout) -> Network:
        """Return the links as the groups of `layout` use them."""
        groups = network_layout(layout)
        if groups not in self._networks:
            self._networks[groups] = Network(self.system, groups)
        return self._networks[groups]


def network_layout(layout: Layout) -> Layout:
    """Return the degrees and the order of `layout`, on which networks depend."""
    return Layout(tp=layout.tp, cp=layout.cp, dp=layout.dp, pp=layout.pp, order=layout.order)


Payloads = Mapping[tuple[str, str, str], float]
"""Bytes by operation, group and purpose of messages."""
WorkAmounts = npt.NDArray[Any]
"""Amounts of work, [first, ordinary and last micro-batch; forward, backward; kind]."""
PRODUCTS, FUSED, MOVED, RINGS, FIXED = range(5)
"""Kinds of work: FLOP of products and of fused attention; bytes that operators move and that a tp rank sends, both
proportional to the samples of a micro-batch; and bytes that do not depend on the samples."""
PASSES = ("forward", "backward")
OVERLAPPED_GROUPS = ("dp", "cp")
"""Groups of a stage whose collectives overlap with its work."""


def minimum_work(traced: Trace, wide: Trace, times: float) -> WorkAmounts:
    """Return the minimum work of the micro-batches of `traced`; `wide` has `times` as many samples in each.

    Work is left out if its bytes in `wide` are neither equal nor `times` as many.
    """
    from repro.simulate.trace.roles import TYPICAL_MICRO_BATCH

    found = np.zeros((3, len(PASSES), FIXED + 1))
    micro_batches = {traced.layout.accumulation - 1: 2, TYPICAL_MICRO_BATCH: 1, 0: 0}
    known = {_event_sizes(event) for event in wide.events if isinstance(event, (Operator, Message))}
    for place, event, next_one in _passes(traced):
        at = micro_batches.get(place.micro_batch)
        if at is None:
            continue
        kind, amount = _amount(event, next_one)
        if amount and kind not in (PRODUCTS, FUSED):
            name, *sizes = _event_sizes(event)
            if kind == FIXED or (name, *(times * size for size in sizes)) not in known:
                if kind == RINGS or _event_sizes(event) not in known:
                    continue
                kind = FIXED
        found[at, PASSES.index(place.name), kind] += amount
    return found


def _passes(traced: Trace) -> Iterator[tuple[PhaseStart, Event, Event]]:
    """Yield (pass, event, following event) for the events of forward and backward passes."""
    step = traced.events[traced.step_start : traced.step_stop]
    events = [event for event in step if isinstance(event, (Operator, Message, Wait, PhaseStart))]
    place = None
    for event, after in zip(events, [*events[1:], Wait(-1)], strict=True):
        if isinstance(event, PhaseStart):
            place = event if event.name in PASSES else None
        elif place is not None:
            yield place, event, after


def _event_sizes(event: Event) -> tuple[Any, ...]:
    """Return the name of an event, which is equal in all traces, and its sizes."""
    if isinstance(event, Operator):
        return event.name, event.read, event.written
    assert isinstance(event, Message)
    return (event.op, event.group, event.purpose), event.payload


def _amount(event: Event, after: Event) -> tuple[int, float]:
    """Return the kind of work of an event, and its amount."""
    if isinstance(event, Operator):
        if event.name in MATMULS:
            return PRODUCTS, event.flops
        if event.name.startswith(ATTENTION):
            return FUSED, event.flops if event.name.startswith(BIASED_ATTENTION) else event.flops / 2
        return FIXED if event.name in STREAMED else MOVED, bytes_moved(event)
    if isinstance(event, Message) and event.group == "tp" and after == Wait(event.work):
        return RINGS, RING_PASSES[event.op] * event.payload * (event.size - 1) / event.size
    return FIXED, 0.0


@dataclass(frozen=True)
class MinimumWork:
    """Minimum work of one role's micro-batches, from which the work of all layouts of a family follows."""

    base: WorkAmounts
    layer: WorkAmounts
    """Work of one more layer in every part."""
    layers: int
    """Layers of a part in `base`."""
    samples: int
    """Samples of a micro-batch in `base` and `layer`."""

    @classmethod
    def of_traces(cls, base: Trace, deeper: Trace, wider: Trace, depths: tuple[int, int]) -> MinimumWork:
        """Return the minimum work from a family's traces; `depths`: layers of a part in `base` and in `deeper`."""
        (few, many), samples = depths, base.layout.micro_batch
        times = wider.layout.micro_batch / samples
        shallow, deep = (minimum_work(traced, wider, times) for traced in (base, deeper))
        return cls(shallow, (deep - shallow) / (many - few), few, samples)

    def of_stage(self, layers: int, samples: int) -> WorkAmounts:
        """Return the work with `layers` layers of a part and `samples` samples of a micro-batch."""
        return self._grown(self.base + (layers - self.layers) * self.layer, samples)

    def of_layers(self, layers: int, samples: int) -> WorkAmounts:
        """Return the work of `layers` layers alone."""
        return self._grown(layers * self.layer, samples)

    def _grown(self, found: WorkAmounts, samples: int) -> WorkAmounts:
        found[..., :FIXED] *= samples / self.samples
        return found


def step_time_lower_bound(
    model: Model,
    layout: Layout,
    of_role: Mapping[str, MinimumWork],
    payloads: Iterable[Payloads],
    cost: DeviceCost,
    network: Network,
) -> float:
    """Return a lower bound of the step time of `layout`, in seconds; 0 if the operators were measured.

    `of_role`: `all`, or `first` and `last`. `payloads`: bytes of each role's messages in a step.
    """
    rates = cost.least(network.bus_bandwidth("tp"))
    if rates is None:
        return 0.0
    return max(
        _computing(model, layout, of_role, np.array(rates)), *(_sending(rows, network) for rows in payloads)
    )


def _computing(model: Model, layout: Layout, of_role: Mapping[str, MinimumWork], rates: WorkAmounts) -> float:
    """Return the seconds of all micro-batches; `rates` are seconds per unit of each kind of work."""
    layers, samples = model.layers // (layout.pp * layout.chunks), layout.micro_batch
    names = (ALL,) if layout.pp == 1 else (FIRST, LAST)
    seconds = {name: of_role[name].of_stage(layers, samples) @ rates for name in names}
    if layout.pp == 1:
        return _all_micro_batches(seconds[ALL], layout)
    middle = of_role[FIRST].of_layers(layers, samples) @ rates
    before = (_one_micro_batch(seconds[FIRST]) + (layout.pp - 2) * _one_micro_batch(middle)) / layout.chunks
    return max(_all_micro_batches(seconds[FIRST], layout), _all_micro_batches(seconds[LAST], layout) + before)


def _sending(rows: Payloads, network: Network) -> float:
    """Return the seconds of the busiest of the groups besides tp, for a role with the messages `rows`.

    A tree sends as much as the ring and is slower (`repro.simulate.time.interconnect`).
    """
    found = [0.0]
    for group in OVERLAPPED_GROUPS:
        sent = sum(
            RING_PASSES[op] * size for (op, name, _), size in rows.items() if name == group and op != SEND
        )
        if sent:
            size = len(network.placement.ranks_of(group, 0))
            found.append(sent * (size - 1) / size / network.bus_bandwidth(group))
    return max(found)


def _all_micro_batches(seconds: WorkAmounts, layout: Layout) -> float:
    """Return the seconds of all micro-batches from [first, ordinary, last; forward, backward]."""
    if layout.accumulation == 1:  # the first one and the last one at once
        return float(seconds[0, 0] + seconds[2, 1])
    return float(seconds[0].sum() + seconds[2].sum() + (layout.accumulation - 2) * seconds[1].sum())


def _one_micro_batch(seconds: WorkAmounts) -> float:
    """Return the seconds of one micro-batch: the fastest forward pass plus the fastest backward pass."""
    return float(seconds.min(axis=0).sum())
