"""Output of `repro fit`, `repro plan` and `repro plan --map`: a map with rows by tp degree and columns by pp degree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from repro.config import words
from repro.config.engines import unfused_attention_note
from repro.report.text.simulated_step import describe_step_time
from repro.simulate.plan.candidates import COST, MIN_HEADROOM, RANK_QUANTILES, communicator_bytes
from repro.simulate.plan.closed_form import FRAGMENTATION, TERMS
from repro.simulate.plan.rows import FULL, OK, OOM, OPEN, RETAINED, STATES, PlanRow
from repro.simulate.time.calibration import BASES, describe_basis
from repro.util import units
from repro.util.console import new_table, print_page
from repro.util.units import gb

if TYPE_CHECKING:
    from repro.simulate.plan.candidates import PlanRequest
    from repro.simulate.plan.fit import FitQuestion
    from repro.simulate.plan.plan import MapCell, Plan


KNOWN_FROM = {STATES: "closed form", RETAINED: "lower bound", FULL: "simulation"}
"""Printed name of the method that shows that a layout does not fit into memory, by the method's key."""
SWITCHES = {
    "recompute": ("rc", "recomputation"),
    "sp": ("sp", "sequence parallelism"),
    "pa": ("pa", "partitioned activations"),
}
"""Abbreviation and long form of layout options in the table of layouts, by the field of the layout."""


def print_fits(
    fits: Sequence[tuple[FitQuestion, dict[str, Any]]],
    options: str,
    remarks: Sequence[str] = (),
    *,
    details: bool = False,
) -> None:
    """Print the largest model (or micro-batch) that fits into memory; `fits`: a search and its result per ZeRO stage.

    `options`: model, system and devices of the suggested command. `remarks`: reasons for ZeRO stages without a
    result. `details`: also print memory by category and all trials.
    """
    question, document = fits[0]
    model, layout, sizes = question.model, question.layout, document["sizes"]
    is_depth = document["search"] == "layers"
    what = "model" if is_depth else f"micro-batch of {model.name}"
    devices = words.describe_devices(document["gpus"], question.system)
    answer = f"No {what} fits on {devices}."
    found = [(each["largest"], query.layout.zero) for query, each in fits if each["largest"]]
    if found:
        best, stage = max(found, key=lambda fit: int(fit[0]["params" if is_depth else "micro_batch"]))
        size = f"{units.parameter_count(best['params'])} parameters" if is_depth else str(best["micro_batch"])
        answer = f"Largest {what} on {devices}: {size}{f' with ZeRO {stage}' if len(fits) > 1 else ''}."
    strategy = words.describe_layout(layout)
    if len(fits) > 1:
        stages = _join_places([query.layout.zero for query, _ in fits])
        strategy = strategy.replace(f"ZeRO {layout.zero}", f"ZeRO {stages}")
    limit = "failure cause of next larger size"
    headings = ("ZeRO\nstage", "parameters", "layers", "hidden\nsize", "micro-\nbatch", "memory\n(GB)", limit)
    print_page(
        answer,
        f"Layout: {strategy}. Model: vocabulary {sizes['vocab']}, sequence {sizes['seq']}.",
        f"Device memory for tensors: {_describe_limit(document['limit_bytes'], document['communicator_bytes'])}.",
        unfused_attention_note(model, layout, question.system.device.compute_capability),
        new_table(*headings, left=(limit,), rows=(_fit_cells(*fit) for fit in fits)),
        *remarks,
        *(part for fit in fits for part in (_fit_details(*fit) if details else ())),
        "" if details else "--details lists memory by category and all trials.",
        command=f"repro plan {options}",
    )


def _describe_limit(limit: int, communicators: int) -> str:
    without = f" (after subtraction of {units.size(communicators)} for the communicators' buffers)"
    return units.size(limit) + without * (communicators > 0)


def _fit_cells(question: FitQuestion, document: dict[str, Any]) -> list[str]:
    largest, failing, limit = document["largest"], document["first_failing"], document["binding"] or "none"
    memory = (failing or {}).get("memory", {"by_category": {}})
    keys = {term: key for key, term in TERMS.items()}
    size = memory.get("peak_bytes") if limit == FRAGMENTATION else memory["by_category"].get(keys.get(limit))
    limit += f", {units.size(size)}{' allocated' if limit == FRAGMENTATION else ''}" if size else ""
    hidden, stage = str(document["sizes"]["hidden"]), str(question.layout.zero)
    if not largest:
        return [stage, units.NO_VALUE, units.NO_VALUE, hidden, units.NO_VALUE, units.NO_VALUE, limit]
    counts = str(largest["layers"]), hidden, str(largest["micro_batch"])
    return [stage, units.parameter_count(largest["params"]), *counts, gb(largest["needed_bytes"]), limit]


