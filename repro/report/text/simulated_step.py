"""One simulated step on a page: does it fit, what fills the memory, what is sent where, what is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repro.config import words
from repro.config.attention import unfused
from repro.config.system import System
from repro.report.text.step_time import show_time
from repro.simulate.plan.terms import TERMS
from repro.util import units
from repro.util.console import stdout
from repro.util.table import BAR, bar, table
from repro.util.units import gb

if TYPE_CHECKING:
    from rich.console import Console

    from repro.simulate.step import Simulation


def show(simulation: Simulation, system: System) -> None:
    """Print the page."""
    console = stdout()
    document = simulation.as_dict()
    verdict = {"ok": "[bold green]fits[/]", "oom": "[bold red]does not fit[/]"}[simulation.outcome]
    if simulation.limit_bytes is None:
        verdict = "[bold]no limit known[/]"
    e = simulation.experiment
    console.print(f"{e.model.name} on {words.devices(e.layout.world, system)}: {verdict}")
    if simulation.reason:
        console.print(units.readable(simulation.reason), style="red", markup=False)
    console.print(
        f"{units.parameters(document['params'])} parameters, {e.seq} tokens a sample; "
        f"{words.layout(e.layout, batches=True)}"
    )
    if not e.training.attention_dropout and (
        note := unfused(e.model, e.layout, system.device.compute_capability)
    ):
        console.print(note, style="yellow", markup=False)
    _memory(console, simulation, document["memory"])
    _traffic(console, document["comm"])
    _work(console, document)
    show_time(console, simulation, document["time"], document["no_time"])


def _memory(console: Console, simulation: Simulation, memory: dict[str, Any]) -> None:
    limit = simulation.limit_bytes
    peaks = [max(r.memory.peak_bytes, r.replay.peak_reserved) for r in simulation.roles]
    whole = limit or max(peaks)
    room = f"{units.size(limit)} for torch" if limit is not None else "nobody knows how much"
    console.print(
        f"\n[bold]Memory of a GPU[/]: {room}, {units.size(memory['context_bytes'])} of context beside it"
    )
    rank = "all ranks" if len(simulation.roles) == 1 else "stages"
    ranks = table(rank, "", "live GB", "reserved GB", "states GB", left=2)
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
    parts = table("at the peak", "", "GB", "most ever GB", left=2)
    for category, term in TERMS.items():
        most = memory["most_by_category"][category]
        if most:
            size = memory["by_category"][category]
            parts.add_row(term, bar(console, size, whole, room=False).ljust(BAR), gb(size), gb(most))
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
    rows = table("group", "operation", "for", "link", "ranks", "calls", "GB", left=4)
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
