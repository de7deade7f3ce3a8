"""Compute which verdicts change under known faults of a simulator, for `make mutation-table`.

A mutation changes the layout, the system, the traced events or one function of the time model. The tool simulates each
experiment that a reproduced value reads under every mutation, and judges the ledger on these records. The records stay
in memory. The tool writes `repro/claims/data/mutations.json` and the tables of `docs/mutations.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from repro.claims.expression import arguments
from repro.claims.judge import experiments_read, judge
from repro.claims.ledger import Ledger
from repro.claims.reader import load_ledger
from repro.claims.verdicts import REPRODUCED, RowResult
from repro.config import Experiment, Layout
from repro.config.enums import Category, Phase
from repro.config.system import Quantity, System
from repro.launch.simulated import missing_for_simulation, simulated_system
from repro.results.metrics import SPEED
from repro.results.record_parts import StepSeries
from repro.results.reference_records import load_reference
from repro.results.schema import SIMULATED, ExperimentRecord
from repro.results.select import select
from repro.results.store import read_records
from repro.simulate import record as step_record
from repro.simulate import step
from repro.simulate.time import predict
from repro.simulate.time.device import MODELLED_KERNELS, Kernels, first_lane
from repro.simulate.time.schedule import Timeline, schedule_traces
from repro.simulate.trace.events import Alloc, Event, Message, PhaseStart, Wait
from repro.simulate.trace.roles import PipelineRole, Trace, trace
from repro.util.processes import Workers, pause_garbage_collection
from tests import committed

ROOT = Path(__file__).parents[2]
DATA = ROOT / "repro/claims/data/mutations.json"
PAGE = ROOT / "docs/mutations.md"
MARKER = "<!-- Tables that `make mutation-table` writes. -->"
KERNEL_TIME_FACTOR = 1.25
"""Factor of the time of all kernels under the mutation "slower kernels"."""
Row = tuple[str, str]
"""Claim and label of a row."""
EventChange = Callable[[Event, Layout, str], Sequence[Event]]
"""Function of an event, the layout and the phase that returns the replacement events; no event drops the event."""
MEMORY, FIT, TRAFFIC, TIME = ALL = "memory", "fit", "traffic", "time"
"""Quantities of a simulation."""
OF_MEMORY, OF_TRAFFIC = (MEMORY, FIT), (TRAFFIC, TIME)


@dataclass(frozen=True)
class Mutation:
    """One fault of a simulator."""

    name: str
    quantities: tuple[str, ...]
    """Quantities that the mutation changes."""
    applies: Callable[[Layout], object] = lambda layout: True
    """Whether a layout has the feature that the mutation changes."""
    layout: Callable[[Layout], dict[str, Any]] | None = None
    """Changed fields of a layout."""
    system: Callable[[System], System] | None = None
    events: EventChange | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of `repro.simulate.step.simulate`."""
    function: tuple[str, Callable[..., Any]] | None = None
    """Name of a function of `repro.simulate.time.predict`, and its replacement."""


def _halve_bandwidth(system: System, links: Collection[str]) -> System:
    """Return `system` with half the bandwidth of `links`."""
    half = {
        name: replace(link, bandwidth=Quantity(value=link.bandwidth.value / 2, source="mutation"))
        for name, link in system.links.items()
        if name in links and link.bandwidth.value is not None
    }
    return replace(system, links={**system.links, **half}) if half else system


def _resize(categories: Collection[Category], factor: Callable[[Layout], float]) -> EventChange:
    """Return a change of the size of all allocations of `categories`, to at least one byte."""

    def change(event: Event, layout: Layout, phase: str) -> Sequence[Event]:
        if type(event) is Alloc and event.category in categories:
            return (event._replace(bytes=max(1, int(event.bytes * factor(layout)))),)
        return (event,)

    return change


def _drop(group: str, purpose: str = "", only_in: str = "") -> EventChange:
    """Return a change that drops the collectives of a group, of one purpose or in one phase if given."""

    def change(event: Event, layout: Layout, phase: str) -> Sequence[Event]:
        is_selected = type(event) is Message and event.group == group and purpose in ("", event.purpose)
        return () if is_selected and only_in in ("", phase) else (event,)

    return change


