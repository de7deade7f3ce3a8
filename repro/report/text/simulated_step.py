"""Output of `repro simulate`: time, memory, communication and FLOP of one simulated training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from repro.config import words
from repro.config.engines import unfused_attention_note
from repro.config.system import System
from repro.results.interval import likely_range
from repro.simulate.plan.candidates import communicator_bytes, is_tight
from repro.simulate.plan.closed_form import TERMS
from repro.simulate.time.calibration import BASES, describe_basis
from repro.util import units
from repro.util.console import new_table, print_page
from repro.util.units import gb

if TYPE_CHECKING:
    from repro.simulate.step import Simulation

TIME_PARTS = {
    "compute_s": "computation",
    "optimizer_s": "optimizer",
    "exposed_s": "communication",
    "bubble_s": "pipeline bubble",
}
"""Names of the parts of a step's time, by their key in the JSON document of a simulated step."""
MIN_SHOWN_SHARE = 0.005
"""Minimum share of total memory or traffic for which a memory category or process group has a table row."""
MIN_SHOWN_DIGIT = 0.005
"""Minimum GB or seconds for a row in the comparison of two steps, because smaller values print as 0.00."""
SHOWN_INPUTS = 5
"""Maximum number of uncertain inputs that `repro simulate --details` prints."""


def describe_step_time(time: dict[str, Any]) -> str:
    """Return the predicted step time with its interval, and the model FLOP utilization, as sentences."""
    text, found = f"Predicted step time: {units.seconds(time['step_s'])}", time["interval"]
    if found is not None:
        text += f" (90 % interval: {units.seconds(found['low_s'])} to {units.seconds(found['high_s'])})"
    if time["mfu"] is None:
        return f"{text}."
    mfu, causal = (units.percent(time[key]) for key in ("mfu", "mfu_causal"))
    return f"{text}. MFU (model FLOP utilization): {mfu} with attention counted in full, {causal} causally."


def print_simulated_step(
    simulation: Simulation, system: System, question: str = "", *, details: bool = False
) -> None:
    """Print whether a simulated step fits in memory, its time, and tables of its memory and traffic.

    `question`: options of the command to print. `details`: also print all stages, messages and uncertain inputs.
    """
    document, e = simulation.as_dict(), simulation.experiment
    capability, is_dropped = system.device.compute_capability, e.training.attention_dropout
    batch = f" --global-batch {e.layout.global_batch}"
    print_page(
        *describe_fit(simulation, system),
        f"Layout: {words.describe_layout(e.layout, batches=True)}. Model: "
        f"{units.parameter_count(document['params'])} parameters, {e.seq} tokens per sample.",
        *_describe_time(simulation, document),
        e.model.longer_sequence_note(e.seq),
        "" if is_dropped else unfused_attention_note(e.model, e.layout, capability),
        _memory_table(simulation, document["memory"]),
        _traffic_table(document["comm"]),
        *(
            _step_details(simulation, document)
            if details
            else ["--details lists stages, messages and inputs."]
        ),
        command=f"repro plan {question}{batch}",
    )


def print_step_differences(a: Simulation, b: Simulation) -> None:
    """Print the speed ratio of two simulated steps, its main cause, and a table of their memory, time and traffic."""
    documents = [simulation.as_dict() for simulation in (a, b)]
    lines = [
        f"{name}: {simulation.experiment.model.name} on {simulation.experiment.layout.world:,} GPUs of "
        f"{simulation.system}, {words.describe_layout(simulation.experiment.layout, batches=True)}."
        for name, simulation in (("A", a), ("B", b))
    ]
    has_times = all(document["time"] for document in documents)
    first, second = (_compared_values(document, has_times) for document in documents)
    pairs = {name: (first.get(name, 0.0), second.get(name, 0.0)) for name in {**first, **second}}
    rows = (
        (name, f"{one:,.2f}", f"{other:,.2f}", f"{other - one:+,.2f}")
        for name, (one, other) in pairs.items()
        if max(one, other) >= MIN_SHOWN_DIGIT
    )
    table = new_table("", "A", "B", "B - A", rows=rows)
    print_page(*lines, *_describe_differences(a, b, documents), table)


def _compared_values(document: dict[str, Any], has_times: bool) -> dict[str, float]:
    """Return memory and traffic in GB and times in seconds of a step, by the name of their row in a table."""
    memory, time = document["memory"], document["time"]
    found = {"reserved memory at the peak (GB)": memory["reserved_bytes"] / units.GB}
    found |= {f"  {term}": memory["by_category"][key] / units.GB for key, term in TERMS.items()}
    found["  fragmentation"] = max(0, memory["reserved_bytes"] - memory["peak_bytes"]) / units.GB
    if has_times:
        found["step time (s)"] = time["step_s"]
        found |= {f"  {term}": time[key] for key, term in TIME_PARTS.items()}
    sent = document["comm"]["bytes_by_link"].items()
    return found | {f"sent by a rank, {link} (GB)": size / units.GB for link, size in sent}


