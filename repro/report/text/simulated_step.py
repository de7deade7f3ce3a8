"""Output of `repro simulate`: memory, communication, FLOP and time of a simulated step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repro.config import words
from repro.config.engines import unfused_attention_note
from repro.config.system import System
from repro.simulate.plan.closed_form import TERMS
from repro.simulate.time.calibration import UPPER_BOUND, describe_basis
from repro.util import units
from repro.util.console import BAR_COLUMNS, bar, new_table, stdout
from repro.util.units import gb

if TYPE_CHECKING:
    from rich.console import Console

    from repro.simulate.step import Simulation
    from repro.simulate.time.device import Kernels


def print_simulated_step(simulation: Simulation, system: System) -> None:
    """Print memory, communication, FLOP and time of the step."""
    console = stdout()
    document = simulation.as_dict()
    verdict = {"ok": "[bold green]fits[/]", "oom": "[bold red]does not fit[/]"}[simulation.outcome]
    if simulation.limit_bytes is None:
        verdict = "[bold]no limit known[/]"
    e = simulation.experiment
    console.print(f"{e.model.name} on {words.describe_devices(e.layout.world, system)}: {verdict}")
    if simulation.reason:
        console.print(units.readable(simulation.reason), style="red", markup=False)
    console.print(
        f"{units.parameter_count(document['params'])} parameters, {e.seq} tokens a sample; "
        f"{words.describe_layout(e.layout, batches=True)}"
    )
    if not e.training.attention_dropout and (
        note := unfused_attention_note(e.model, e.layout, system.device.compute_capability)
    ):
        console.print(note, style="yellow", markup=False)
    _memory(console, simulation, document["memory"])
    _traffic(console, document["comm"])
    _work(console, document)
    print_step_time(console, simulation, document["time"], document["no_time"])


def _memory(console: Console, simulation: Simulation, memory: dict[str, Any]) -> None:
    limit = simulation.limit_bytes
    peaks = [max(r.memory.peak_bytes, r.replay.peak_reserved) for r in simulation.roles]
    whole = limit or max(peaks)
    capacity = f"{units.size(limit)} for torch" if limit is not None else "nobody knows how much"
    console.print(
        f"\n[bold]Memory of a GPU[/]: {capacity}, {units.size(memory['context_bytes'])} of context beside it"
    )
    rank = "all ranks" if len(simulation.roles) == 1 else "stages"
    ranks = new_table(rank, "", "live GB", "reserved GB", "states GB", left=2)
    for role in simulation.roles:
        name = "" if role.role.name == "all" else role.role.name.partition(" (")[0]
        name += f" ({role.role.stages})" if role.role.stages > 1 else ""
        reserved = f"> {gb(limit)}" if role.replay.out_of_memory else gb(role.replay.peak_reserved)
        live, states = role.memory.peak_bytes, role.memory.states_bytes
        ranks.add_row(name, bar(console, live, whole), gb(live), reserved, gb(states))
    console.print(ranks)
    if len(simulation.roles) > 1:
        console.print(f"\nof the {simulation.fullest.role.name.partition(' (')[0]} stage, the fullest:")
    else:
        console.print()
    parts = new_table("at the peak", "", "GB", "most ever GB", left=2)
    for category, term in TERMS.items():
        most = memory["most_by_category"][category]
        if most:
            size = memory["by_category"][category]
            parts.add_row(
                term, bar(console, size, whole, with_rest=False).ljust(BAR_COLUMNS), gb(size), gb(most)
            )
    console.print(parts)
    if memory["host_bytes"]:
        console.print(
            f"In host memory, for each GPU: {units.size(memory['host_bytes'])}; page-locked "
            f"{units.size(memory['host_reserved_bytes'])}, since torch rounds each piece up to a power of two"
        )
    where = f"{memory['peak_line']} ({memory['peak_operator']})"
    console.print(f"The peak is in {memory['peak_phase']}, {where}.", markup=False)
    if simulation.outcome == "ok":
        console.print(
            f"The allocator reserves {units.size(memory['reserved_bytes'])}, of which fragmentation wastes "
            f"{units.percent(memory['fragmentation'])}; initialisation takes {units.size(memory['init_peak_bytes'])}."
        )


def _traffic(console: Console, comm: dict[str, Any]) -> None:
    if not comm["sent_bytes"]:
        console.print("\nNothing is sent.")
        return
    who = "each rank" if comm["role"] == "all" else f"a rank of the busiest stages ({comm['role']})"
    console.print(f"\n[bold]Sent in a step[/] by {who}: {units.size(comm['sent_bytes'])}")
    rows = new_table("group", "operation", "for", "link", "ranks", "calls", "GB", left=4)
    for row in sorted(comm["rows"], key=lambda row: -row["sent_bytes"]):
        if row["sent_bytes"] >= units.GB / 200:
            rows.add_row(
                row["group"],
                row["op"].replace("_", "-"),
                row["purpose"],
                row["link"],
                str(row["size"]),
                f"{row['calls']:,}",
                gb(row["sent_bytes"]),
            )
    console.print(rows)
    for key, title in (("bytes_by_group", "By group"), ("bytes_by_link", "By link")):
        sums = sorted(comm[key].items(), key=lambda entry: -entry[1])
        console.print(f"{title}: " + ", ".join(f"{name} {units.size(size)}" for name, size in sums))


def _work(console: Console, document: dict[str, Any]) -> None:
    flops = document["flops"]
    console.print(
        f"\n[bold]Computed in a step[/]: {units.flop(flops['model'])} of the model, "
        f"{units.flop(flops['hardware'])} with what is recomputed; "
        f"{units.flop(flops['operators_of_busiest_rank'])} by the busiest rank's operators"
    )
    console.print(f"Traced in {units.seconds(document['trace_seconds'])}; no GPU took part.")


MAX_SHOWN_UNKNOWNS = 3
"""Maximum number of shown unknowns."""
TIME_PARTS = (
    ("compute_s", "computing"),
    ("optimizer_s", "optimizer"),
    ("exposed_s", "waiting for messages"),
    ("bubble_s", "waiting for other stages"),
)


def print_step_time(
    console: Console, simulation: Simulation, time: dict[str, Any] | None, no_time: str
) -> None:
    """Print the section; `time` and `no_time` are the document's keys of these names."""
    if time is None or simulation.time is None:
        console.print(f"\nNo time is predicted: {no_time}", markup=False)
        return
    step, basis = time["step_s"], time["rests_on"]
    least, most = ("at least ", "at most ") if basis == UPPER_BOUND else ("", "")
    mfu = "" if time["mfu"] is None else f"; MFU {most}{units.percent(time['mfu'])}"
    less = basis == UPPER_BOUND and time["interval"] is not None and time["interval"]["low_s"] < step
    by = " by the best values of what is not known for certain" if less else ""
    console.print(
        f"\n[bold]A step takes {least}{units.seconds(step)}[/]{by}: {most}{units.number(time['samples_per_s'])} "
        f"samples/s, {units.flop_rate(time['flops_per_device'])} per GPU (recomputation counted){mfu}"
    )
    if time["interval"] is not None:
        _interval(console, time["interval"], step, time["flops_per_device"])
    elif simulation.time.system.device.operators:
        console.print(
            "No interval: what was measured is taken as exact; repro validate --system shows how far off it is."
        )
    rows = new_table(
        "of the slowest stage" if len(simulation.time.timeline.stages) > 1 else "", "", "s", "%", left=2
    )
    for key, part in TIME_PARTS:
        if time[key] >= step / 2000:
            filled = bar(console, time[key], step, with_rest=False).ljust(BAR_COLUMNS)
            rows.add_row(part, filled, f"{time[key]:,.3f}", f"{100 * time[key] / step:.1f}")
    console.print(rows)
    exposed = sorted(time["exposed_by_kind"].items(), key=lambda entry: -entry[1])
    named = [f"{name} {units.seconds(spent)}" for name, spent in exposed if spent >= step / 1000]
    if named:
        console.print("Waited for: " + ", ".join(named))
    if time["hidden_s"] >= step / 1000:
        console.print(f"Hidden under computation: {units.seconds(time['hidden_s'])} of communication")
    rests = describe_basis(simulation.experiment.layout.kernels, simulation.time.system)
    console.print(f"It rests on: {rests}.", markup=False)
    if time["generation"]:
        console.print(_slower(simulation.time.kernels))


