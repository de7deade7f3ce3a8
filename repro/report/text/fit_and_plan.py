"""Output of `repro fit` and `repro plan`, and the map of `repro plan --map`: tp down, pp across."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from repro.config import words
from repro.config.engines import unfused_attention_note
from repro.simulate.plan.closed_form import FRAGMENTATION, TERMS
from repro.simulate.plan.rows import FULL, OK, OOM, RETAINED, STATES, PlanRow
from repro.simulate.time.calibration import UPPER_BOUND, describe_basis
from repro.util import units
from repro.util.console import MIN_TABLE_COLUMNS, bar, new_table, stdout
from repro.util.units import gb

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from repro.simulate.plan.candidates import PlanRequest
    from repro.simulate.plan.fit import FitQuestion
    from repro.simulate.plan.plan import MapCell, Plan
    from repro.simulate.plan.rows import PlanRow


KNOWN_FROM = {STATES: "closed form", RETAINED: "lower bound", FULL: "simulation"}
"""Text for the evidence of a layout that does not fit."""
TIME_LOSS_COLUMNS = {"waits\n%": "exposed_s", "bubble\n%": "bubble_s"}
"""Columns for parts of the step time, with the keys of these times."""
MIN_WIDE_TABLE_COLUMNS = 96
"""Minimum terminal width, in columns, of a table with `TIME_LOSS_COLUMNS` and the duration of the training."""


def bound_marks(console: Console, basis: str) -> tuple[str, str]:
    """Return the marks of a time and of a rate that are bounds; empty marks for other bases."""
    if basis != UPPER_BOUND:
        return "", ""
    return ("≥", "≤") if console.encoding.startswith("utf") else (">=", "<=")


def print_fit_table(question: FitQuestion, document: dict[str, Any]) -> None:
    """Print the largest configuration that fits next to the first that does not fit."""
    console = stdout()
    sizes = document["sizes"]
    what = (
        "Largest model" if document["search"] == "layers" else f"Largest micro-batch of {question.model.name}"
    )
    console.print(f"[bold]{what}[/] on {words.describe_devices(document['gpus'], question.system)}")
    width = f"hidden {sizes['hidden']}, {sizes['heads']} heads, vocabulary {sizes['vocab']}, sequence {sizes['seq']}"
    console.print(f"{width}; {words.describe_layout(question.layout, batches=True)}")
    console.print(
        f"{units.size(document['limit_bytes'])} for torch, {units.size(document['context_bytes'])} of context "
        "beside it\n"
    )
    if note := unfused_attention_note(
        question.model, question.layout, question.system.device.compute_capability
    ):
        console.print(f"{note}\n", style="yellow", markup=False)
    rows = new_table("", "layers", "micro-batch", "parameters", "needs GB", left=1)
    for name, key in (("fits", "largest"), ("does not", "first_failing")):
        row = document[key]
        if row is None:
            rows.add_row(name, "-", "-", "-", "-")
        else:
            psi, needed = units.parameter_count(row["params"]), gb(row["needed_bytes"])
            rows.add_row(name, str(row["layers"]), str(row["micro_batch"]), psi, needed)
    console.print(rows)
    failing = document["first_failing"]
    if failing is not None:
        console.print(
            f"\nWhat is too much: [bold]{document['binding']}[/]{_explain_binding_term(document['binding'], failing)}"
        )
        if "memory" in failing:
            _print_terms(console, document)
        console.print(units.readable(failing["reason"]), style="dim", markup=False)
    _print_trials(console, document)


def _explain_binding_term(term: str, failing: dict[str, Any]) -> str:
    if term == FRAGMENTATION:
        largest = f" ({failing['largest_term']} most of all)" if "largest_term" in failing else ""
        return f"; what is live{largest} would fit, but no free stretch is long enough"
    return ", the largest part of what is live" if term in TERMS.values() else ""


def _print_terms(console: Console, document: dict[str, Any]) -> None:
    """Print the live bytes at both peaks, by term."""
    largest, failing = document["largest"], document["first_failing"]
    whole = document["limit_bytes"]
    rows = new_table("live at the peak", "", "does not GB", "fits GB", left=2)
    for category, term in TERMS.items():
        size = failing["memory"]["by_category"].get(category, 0)
        before = largest["memory"]["by_category"].get(category, 0) if largest else None
        if size or before:
            rows.add_row(term, bar(console, size, whole, with_rest=False), gb(size), gb(before))
    console.print(rows)


def _print_trials(console: Console, document: dict[str, Any]) -> None:
    unit = "layers" if document["search"] == "layers" else "samples"
    tried = ", ".join(f"{trial['value']} ({trial['outcome']})" for trial in document["trials"])
    if "trace_seconds" in document:
        how = f"{document['traces']} traces in {units.seconds(document['trace_seconds'])}"
    else:
        how = f"{document['evidence']}, {units.seconds(document['seconds'])}"
    console.print(f"\nTried {unit}: {tried}; {how}.")


def print_layouts(request: PlanRequest, plan: Plan, top: int) -> None:
    """Print the first `top` layouts, and the limiting terms of the others."""
    from repro.simulate.plan.plan import COMPARED_ROWS
    from repro.simulate.plan.rows import IDEAL_ORDER_RULE, OK, OOM, OPEN, TIME_ORDER_RULE, unknown_rates

    console = stdout()
    rows = plan.rows
    fits, others, left = ([row for row in rows if row.outcome == outcome] for outcome in (OK, OOM, OPEN))
    console.print(
        f"[bold]{request.model.name}[/] on {words.describe_devices(request.gpus, request.system)}, global batch "
        f"{request.global_batch}, {rows[0].layout.precision}"
    )
    slower = f"cannot be among the first {max(top, COMPARED_ROWS)} and are left open"
    counts = ((fits, "fit"), (others, "do not fit"), (left, slower))
    text = ", ".join(f"{len(some):,} {what}" for some, what in counts if some)
    size = units.size(request.allocatable)
    console.print(f"{len(rows):,} layouts for {size} a GPU: {text}; {plan.simulated:,} were simulated\n")
    if note := unfused_attention_note(
        request.model, rows[0].layout, request.system.device.compute_capability
    ):
        console.print(f"{note}\n", style="yellow", markup=False)
    shown = fits[:top]
    if shown:
        _print_layout_table(console, request, shown, timed=not plan.no_time)
        if not plan.no_time:
            _print_undecided(console, [row for row in fits if row.interval is not None], top)
            _print_basis(console, request, shown[0])
        rule = IDEAL_ORDER_RULE if plan.no_time else TIME_ORDER_RULE
        text = f"s: {rule}."
        if plan.no_time:
            text += f"  No times: {plan.no_time}."
            missing = unknown_rates(request, rows[0].layout.precision)
            text += f"  Counted as no time: {', '.join(missing)}." if missing else ""
        console.print(textwrap.fill(text, console.width), style="dim", markup=False)
    else:
        console.print("[bold red]No layout fits.[/]")
    _print_ruled_out(console, others)


def _print_basis(console: Console, request: PlanRequest, row: PlanRow) -> None:
    """Print the basis of all times; all rows have the same kernels and the same system."""
    rests = describe_basis(row.layout.kernels, request.system)
    style = "bold" if row.time["rests_on"] == UPPER_BOUND else ""
    console.print("\n" + textwrap.fill(f"Times rest on: {rests}.", console.width), style=style, markup=False)


def _print_layout_table(
    console: Console, request: PlanRequest, rows: Sequence[PlanRow], *, timed: bool
) -> None:
    from repro.simulate.plan.rows import training_cost

    trained = timed and request.tokens > 0
    columns = ["GB\na GPU", "step\ns"]
    is_wide = not MIN_TABLE_COLUMNS <= console.width < MIN_WIDE_TABLE_COLUMNS
    ends = timed and rows[0].interval is not None and (not trained or is_wide)
    if ends:
        columns += ["90 %\ns"]
    if timed:
        columns += ["TFLOP/s\na GPU", "MFU\n%", "samples\n/s", "waits\n%", "bubble\n%"]
    else:
        columns += ["inside\nGB", "between\nGB", "bubble\n%"]
    if trained:
        columns.remove("samples\n/s")
        columns += ["trained\nin days"]
        columns += ["for\nmillions"] if request.price_per_gpu_hour else []
    if not is_wide and (trained or ends):
        columns = [heading for heading in columns if heading not in TIME_LOSS_COLUMNS]
    axes = words.axes(row.layout for row in rows)
    numbered = any(row.undecided for row in rows)
    degrees = " x ".join(axes)
    made = new_table(
        *[" #"] * numbered, degrees, "ZeRO", "mb", "also", *columns, left=(degrees, "also"), gap=1
    )
    for place, row in enumerate(rows, 1):
        layout, time = row.layout, row.time
        extra = {"recompute": "rc", "sp": "sp", "pa": "pa"}
        cells = [gb(row.memory["reserved_bytes"])]
        if timed:
            step, (least, most) = time["step_s"], bound_marks(console, time["rests_on"])
            cells += [least + units.number(step)]
            cells += [_interval_text(time["interval"])] if ends else []
            cells += [f"{most}{time['flops_per_device'] / units.TERA:.1f}"]
            cells += [units.NO_VALUE if time["mfu"] is None else f"{most}{100 * time['mfu']:.0f}"]
            cells += [] if trained else [most + units.number(time["samples_per_s"])]
            cells += [
                f"{100 * time[key] / step:.1f}"
                for heading, key in TIME_LOSS_COLUMNS.items()
                if heading in columns
            ]
        else:
            links = row.comm.get("bytes_by_link", {})
            between = links.get("inter-node", 0)
            cells += [units.number(row.ideal_s)]
            cells += [gb(sum(links.values()) - between), gb(between)]
            cells += [f"{100 * row.bubble:.0f}" if layout.pp > 1 else "-"]
        if trained:
            whole = training_cost(request, row) or {}
            cells += [f"{least}{whole['days']:,.1f}"]
            cells += [least + units.number(whole["cost"] / 1e6)] if "cost" in whole else []
        made.add_row(
            *[str(place)] * numbered,
            words.degrees(layout, axes),
            str(layout.zero),
            str(layout.micro_batch),
            " ".join(short for key, short in extra.items() if getattr(layout, key)),
            *cells,
        )
    console.print(made)
    note = "mb: micro-batch; rc: recomputation; sp: sequence parallelism; pa: P_a; GB: reserved on the fullest rank; "
    if timed:
        note += "TFLOP/s: recomputation counted; MFU: of the device's peak, recomputation not counted; "
        if "waits\n%" in columns:
            note += "waits: for communication that nothing hides, part of the step of the slowest stage; "
            note += "bubble: for other stages, likewise; "
        note += "trained: on --tokens" if trained else "samples: of all replicas"
    else:
        note += "inside a node and between nodes: sent by the busiest rank in a step; bubble: of the time it computes"
    console.print("\n" + textwrap.fill(note, console.width), style="dim", markup=False)


def _interval_text(found: dict[str, Any] | None) -> str:
    return (
        units.NO_VALUE
        if found is None
        else f"{units.number(found['low_s'])} to {units.number(found['high_s'])}"
    )


def _print_undecided(console: Console, rows: Sequence[PlanRow], top: int) -> None:
    """Print the pairs of `rows` whose order is undecided because of unknown numbers; `top` of the rows are shown."""
    from repro.simulate.plan.rows import MIN_TIE_SHARE

    if len(rows) < 2:
        return
    draws = "of all draws of the system's unknown numbers"
    pairs = [(place, one) for place, row in enumerate(rows, 1) for one in row.undecided or ()]
    faster = [place for place, one in pairs if one.than == 1]
    if faster:
        text = "Which is the fastest is not decided by what is known."
        if hidden := sum(place > top for place in faster):
            text += f"  {hidden} of those that may be are not shown: --top {max(faster)}."
    else:
        text = f"The first is faster than each of the {len(rows) - 1} after it in "
        text += f"{100 * (1 - MIN_TIE_SHARE):.0f} % or more {draws}."
    told = [
        f"{place} than {one.than} ({units.percent(one.part)}, {' or '.join(one.by[:2])})"
        for place, one in pairs
        if place <= top and one.than in (1, place - 1)
    ]
    if told:
        share = f"{100 * MIN_TIE_SHARE:.0f} %"
        text += f"  A later row is faster than one before it in more than {share} {draws}, with that part "
        text += f"and what decides: {', '.join(told)}."
    console.print("\n" + textwrap.fill(text, console.width, break_on_hyphens=False), markup=False)


def _print_ruled_out(console: Console, rows: Sequence[PlanRow]) -> None:
    """Print the minimum memory and the limiting term of the layouts that do not fit, by tp, cp, pp and ZeRO stage."""
    if not rows:
        return
    least: dict[tuple[int, int, int, int], tuple[int, PlanRow]] = {}
    for row in rows:
        key = (row.layout.tp, row.layout.cp, row.layout.pp, row.layout.zero)
        count, best = least.get(key, (0, row))
        smaller = row if row.memory["peak_bytes"] < best.memory["peak_bytes"] else best
        least[key] = count + 1, smaller
    axes = words.axes(row.layout for row in rows)
    console.print(f"\n[bold]{len(rows)} layouts do not fit[/], by {', '.join(axes[:-1])} and ZeRO stage:")
    headings = (" x ".join(axes), "ZeRO", "layouts", "at least GB", "ruled out by", "known from")
    made = new_table(*headings, left=(headings[0], *headings[4:]))
    for (*_, zero), (count, row) in sorted(least.items()):
        made.add_row(
            words.degrees(row.layout, axes),
            str(zero),
            str(count),
            gb(row.memory["peak_bytes"]),
            row.ruled_out_by,
            KNOWN_FROM[row.evidence],
        )
    console.print(made)


FITS_ALL_STYLE, FITS_LARGER_STYLE, FITS_NONE_STYLE = "bold green", "yellow", "red"


def print_plan_map(request: PlanRequest, cells: Sequence[MapCell], limits: Sequence[int]) -> None:
    """Print the map of every (tp, pp) with a layout, and the limiting terms of those that do not fit."""
    console = stdout()
    limits = sorted(limits)
    there = [cell for cell in cells if cell.rows]
    layout = there[0].rows[limits[0]].layout
    strategy = words.describe_layout(layout, degrees=False, batches=True)
    console.print(f"[bold]{request.model.name}[/] on {words.describe_devices(request.gpus, request.system)}")
    console.print(f"{strategy}; GB on the fullest rank, and the least memory that it fits\n")
    columns = sorted({cell.pp for cell in there})
    rows = sorted({cell.tp for cell in there}, reverse=True)
    drawn = new_table("", *(f"pp {pp}" for pp in columns), left=1 + len(columns), gap=4)
    by_place = {(cell.tp, cell.pp): cell for cell in there}
    for tp in rows:
        answers = [_cell_text(by_place.get((tp, pp)), limits) for pp in columns]
        drawn.add_row(f"tp {tp}", *answers)
    console.print(drawn)
    kinds = {row.evidence for cell in there for row in cell.rows.values()}
    notes = ["-: no such layout (--json says why)"] if len(there) < len(rows) * len(columns) else []
    notes += [">: lower bound, not simulated"] if kinds & {STATES, RETAINED} else []
    notes += ["GB are reserved, or live where the layout does not fit"] if FULL in kinds else []
    notes += [f"{units.size(request.system.context())} of each memory are beyond the allocator's reach"]
    console.print(textwrap.fill("; ".join(notes), console.width), style="dim", markup=False)
    for limit in limits:
        _print_limit(console, there, limit)


def _cell_text(cell: MapCell | None, limits: Sequence[int]) -> Text:
    """Return `21.20` over `fits 40 GB`: the required bytes of a cell, and the smallest sufficient memory."""
    from rich.text import Text

    if cell is None:
        return Text("-\n", style="dim")
    row = most_informative_row(cell)
    need = row.memory["reserved_bytes" if row.outcome == OK else "peak_bytes"]
    number = f"{'' if row.evidence == FULL else '>'}{units.gb(need)}"
    enough = [limit for limit in limits if cell.rows[limit].outcome == OK]
    if enough:
        style = FITS_ALL_STYLE if enough[0] == limits[0] else FITS_LARGER_STYLE
        return Text(f"{number}\nfits {units.size(enough[0])}", style=style)
    return Text(f"{number}\ndoes not fit", style=FITS_NONE_STYLE)


def most_informative_row(cell: MapCell) -> PlanRow:
    """Return the row of the smallest memory that fits, else that of the largest memory."""
    rows = [cell.rows[limit] for limit in sorted(cell.rows)]
    return next((row for row in rows if row.outcome == OK), rows[-1])


def _print_limit(console: Console, cells: Sequence[MapCell], limit: int) -> None:
    """Print one line per term: the cells that this term limits."""
    by_term: dict[str, list[str]] = {}
    for cell in cells:
        row = cell.rows[limit]
        if row.outcome == OOM:
            by_term.setdefault(row.ruled_out_by, []).append(f"{cell.tp} x {cell.pp}")
    if not by_term:
        console.print(f"\n[bold]{units.size(limit)}[/]: all fit")
        return
    console.print(f"\n[bold]{units.size(limit)}[/] is too little, tp x pp, for")
    for term, places in by_term.items():
        text = f"{term}: {', '.join(places)}"
        console.print(textwrap.fill(text, 78, initial_indent="  ", subsequent_indent="    "), markup=False)