def _describe_differences(a: Simulation, b: Simulation, documents: list[dict[str, Any]]) -> list[str]:
    """Return as sentences the speed ratio of two simulated steps and its main cause, or why there is no ratio."""
    for name, simulation, document in zip("AB", (a, b), documents, strict=True):
        if not simulation.fits:
            return [f"{name} does not fit: {units.readable(simulation.reason)}."]
        if document["time"] is None:
            return [f"No step time of {name} is predicted: {document['no_time']}."]
    first, second = (document["time"] for document in documents)
    ratio = second["samples_per_s"] / first["samples_per_s"]
    text, intervals = f"B trains {units.number(ratio)} times as many samples/s as A", ""
    if a.system == b.system and a.time and b.time and a.time.interval and b.time.interval:
        per_step = b.experiment.layout.global_batch / a.experiment.layout.global_batch
        draws = zip(a.time.interval.draws, b.time.interval.draws, strict=True)
        low, high = likely_range([per_step * one / other for one, other in draws], ratio)
        intervals = f" (90 % interval: {units.number(low)} to {units.number(high)})"
    changes = {term: second[key] - first[key] for key, term in TIME_PARTS.items()}
    key = max(changes, key=lambda term: abs(changes[term]))
    cause = f"The step time changes by {sum(changes.values()):+.3g} s, mainly by {key}: {changes[key]:+.3g} s"
    if key == TIME_PARTS["exposed_s"]:
        kinds = [time["exposed_by_kind"] for time in (first, second)]
        by_kind = {kind: kinds[1].get(kind, 0) - kinds[0].get(kind, 0) for kind in {**kinds[0], **kinds[1]}}
        cause += f", mostly {max(by_kind, key=lambda kind: abs(by_kind[kind]))}"
    return [f"{text}{intervals}.", f"{cause}."]


def describe_fit(simulation: Simulation, system: System) -> list[str]:
    """Return sentences on whether a simulated step fits in memory, and otherwise on the cause and the missing bytes."""
    e, limit, error = simulation.experiment, simulation.limit_bytes, simulation.fullest.replay.out_of_memory
    name = f"{e.model.name} on {words.describe_devices(e.layout.world, system)}"
    required = simulation.required_bytes
    if error is None or limit is None:
        available = "an unknown memory" if limit is None else f"{units.size(limit)} of device memory"
        parts = [f"Fits: {name}. Peak memory: {units.size(required)} of {available}."]
        further = communicator_bytes(e.layout, system)
        if limit is not None and is_tight(limit - required - further, limit + simulation.context_bytes):
            buffers = f", of which NCCL needs {units.size(further)} for more communicators" if further else ""
            parts.append(f"Little memory is left: {units.size(limit - required)}{buffers}.")
        return parts
    memory, missing = simulation.fullest.memory, units.size(required - limit)
    available = f"{units.size(limit)} of device memory; {missing} are missing"
    cause = f"{units.size(memory.peak_bytes)} are allocated at the peak in {memory.phase}, more than"
    if simulation.fullest.by_fragmentation:
        requested, free, allocated = map(units.size, (error.requested, error.largest_free, error.allocated))
        cause = f"fragmentation. {requested} are requested and the largest free block is {free}. "
        cause += f"{allocated} are allocated of"
    return [f"Does not fit: {name}.", f"Cause: {cause} {available}."]


def _describe_time(simulation: Simulation, document: dict[str, Any]) -> list[str]:
    """Return the predicted step time, its largest part and the basis of the prediction as sentences."""
    time = document["time"]
    if time is None or simulation.time is None:
        return [f"No step time is predicted: {document['no_time']}."]
    key = max(TIME_PARTS, key=lambda key: float(time[key]))
    waits = sorted(time["exposed_by_kind"].items(), key=lambda wait: -wait[1])
    cause = f", mostly {waits[0][0]}" if key == "exposed_s" else ""
    slowest = " of the slowest stage" if len(simulation.time.timeline.stages) > 1 else ""
    is_exact = time["interval"] is None and simulation.time.system.device.operators
    return [
        f"{describe_step_time(time)} Throughput: {units.number(time['samples_per_s'])} samples/s.",
        f"Largest part: {TIME_PARTS[key]}, {units.percent(time[key] / time['step_s'])} of the step{slowest}{cause}.",
        f"Basis of the time: {time['rests_on']}; {BASES[time['rests_on']]}.",
        "No interval, because all inputs are measured. repro validate --system shows the error."
        * bool(is_exact),
    ]