def _slower(kernels: Kernels) -> str:
    """Return the factors by which a generation's kernels are slower than the model of their device."""
    products, others = units.number(kernels.products), units.number(kernels.others)
    them = (
        f"Kernels take {others}"
        if products == others
        else f"Products take {products}, other kernels {others}"
    )
    if kernels.passes != 1:
        them += f", passes over parameters {units.number(kernels.passes)}"
    but = "; fused attention was measured by itself" if kernels.attention else ""
    return f"{them} times what shapes and bandwidth ask for{but}."


def _interval(console: Console, found: dict[str, Any], step: float, flops: float) -> None:
    """Print the 90 % interval, and the unknown numbers with the largest effect on it."""
    low, high = found["low_s"], found["high_s"]
    rates = (units.flop_rate(flops * step / end) for end in (high, low))
    console.print(
        f"90 % interval: {units.seconds(low)} to {units.seconds(high)}, {' to '.join(rates)}, as far as numbers of the "
        "system are not known for certain (of what the model leaves out nothing is in it: repro validate); each alone:"
    )
    made = new_table("unknown", "from", "to", "s, from", "s, to", left=1)
    for move in found["moves"][:MAX_SHOWN_UNKNOWNS]:
        ends = (units.number(move[key]) for key in ("low", "high"))
        made.add_row(move["key"], *ends, *(units.number(move[key]) for key in ("low_s", "high_s")))
    console.print(made)