def _fit_details(question: FitQuestion, document: dict[str, Any]) -> list[str | Table]:
    """Return the peak memory by category of the largest model that fits and of the next larger one, and all tries."""
    largest, failing = ((document[key] or {}) for key in ("largest", "first_failing"))
    peaks = [each.get("memory", {"by_category": {}})["by_category"] for each in (largest, failing)]
    sizes = {term: [peak.get(key, 0) for peak in peaks] for key, term in TERMS.items()}
    rows = ((term, *map(gb, pair)) for term, pair in sizes.items() if any(pair))
    category = f"ZeRO {question.layout.zero}: category"
    headings = (category, "largest size that fits (GB)", "next larger size (GB)")
    tried = ", ".join(f"{trial['value']} ({trial['outcome']})" for trial in document["trials"])
    how = f"{document['evidence']}, {units.seconds(document['seconds'])}" if "seconds" in document else ""
    how = how or f"{document['traces']} traces in {units.seconds(document['trace_seconds'])}"
    return [
        new_table(*headings, rows=rows),
        f"Failure: {units.readable(failing['reason'])}." if failing else "",
        f"Trials ({document['search']}): {tried}; {how}.",
    ]


def print_layouts(
    plans: Sequence[tuple[PlanRequest, Plan]],
    ranked: Sequence[tuple[PlanRequest, PlanRow]],
    top: int,
    question: str = "",
    *,
    details: bool = False,
) -> None:
    """Print the best layout and a table of the first `top` layouts in `ranked`, with the best one of each system.

    `plans`: request and search result of each system. `question`: model, system and devices as options of the suggested
    command. `details`: also print rates, ties and layouts that do not fit.
    """
    fits, others, left = ([pair for pair in ranked if pair[1].outcome == kind] for kind in (OK, OOM, OPEN))
    more = "" if details else "--details lists rates, and layouts that may be equally fast."
    if not fits:
        for request, plan in plans:
            print_page(*_describe_failures(request, plan.rows), *[_ruled_out_table(plan.rows)] * details)
        return print_page(more)
    placed = [(place, *pair) for place, pair in enumerate(fits, 1)]
    best = {request.system.name: place for place, request, _ in reversed(placed)}
    rest = [place for place, *_ in placed if place not in best.values()]
    places = {*best.values(), *rest[: max(top - len(best), 0)]}
    shown = [each for each in placed if each[0] in places]
    (request, plan), row = next(each for each in plans if each[0] is fits[0][0]), fits[0][1]
    several = len(plans) > 1
    compared = [(place, row) for place, _, row in placed if row.undecided is not None]
    is_first = f"is faster than each of the {len(compared) - 1} next rows"
    if several:  # Only the best layout of each system is compared with those of other systems.
        compared = [each for each in compared if each[0] in best.values()]
        better = "cheaper" if request.rank_by == COST else "faster"
        is_first = f"is {better} than the best layouts of other systems"
    without = [query.system.name for query, _ in plans if query.system.name not in best]
    counts = [f"{len(others):,} of {len(ranked):,} layouts do not fit"] * bool(others)
    slower = f"{len(left):,} layouts are slower than the listed ones even at their minimum time"
    counts += [slower] * bool(left)
    best_s = 0.0 if several or row.rank_s is None else row.rank_s
    hidden = [(place, one) for place, _, one in placed if place not in places and one.is_tight]
    faster = [place for place, one in hidden if (one.rank_s or best_s) < best_s]
    tight = f"Faster, but with less than {100 * MIN_HEADROOM:g} % of the device's memory left: "
    tight += f"{words.count_noun(len(faster), 'layout')} (--top {max(faster, default=0)})."
    options = words.layout_options(row.layout, request.system.best_precision, request.given.get("software"))
    quantile = f"{100 * RANK_QUANTILES[request.rank_by]:g} % quantile"
    order = f"Order of the rows: {quantile} of the {'cost' if request.rank_by == COST else 'step time'}. "
    return print_page(
        *_describe_best_layout(request, plan, row),
        "" if plan.no_time else f"{order}{_describe_ties(compared, places, is_first)}".strip(),
        *_layout_table(shown, timed=not plan.no_time, several=several),
        *(_plan_details(plans, shown) if details else ()),
        f"No layout fits {' or '.join(without)}." if without else "",
        tight if faster else "",
        f"{' and '.join(counts)}. {more}".strip() if counts else more,
        command=f"repro simulate {question} {options}",
    )