def _memory_table(simulation: Simulation, memory: dict[str, Any]) -> Table:
    """Return a table of the memory at the peak by category, on the rank that needs most memory."""
    role = simulation.fullest.role.name.partition(" (")[0]
    total, peak = simulation.limit_bytes or memory["reserved_bytes"], memory["peak_bytes"]
    sizes = {term: memory["by_category"][category] for category, term in TERMS.items()}
    if simulation.fits:
        sizes["fragmentation"] = memory["reserved_bytes"] - peak
    title = "memory at the peak" if role == "all" else f"memory of the {role} stage at the peak"
    share = f"share of {'device' if simulation.limit_bytes else 'reserved'} memory (%)"
    large = {term: size for term, size in sizes.items() if size >= MIN_SHOWN_SHARE * peak}
    rows = ((term, gb(size), f"{100 * size / total:.1f}") for term, size in large.items())
    return new_table(title, "size (GB)", share, rows=rows)


def _traffic_table(comm: dict[str, Any]) -> Table | str:
    """Return a table of the bytes that a rank sends per step by process group, on the stage that sends most."""
    groups = {row["group"]: row for row in comm["rows"]}
    rows = (
        (group, groups[group]["link"], str(groups[group]["size"]), gb(sent))
        for group, sent in sorted(comm["bytes_by_group"].items(), key=lambda entry: -entry[1])
        if sent and sent >= MIN_SHOWN_SHARE * comm["sent_bytes"]
    )
    made = new_table("traffic of a rank by group", "link", "ranks", "sent per step (GB)", left=2, rows=rows)
    return made if comm["sent_bytes"] else "No rank sends data."


def _step_details(simulation: Simulation, document: dict[str, Any]) -> list[str | Table]:
    """Return tables of the memory of every stage, all messages, the parts of step time, and its uncertain inputs."""
    memory, time, flops = document["memory"], document["time"], document["flops"]
    roles = (
        (role.role.name.partition(" (")[0], str(role.role.stages), gb(role.memory.peak_bytes),
         gb(role.replay.peak_reserved), gb(role.memory.states_bytes))
        for role in simulation.roles
    )  # fmt: skip
    messages = (
        (row["group"], row["op"].replace("_", "-"), row["purpose"], row["link"], str(row["size"]),
         f"{row['calls']:,}", gb(row["sent_bytes"]))
        for row in sorted(document["comm"]["rows"], key=lambda row: -row["sent_bytes"])
    )  # fmt: skip
    host = units.size(memory["host_bytes"]), units.size(memory["host_reserved_bytes"])
    parts: list[str | Table] = [
        new_table("stage", "stages", "live (GB)", "reserved (GB)", "model states (GB)", rows=roles),
        f"Memory peak: in {memory['peak_phase']} at {memory['peak_line']} ({memory['peak_operator']}). Outside the "
        f"allocator: {units.size(memory['context_bytes'])}. Initial peak: {units.size(memory['init_peak_bytes'])}.",
        "Host memory per GPU: {}, page-locked {}.".format(*host) if memory["host_bytes"] else "",
        f"Failure: {units.readable(simulation.reason)}." if simulation.reason else "",
        new_table(
            "group", "operation", "purpose", "link", "ranks", "calls", "sent (GB)", left=4, rows=messages
        ),
        f"FLOP per step: {units.flop(flops['model'])} of the model, {units.flop(flops['hardware'])} with recomputation "
        f"and {units.flop(flops['operators_of_busiest_rank'])} of the busiest rank. "
        f"Traced in {units.seconds(document['trace_seconds'])}.",
    ]
    if time is None or simulation.time is None:
        return parts
    spent = {name: time[key] for key, name in TIME_PARTS.items()}
    spent |= {f"exposed {name}": seconds for name, seconds in time["exposed_by_kind"].items()}
    spent["hidden communication"] = time["hidden_s"]
    shares = (
        (name, f"{seconds:,.3f}", f"{100 * seconds / time['step_s']:.1f}")
        for name, seconds in spent.items()
        if seconds >= time["step_s"] / 1000
    )
    inputs = (
        (move["key"], *(units.number(move[key]) for key in ("low", "high", "low_s", "high_s")))
        for move in (time["interval"] or {"moves": []})["moves"][:SHOWN_INPUTS]
    )
    basis = describe_basis(simulation.experiment.layout.kernels, simulation.time.system)
    return [
        *parts,
        new_table("part of the step", "time (s)", "share (%)", rows=shares),
        new_table("uncertain input", "low", "high", "step at low (s)", "step at high (s)", rows=inputs),
        "The interval includes only uncertain inputs; repro validate shows the error of the time model.",
        f"Rate per GPU with recomputation: {units.flop_rate(time['flops_per_device'])}. Basis of the time: {basis}.",
        f"Calibration factor of kernel times: {units.number(simulation.time.kernels.products)} for matrix products, "
        f"{units.number(simulation.time.kernels.others)} for other kernels.",
    ]