def _fp32_gradients(event: Event, layout: Layout, phase: str) -> Sequence[Event]:
    if type(event) is Message and event.purpose == "gradients" and event.group == "dp":
        return (event._replace(payload=2 * event.payload, sent=2 * event.sent),)
    return _resize((Category.GRADIENTS,), lambda _: 2)(event, layout, phase)


def _wait_for_collective(event: Event, layout: Layout, phase: str) -> Sequence[Event]:
    if type(event) is Message and event.peer < 0:
        return event, Wait(event.work)
    return (event,)


def _slow_kernels(generation: Any) -> Kernels:
    kernels = CALIBRATED(generation)
    return kernels._replace(
        products=kernels.products * KERNEL_TIME_FACTOR,
        others=kernels.others * KERNEL_TIME_FACTOR,
        passes=kernels.passes * KERNEL_TIME_FACTOR,
        attention=kernels.attention / KERNEL_TIME_FACTOR,
    )


def _schedule_with_double_bubble(experiment: Experiment, *arguments: Any, **settings: Any) -> Timeline:
    """Return `schedule_traces` with twice the wait of the slowest pipeline stage."""
    found = schedule_traces(experiment, *arguments, **settings)
    work = max(sum(stage.busy.values()) + sum(stage.exposed.values()) for stage in found.stages)
    return replace(found, seconds=found.seconds + max(0.0, first_lane(found.seconds) - work))