def _describe_best_layout(request: PlanRequest, plan: Plan, row: PlanRow) -> list[str]:
    from repro.simulate.plan.rows import training_cost, unknown_rates

    layout, time, system = row.layout, row.time, request.system
    missing, cost = unknown_rates(request, layout.precision), training_cost(request, row)
    further = communicator_bytes(layout, system)
    limit = _describe_limit(request.allocatable - further, further)
    memory = f"Peak memory: {gb(row.memory['reserved_bytes'])} of {limit}."
    parts = [
        f"Best layout: {words.describe_layout(layout, batches=True)}.",
        f"Model and system: {request.model.name} on {words.describe_devices(request.gpus, system)}.",
    ]
    if plan.no_time:
        ignored = f" Operations with unknown rates count as 0 s: {', '.join(missing)}." if missing else ""
        parts += [f"No step time is predicted: {plan.no_time}. {memory}"]
        parts += [f"Layouts are ordered by ideal time: peak rates, without overlap.{ignored}"]
    else:
        parts += [f"{describe_step_time(time)} {memory}"]
        parts += [f"Basis of the times: {time['rests_on']}; {BASES[time['rests_on']]}."]
    if cost:
        texts = []
        for key in filter(cost.__contains__, AMOUNTS):
            ends = " to ".join(units.number(amounts[key]) for amounts in (cost["interval"] or {}).values())
            texts.append(AMOUNTS[key][1].format(units.number(cost[key])) + f" ({ends})" * bool(ends))
        parts += [f"Training on {request.tokens:g} tokens (90 % intervals): {', '.join(texts)}."]
    parts.append(request.model.longer_sequence_note(request.seq))
    return [*parts, unfused_attention_note(request.model, layout, system.device.compute_capability)]


AMOUNTS = {
    "days": ("training\n(days)", "{} days"),
    "energy_mwh": ("energy\n(MWh)", "{} MWh"),
    "cost": ("cost\n($)", "${}"),
}
"""Column header and text of the duration, energy and cost of a training run, by key."""


def _layout_table(
    placed: Sequence[tuple[int, PlanRequest, PlanRow]], *, timed: bool, several: bool
) -> list[Table | str]:
    """Return a table of layouts with their ranks, and the long forms of the table's abbreviations.

    `timed`: whether step times are predicted. `several`: whether the table has a column of systems.
    """
    from repro.simulate.plan.rows import training_cost

    rows = [row for *_, row in placed]
    axes = words.axes(row.layout for row in rows)
    has_interval = timed and any(row.time["interval"] for row in rows)
    costs = [training_cost(request, row) or {} for _, request, row in placed]
    amounts = [key for key in AMOUNTS if any(key in cost for cost in costs)]
    quantile = f"{100 * RANK_QUANTILES[placed[0][1].rank_by]:g} %\nquantile (s)"
    times = [AMOUNTS[key][0] for key in amounts] or ["step time\n(s)", *[quantile] * has_interval]
    times += ["90 % interval\n(%)" if amounts else "90 % interval\n(s)"] * has_interval
    times += ["MFU\n(%)"] * (not amounts)
    columns = [*(times if timed else ["ideal time\n(s)", "pipeline\nbubble (%)"]), "peak memory\n(GB)"]
    heads = ("row", *["system"] * several, *axes, "ZeRO", "micro-\nbatch", "options", *columns)
    made = new_table(*heads, left=("system", "options"))
    for (place, request, row), cost in zip(placed, costs, strict=True):
        layout, time = row.layout, row.time
        cells = [] if timed else [units.number(row.ideal_s), f"{100 * row.bubble:.0f}"]
        if timed:
            ends = [(time["interval"] or {}).get(key) for key in ("low_s", "high_s")]
            texts = [
                f"{100 * (end / time['step_s'] - 1):+.0f}" if amounts else units.number(end)
                for end in ends
                if end
            ]
            seconds = (time["step_s"], *[row.rank_s] * has_interval)
            cells += [units.number(cost.get(key)) for key in amounts] or map(units.number, seconds)
            cells += [" to ".join(texts) or units.NO_VALUE] * has_interval
            mfu = units.NO_VALUE if time["mfu"] is None else f"{100 * time['mfu']:.0f}"
            cells += [mfu] * (not amounts)
        marks = " ".join(
            f"{mark} {value}" if isinstance(value, str) else mark
            for key, (mark, _) in SWITCHES.items()
            if (value := getattr(layout, key))
        )
        degrees = (str(getattr(layout, key)) for key in (*axes, "zero", "micro_batch"))
        memory = gb(row.memory["reserved_bytes"]) + "*" * row.is_tight
        made.add_row(str(place), *[request.system.name] * several, *degrees, marks, *cells, memory)
    notes = ["tp, pp, dp: tensor, pipeline, data parallelism"]
    notes += ["cp: context parallelism"] * ("cp" in axes)
    notes += ["energy: at the maximum power of the nodes"] * ("energy_mwh" in amounts)
    used = (key for key in SWITCHES if any(getattr(row.layout, key) for row in rows))
    notes += [": ".join(SWITCHES[key]) for key in used]
    least = f"less than {100 * MIN_HEADROOM:g} % of the device's memory is left, and such layouts come last"
    return [made, "; ".join([*notes, *[f"*: {least}"] * any(row.is_tight for row in rows)]) + "."]


