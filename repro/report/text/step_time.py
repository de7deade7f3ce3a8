"""The seconds of a simulated step on its page: where they go, and what of it is assumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repro.simulate.time.basis import BOUND, said
from repro.util import units
from repro.util.table import BAR, bar, table

if TYPE_CHECKING:
    from rich.console import Console

    from repro.simulate.step import Simulation
    from repro.simulate.time.device import Kernels

MOVES = 3
"""Unknown numbers that are shown."""
PARTS = (
    ("compute_s", "computing"),
    ("optimizer_s", "optimizer"),
    ("exposed_s", "waiting for messages"),
    ("bubble_s", "waiting for other stages"),
)


def show_time(console: Console, simulation: Simulation, time: dict[str, Any] | None, no_time: str) -> None:
    """Print the section; `time` and `no_time` are the document's keys of these names."""
    if time is None or simulation.time is None:
        console.print(f"\nNo time is predicted: {no_time}", markup=False)
        return
    step, basis = time["step_s"], time["rests_on"]
    least, most = ("at least ", "at most ") if basis == BOUND else ("", "")
    mfu = "" if time["mfu"] is None else f"; MFU {most}{units.percent(time['mfu'])}"
    less = basis == BOUND and time["interval"] is not None and time["interval"]["low_s"] < step
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
    rows = table(
        "of the slowest stage" if len(simulation.time.timeline.stages) > 1 else "", "", "s", "%", left=2
    )
    for key, words in PARTS:
        if time[key] >= step / 2000:
            filled = bar(console, time[key], step, room=False).ljust(BAR)
            rows.add_row(words, filled, f"{time[key]:,.3f}", f"{100 * time[key] / step:.1f}")
    console.print(rows)
    exposed = sorted(time["exposed_by_kind"].items(), key=lambda entry: -entry[1])
    named = [f"{name} {units.seconds(spent)}" for name, spent in exposed if spent >= step / 1000]
    if named:
        console.print("Waited for: " + ", ".join(named))
    if time["hidden_s"] >= step / 1000:
        console.print(f"Hidden under computation: {units.seconds(time['hidden_s'])} of communication")
    rests = said(simulation.experiment.layout.kernels, simulation.time.system)
    console.print(f"It rests on: {rests}.", markup=False)
    if time["generation"]:
        console.print(_slower(simulation.time.kernels))


def _slower(kernels: Kernels) -> str:
    """By how much a generation's kernels miss the model of their device."""
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
    """The 90 % interval, and which unknown numbers make it so wide."""
    low, high = found["low_s"], found["high_s"]
    rates = (units.flop_rate(flops * step / end) for end in (high, low))
    console.print(
        f"90 % interval: {units.seconds(low)} to {units.seconds(high)}, {' to '.join(rates)}, as far as numbers of the "
        "system are not known for certain (of what the model leaves out nothing is in it: repro validate); each alone:"
    )
    made = table("unknown", "from", "to", "s, from", "s, to", left=1)
    for move in found["moves"][:MOVES]:
        ends = (units.number(move[key]) for key in ("low", "high"))
        made.add_row(move["key"], *ends, *(units.number(move[key]) for key in ("low_s", "high_s")))
    console.print(made)