CALIBRATED = predict.calibrated_kernels
FAULTS = {
    "memory": {
        "fp32 gradients": "Gradients and their messages have 4 bytes a parameter in 16-bit training.",
        "no master copy": "Optimizer states have 8 bytes a parameter, because the fp32 parameters are missing.",
        "no optimizer states": "Only parameters and gradients are model states.",
        "no activations": "Activations, checkpoints and temporary tensors need no memory.",
        "optimizer states not partitioned": "Every rank has all optimizer states under ZeRO.",
        "gradients not partitioned": "Stage 2 of ZeRO behaves as stage 1.",
        "no recomputation": "All activations stay in memory, and nothing is computed twice.",
        "no sequence parallelism": "Every tensor-parallel rank has the activations of the full sequence.",
        "no fragmentation": "The allocator loses no memory to fragments.",
        "no context": "The CUDA context and its libraries need no memory.",
    },
    "communication": {
        "gradients not reduced": "The collective that sums gradients over replicas is missing.",
        "parameters not gathered": "The all-gather of parameters under ZeRO is missing.",
        "no tensor-parallel collective in backward": (
            "The collectives of tensor parallelism run in the forward pass only."
        ),
        "half the bandwidth between nodes": "Links between nodes have half of their bandwidth.",
        "half the bandwidth inside a node": "Links inside a node have half of their bandwidth.",
        "no overlap": "The computation waits for every collective.",
    },
    "time": {
        "slower kernels": f"Every kernel takes {KERNEL_TIME_FACTOR} times its calibrated time.",
        "ideal kernels": "Kernels are not calibrated and reach the modelled roofline.",
    },
    "schedule": {
        "double bubble": "Pipeline stages wait twice as long for each other.",
        "no interleaving": "Each pipeline stage has one part of the model instead of several chunks.",
        "half the stages": "Each pipeline stage has the layers of two stages.",
    },
}
"""Sentences about a simulator, by area of the fault and name of the mutation."""
NONE = Mutation("", ALL)
MUTATIONS = (
    Mutation("fp32 gradients", ALL, lambda layout: layout.grad_bytes == 2, events=_fp32_gradients),
    Mutation(
        "no master copy",
        OF_MEMORY,
        lambda layout: layout.precision != "fp32",
        events=_resize((Category.OPTIMIZER,), lambda layout: 2 / 3),
    ),
    Mutation("no optimizer states", OF_MEMORY, events=_resize((Category.OPTIMIZER,), lambda layout: 0)),
    Mutation(
        "no activations",
        OF_MEMORY,
        events=_resize((Category.ACTIVATIONS, Category.CHECKPOINTS, Category.OTHER), lambda layout: 0),
    ),
    Mutation(
        "optimizer states not partitioned",
        OF_MEMORY,
        lambda layout: layout.zero,
        events=_resize((Category.OPTIMIZER,), lambda layout: layout.copies),
    ),
    Mutation(
        "gradients not partitioned",
        OF_MEMORY,
        lambda layout: layout.zero == 2,
        layout=lambda layout: {"zero": 1},
    ),
    Mutation(
        "no recomputation",
        ALL,
        lambda layout: layout.recompute,
        layout=lambda layout: {"recompute": False, "pa": False, "pa_cpu": False},
    ),
    Mutation(
        "no sequence parallelism",
        (MEMORY, FIT, TIME),
        lambda layout: layout.sp,
        layout=lambda layout: {"sp": False},
    ),
    Mutation("no fragmentation", OF_MEMORY, settings={"expandable": True}),
    Mutation(
        "no context",
        OF_MEMORY,
        system=lambda system: replace(system, context_bytes=Quantity(value=0, source="mutation")),
    ),
    Mutation(
        "gradients not reduced", OF_TRAFFIC, lambda layout: layout.copies > 1, events=_drop("dp", "gradients")
    ),
    Mutation(
        "parameters not gathered", OF_TRAFFIC, lambda layout: layout.zero, events=_drop("dp", "parameters")
    ),
    Mutation(
        "no tensor-parallel collective in backward",
        OF_TRAFFIC,
        lambda layout: layout.tp > 1,
        events=_drop("tp", only_in=Phase.BACKWARD),
    ),
    Mutation(
        "half the bandwidth between nodes", (TIME,), system=partial(_halve_bandwidth, links=("inter-node",))
    ),
    Mutation(
        "half the bandwidth inside a node",
        (TIME,),
        system=partial(_halve_bandwidth, links=("nvlink", "pcie", "memory")),
    ),
    Mutation("no overlap", (TIME,), events=_wait_for_collective),
    Mutation("slower kernels", (TIME,), function=("calibrated_kernels", _slow_kernels)),
    Mutation("ideal kernels", (TIME,), function=("calibrated_kernels", lambda generation: MODELLED_KERNELS)),
    Mutation(
        "double bubble",
        (TIME,),
        lambda layout: layout.pp > 1,
        function=("schedule_traces", _schedule_with_double_bubble),
    ),
    Mutation(
        "no interleaving",
        ALL,
        lambda layout: layout.chunks > 1 and not layout.stage_layers,
        layout=lambda layout: {"schedule": "1f1b", "chunks": 1},
    ),
    Mutation(
        "half the stages",
        (MEMORY, FIT, TRAFFIC),
        lambda layout: layout.pp % 4 == 0 and not layout.stage_layers,
        layout=lambda layout: {"pp": layout.pp // 2},
    ),
)
BY_NAME = {one.name: one for one in (NONE, *MUTATIONS)}


def changed_trace(traced: Trace, change: EventChange) -> Trace:
    """Return a trace with changed events; the waits for a dropped collective are dropped as well."""
    events: list[Event] = []
    dropped: set[int] = set()
    phase, ends = "", {}
    for number, event in enumerate(traced.events):
        if number in (traced.step_start, traced.step_stop):
            ends[number] = len(events)
        if type(event) is PhaseStart:
            phase = event.name
        if type(event) is Wait and event.work in dropped:
            continue
        found = change(event, traced.layout, phase)
        if not found and type(event) is Message:
            dropped.add(event.work)
        events += found
    start, stop = (ends.get(number, len(events)) for number in (traced.step_start, traced.step_stop))
    return replace(traced, events=events, step_start=start, step_stop=stop)


class MutatedSimulation:
    """Simulations of one experiment under several mutations, which share its traces.

    `reads`: the quantities that the ledger reads from the experiment. Mutations of other quantities are skipped.
    Memory that the ledger does not read is taken from the simulation without a mutation.
    """

    def __init__(self, experiment: Experiment, suite: str, reads: Collection[str] = NONE.quantities):
        self.experiment, self.suite, self.reads = experiment, suite, reads
        self.traces: dict[PipelineRole, Trace] = {}
        self.memory: dict[tuple[Any, ...], Any] = {}
        self.base: dict[str, float] = {}
        """Metrics of the first simulation, which has no mutation."""

    def record(self, mutation: Mutation) -> ExperimentRecord | None:
        """Return the record under `mutation`; None if the mutation changes no quantity in `reads`."""
        run = self.experiment
        system = simulated_system(run)
        if not (mutation.applies(run.layout) and set(mutation.quantities) & set(self.reads)):
            return None
        machine = mutation.system(system) if mutation.system is not None else system
        if mutation.system is not None and machine == system:
            return None
        if mutation.layout is not None:
            run = replace(run, layout=replace(run.layout, **mutation.layout(run.layout)))
        changed = {*mutation.quantities} & {*self.reads} if self.base else {MEMORY, FIT, *self.reads}
        with ExitStack() as stack:
            stack.enter_context(patch.object(step, "trace", partial(self._trace, mutation)))
            stack.enter_context(patch.object(step_record, "_series", lambda *_: StepSeries()))
            for name, quantities in (("measure_live_bytes", {MEMORY}), ("replay", {FIT})):
                if not self.base or not quantities & changed:
                    known = partial(self._known_memory, getattr(step, name), Counter())
                    stack.enter_context(patch.object(step, name, known))
            if mutation.function is not None:
                stack.enter_context(patch.object(predict, *mutation.function))
            found = step.simulate(
                run,
                machine,
                memory_limit=run.limits.memory_bytes or None,
                time=TIME in changed,
                **mutation.settings,
            )
            record = step_record.simulated_record(run, found, machine, suite=self.suite, wall_s=0.0)
        record = replace(record, metrics={**self.base, **record.metrics})
        self.base = self.base or record.metrics
        return record

    def _trace(self, mutation: Mutation, experiment: Experiment, role: PipelineRole, *, gloo: bool) -> Trace:
        if mutation.layout is not None:
            return trace(experiment, role, gloo=gloo)
        if role not in self.traces:
            self.traces[role] = trace(experiment, role, gloo=gloo)
        known = self.traces[role]
        return known if mutation.events is None else changed_trace(known, mutation.events)

    def _known_memory(
        self,
        function: Callable[..., Any],
        calls: Counter[str],
        events: list[Event],
        *rest: Any,
        **settings: Any,
    ) -> Any:
        """Return the memory of this call's role without a mutation, or of no events if no evidence reads memory."""
        key = function.__name__, calls["role"]
        calls["role"] += 1
        if key not in self.memory:
            self.memory[key] = function(events if {MEMORY, FIT} & {*self.reads} else [], *rest, **settings)
        return self.memory[key]


@pause_garbage_collection()
def simulate_mutations(
    experiment: Experiment, suite: str, reads: Collection[str], mutations: Sequence[str]
) -> dict[str, ExperimentRecord]:
    """Return the records under `mutations` that change a quantity in `reads`, by mutation; "" is no mutation."""
    simulation = MutatedSimulation(experiment, suite, reads)
    simulation.record(NONE)
    found = {name: simulation.record(BY_NAME[name]) for name in mutations}
    return {name: record for name, record in found.items() if record is not None}


def quantities_read(rows: Iterable[RowResult]) -> dict[str, set[str]]:
    """Return the quantities that the simulated evidence of `rows` reads, by `suite/name` of the experiment."""
    read: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        for one in row.row.evidence:
            if one.kind != SIMULATED:
                continue
            names = experiments_read(one.value, row.row.variables)
            calls = arguments(one.value, row.row.variables)
            metrics = [text for _, texts in calls for text in texts if text not in names]
            found = {TIME for name in metrics if name.startswith(SPEED)}
            found |= {TRAFFIC for name in metrics if name.startswith("comm.")}
            found |= {MEMORY for name in metrics if name.startswith("memory.")}
            if any(function not in ("metric", "rising") for function, _ in calls) or any(
                name.startswith("memory.reserved") for name in metrics
            ):
                found.add(FIT)
            for name in names:
                read[name] |= found
    return read


def simulate_all(
    read: Mapping[str, Collection[str]], mutations: Sequence[str], workers: Workers
) -> dict[str, dict[str, ExperimentRecord]]:
    """Return the records of the experiments in `read` by mutation and by name."""
    work = []
    for name, reads in read.items():
        suite, _, entry = name.partition("/")
        experiment = committed.suite(ROOT / f"suites/{suite}.toml").entry(entry).experiment
        work.append((experiment, suite, sorted(reads), mutations))
    work = [one for one in work if not missing_for_simulation(one[0])]
    found: dict[str, dict[str, ExperimentRecord]] = {name: {} for name in mutations}
    for number, records in enumerate(workers.completed(simulate_mutations, work), 1):
        if sys.stderr.isatty() or not number % 50:
            print(f"{number} of {len(work)} experiments", file=sys.stderr, flush=True)
        for mutation, record in records.items():
            found[mutation][record.label] = record
    return found


def verdict_changes(
    ledger: Ledger, workers: Workers, store: Path | None = None
) -> tuple[dict[Row, list[str]], int]:
    """Return the mutations that change the verdict of each reproduced simulated value, and the number of agreements.

    The mutation that changes the fewest rows is first. The number counts simulated, measured and counted values.
    `store` contains simulations without a mutation and is only read. Missing simulations are run.
    """
    references = load_reference()
    base = {} if store is None else {one.label: one for one in select(read_records(store)).simulated}
    base = {label: replace(record, interval=None) for label, record in base.items()}

    def judged(records: Mapping[str, ExperimentRecord]) -> dict[Row, RowResult]:
        results = judge(ledger, records.values(), references)
        return {(one.claim.id, row.row.label): row for one in results for row in one.rows}

    missing = {
        name: reads for name, reads in quantities_read(judged({}).values()).items() if name not in base
    }
    base |= simulate_all(missing, [""], workers)[""]
    agreeing = {row: found for row, found in judged(base).items() if found.verdict == REPRODUCED}
    tested = {row: found for row, found in agreeing.items() if found.basis == SIMULATED}
    mutated = simulate_all(quantities_read(tested.values()), [one.name for one in MUTATIONS], workers)
    changed: dict[Row, list[str]] = {row: [] for row in tested}
    for mutation, records in mutated.items():
        found = judged({**base, **records})
        for row in tested:
            if found[row].verdict != REPRODUCED:
                changed[row].append(mutation)
    counts = Counter(name for names in changed.values() for name in names)
    ordered = {row: sorted(names, key=counts.__getitem__) for row, names in changed.items()}
    return ordered, len(agreeing)


def write_data(document: Mapping[str, Any]) -> None:
    """Write the data file, with one line per value."""
    claims = ",\n".join(
        f"  {json.dumps(claim)}: {{\n"
        + ",\n".join(f"   {json.dumps(label)}: {json.dumps(names)}" for label, names in rows.items())
        + "\n  }"
        for claim, rows in document["claims"].items()
    )
    head = json.dumps({key: document[key] for key in ("agreeing", "mutations")}, indent=1)
    DATA.write_text(f'{head[:-2]},\n "claims": {{\n{claims}\n }}\n}}\n', encoding="utf-8")


def page_tables(document: Mapping[str, Any]) -> str:
    """Return the tables of totals, mutations with their changed verdicts, and unchanged values."""
    rows = [row for rows in document["claims"].values() for row in rows.values()]
    counts = Counter(name for names in rows for name in names)
    changed = sum(map(bool, rows))
    share = 100 * changed / document["agreeing"]
    lines = [
        "| tests that agree (values) | simulated (values) | changed by a mutation (values) | share of all tests (%) |",
        "|---|---|---|---|",
        f"| {document['agreeing']} | {len(rows)} | {changed} | {share:.1f} |",
        "",
        "| mutation | area | fault of a simulator | changed verdicts (values) |",
        "|---|---|---|---|",
        *(
            f"| {name} | {area} | {fault} | {counts[name]} |"
            for area, faults in FAULTS.items()
            for name, fault in faults.items()
        ),
        "",
        "| claim | values that no mutation changes |",
        "|---|---|",
    ]
    for claim, labels in document["claims"].items():
        unchanged = [label for label, names in labels.items() if not names]
        if unchanged:
            lines.append(f"| `{claim}` | {'; '.join(unchanged)} |")
    return "\n".join(lines) + "\n"


def page(document: Mapping[str, Any]) -> str:
    """Return the page with the tables of `document` after its marker."""
    text, _, _ = PAGE.read_text(encoding="utf-8").partition(MARKER)
    return f"{text}{MARKER}\n{page_tables(document)}"


def main() -> int:
    """Write the table of all mutations, and print the number of changed verdicts by mutation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="store of `make simulate`, which is only read")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: as many as cores allow")
    given = parser.parse_args()
    with Workers(given.workers) as workers:
        changed_by, agreeing = verdict_changes(load_ledger(), workers, given.results)
    claims: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for (claim, label), names in changed_by.items():
        claims[claim][label] = names
    mutations = [one.name for one in MUTATIONS]
    document = {"agreeing": agreeing, "mutations": mutations, "claims": claims}
    write_data(document)
    PAGE.write_text(page(document), encoding="utf-8")
    print(page_tables(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