def _describe_ties(rows: Sequence[tuple[int, PlanRow]], shown: Collection[int], is_first: str) -> str:
    """Return sentences about the layouts that may be as fast as the first one, and the main uncertain input.

    `rows`: layouts with their row numbers. `shown`: printed row numbers. `is_first`: text after "Row 1" if no layout
    is tied with the first one.
    """
    from repro.simulate.plan.rows import MIN_TIE_SHARE

    ties = {place: tie for place, row in rows for tie in row.undecided or () if tie.than == 1}
    if not any(row.interval for _, row in rows):
        return ""
    if not ties:
        share = f"{100 * (1 - MIN_TIE_SHARE):.0f} %"
        return f"Row 1 {is_first} in {share} or more draws of uncertain inputs." if len(rows) > 1 else ""
    cause = Counter(tie.by[0] for tie in ties.values()).most_common(1)[0][0]
    hidden = sum(place not in shown for place in ties)
    more = f" {words.count_noun(hidden, 'more tied row')}: --top {max(ties)}." if hidden else ""
    text = f"Rows {_join_places([1, *ties])} are tied within their uncertainty."
    return f"{text} Main uncertainty: {words.describe_input(cause)}.{more}"


def _join_places(places: Sequence[int]) -> str:
    """Return ascending row numbers as text, such as `1 to 4, 6 and 9`."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    parts = [text for run in runs for text in ([f"{run[0]} to {run[-1]}"] if run[2:] else map(str, run))]
    return " and ".join([*filter(None, [", ".join(parts[:-1])]), parts[-1]])


def _plan_details(
    plans: Sequence[tuple[PlanRequest, Plan]], placed: Sequence[tuple[int, PlanRequest, PlanRow]]
) -> list[str | Table]:
    """Return details of ranked layouts: rates, waiting times, statistical ties, ranking rule, and layouts that fail."""
    from repro.simulate.plan.rows import IDEAL_ORDER_RULE

    losses = {"communication\nwait (%)": "exposed_s", "pipeline\nbubble (%)": "bubble_s"}
    rates = new_table("row", "step time\n(s)", "rate per GPU\n(TFLOP/s)", "throughput\n(samples/s)", *losses)
    sent = new_table("row", "sent inside\nnodes (GB)", "sent between\nnodes (GB)")
    headings = ("row", "tied with row", "faster in draws (%)", "deciding inputs")
    pairs = new_table(*headings, left=headings[3:], wrap=headings[3:])
    for place, _, row in placed:
        time, links = row.time, row.comm.get("bytes_by_link", {})
        between = links.get("inter-node", 0)
        sent.add_row(str(place), gb(sum(links.values()) - between), gb(between))
        if time:
            cells = [units.number(time["step_s"]), f"{time['flops_per_device'] / units.TERA:.1f}"]
            cells.append(units.number(time["samples_per_s"]))
            cells += [f"{100 * time[key] / time['step_s']:.1f}" for key in losses.values()]
            rates.add_row(str(place), *cells)
        for tie in row.undecided or ():
            pairs.add_row(str(place), str(tie.than), f"{100 * tie.part:.1f}", " or ".join(tie.by[:2]))
    no_time, kernels = plans[0][1].no_time, placed[0][2].layout.kernels
    bases = dict.fromkeys(describe_basis(kernels, request.system) for request, _ in plans)
    return [
        rates,
        sent,
        pairs,
        f"Order: {IDEAL_ORDER_RULE}." if no_time else "",
        *(f"Basis of the times: {basis}." for basis in bases if not no_time),
        *(_ruled_out_table(plan.rows) for _, plan in plans),
        f"{sum(plan.simulated for _, plan in plans):,} layouts were simulated.",
    ]


def _describe_failures(request: PlanRequest, rows: Sequence[PlanRow]) -> list[str]:
    """Return sentences if no layout fits: the least required memory, and the number of layouts by failure cause."""
    best = min(rows, key=lambda row: row.memory["peak_bytes"])
    causes = Counter(row.ruled_out_by for row in rows).most_common()
    return [
        f"No layout fits: {request.model.name} on {words.describe_devices(request.gpus, request.system)}.",
        f"Least memory: {gb(best.memory['peak_bytes'])} GB or more of {units.size(request.allocatable)}, limited by "
        f"{best.ruled_out_by}. Layout: {words.describe_layout(best.layout, batches=True)}.",
        f"Failure causes of all {len(rows):,} layouts: {', '.join(f'{cause} ({count:,})' for cause, count in causes)}.",
    ]


def _ruled_out_table(rows: Sequence[PlanRow]) -> Table:
    """Return the minimum memory and the limiting term of the layouts that do not fit, by tp, cp, pp and ZeRO stage."""
    groups: dict[tuple[int, ...], list[PlanRow]] = {}
    rows = [row for row in rows if row.outcome == OOM]
    for row in rows:
        key = tuple(getattr(row.layout, name) for name in ("tp", "cp", "pp", "zero"))
        groups.setdefault(key, []).append(row)
    axes = words.axes(row.layout for row in rows)
    headings = (" x ".join(axes), "ZeRO", "layouts", "least memory (GB)", "limit", "evidence")
    made = new_table(*headings, left=(headings[0], *headings[4:]))
    for key, group in sorted(groups.items()):
        row = min(group, key=lambda row: int(row.memory["peak_bytes"]))
        cells = str(key[-1]), str(len(group)), gb(row.memory["peak_bytes"]), row.ruled_out_by
        made.add_row(words.degrees(row.layout, axes), *cells, KNOWN_FROM[row.evidence])
    return made


def print_plan_map(request: PlanRequest, cells: Sequence[MapCell], limits: Sequence[int]) -> None:
    """Print a map of the required memory by tp and pp degree, and the terms of memory that limit layouts."""
    limits = sorted(limits)
    there = {(cell.tp, cell.pp): cell for cell in cells if cell.rows}
    layout = next(iter(there.values())).rows[limits[0]].layout
    stages = sorted({pp for _, pp in there})
    drawn = new_table("", *(f"pp {pp}" for pp in stages), left=1 + len(stages), gap=4)
    for tp in sorted({tp for tp, _ in there}, reverse=True):
        drawn.add_row(f"tp {tp}", *(_cell_text(there.get((tp, pp)), limits) for pp in stages))
    is_bound = {row.evidence for cell in there.values() for row in cell.rows.values()} & {STATES, RETAINED}
    print_page(
        f"{request.model.name} on {words.describe_devices(request.gpus, request.system)}.",
        f"Layout: {words.describe_layout(layout, degrees=False, batches=True)}.",
        "Cells: memory of the fullest rank (GB), and the smallest device memory that fits.",
        drawn,
        f"{units.size(request.system.context())} of each device's memory are outside torch's allocator."
        + " >: lower bound, not simulated." * bool(is_bound)
        + " -: no such layout." * (len(there) < drawn.row_count * len(stages)),
        *(text for limit in limits for text in _describe_limits(list(there.values()), limit)),
    )


def _cell_text(cell: MapCell | None, limits: Sequence[int]) -> str:
    """Return a map cell's two lines for a (tp, pp) pair: required memory in GB, and smallest sufficient GPU memory."""
    if cell is None:
        return "-\n"
    rows = [cell.rows[limit] for limit in sorted(cell.rows)]
    row = next((row for row in rows if row.outcome == OK), rows[-1])
    need = row.memory["reserved_bytes" if row.outcome == OK else "peak_bytes"]
    enough = next((f"fits {units.size(limit)}" for limit in limits if cell.rows[limit].outcome == OK), "")
    return f"{'' if row.evidence == FULL else '>'}{gb(need)}\n{enough or 'does not fit'}"


def _describe_limits(cells: Sequence[MapCell], limit: int) -> list[str]:
    """Return one line per term of memory, such as activations, that makes layouts exceed a device memory of `limit`."""
    by_term: dict[str, list[str]] = {}
    for cell in cells:
        row = cell.rows[limit]
        if row.outcome == OOM:
            by_term.setdefault(row.ruled_out_by, []).append(f"{cell.tp} x {cell.pp}")
    size = units.size(limit)
    texts = {term: ", ".join(places) for term, places in by_term.items()}
    failures = [f"tp x pp with more than {size}, due to {term}: {places}." for term, places in texts.items()]
    return failures or [f"{size}: all fit."]
