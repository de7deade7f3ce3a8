"""Output of `repro claims`: published claims with their verdicts, and predictions of claims for another system."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from repro.claims import headlines, other_system, verdicts
from repro.claims.headlines import (
    REFERENCE_SUFFIX,
    SHOWN_KINDS,
    describe_miss,
    headline_lines,
    measuring_machines,
    value_text,
)
from repro.claims.judge import DISAGREEING_FIRST, judge
from repro.claims.ledger import CERTAINTIES, ITSELF, KINDS, Ledger
from repro.claims.other_system import Answer
from repro.claims.reader import load_ledger
from repro.claims.table import as_dict, count_text, summary, totals, why
from repro.claims.verdicts import BAD, FOLLOWS, GOOD, NOT_REPRODUCED, NOT_RUN, ClaimResult, Finding, RowResult
from repro.config import words
from repro.config.errors import ConfigError
from repro.config.suites import SUITES
from repro.measure.local_system import load_system
from repro.results.reference_records import load_reference
from repro.results.schema import EMULATED, MEASURED, SIMULATED
from repro.results.store import read_records
from repro.simulate.time.calibration import BASIS_LABELS, count_bases
from repro.util import console as render
from repro.util import units
from repro.util.console import PAGE_COLUMNS, print_json, stdout
from repro.util.units import NO_VALUE

DEFINITIONS: tuple[str, ...] = (
    "simulated: with a 90 % interval. possible: a miss, but the interval contains the published value.",
)
"""Lines under the table of headline claims that explain its columns and verdicts."""
MAX_CLAIM_ROWS = 6
"""Maximum number of values of one claim that are printed without `--details`; disagreeing values come first."""
MAX_STRENGTH_TEXT = 195
"""Maximum length in characters of the printed line that states how much a claim's values may change."""
MAX_CLAIM_TEXT = 290
"""Maximum length in characters of the printed cause of a claim's verdict, and of a claim's conditions."""
ALL_CLAIMS_COLUMNS = 25, 25, 14
"""Widths of the columns `published`, `evidence` and `verdict` in the table of all claims, in characters."""
MAX_ANSWERS, ANSWER_COLUMNS = 15, (16, 21, 18)
"""Maximum number of claims, and widths of three columns in characters, in the table of `repro claims --system`."""
MAX_SHOWN_UncertainOWNS = 3
"""Maximum number of uncertain system properties that are printed for each predicted value of a claim."""
VERDICT_STYLES = {
    verdicts.REPRODUCED: "green",
    **dict.fromkeys((verdicts.POSSIBLE, verdicts.DEPENDS), "blue"),
    verdicts.NOT_REPRODUCED: "red",
    verdicts.FOLLOWS: "cyan",
    **dict.fromkeys((verdicts.INCONSISTENT, verdicts.ERRATUM), "magenta"),
    verdicts.NOT_COMPARABLE: "dim",
    **dict.fromkeys((verdicts.NOT_RUN, verdicts.NO_TEST), "yellow"),
}


def print_claims(
    claim_id: str | None,
    json: bool,
    results: Path,
    own: Sequence[Path] = (),
    *,
    all_claims: bool = False,
    details: bool = False,
) -> int:
    """Print the headline claims, the claim `claim_id`, or with `all_claims` every claim; return 0.

    `own`: additional files of claims. Raises `ConfigError` if the id is unknown or such a file is invalid.
    """
    ledger = load_ledger(own=tuple(own))
    first: tuple[str, ...] = ()
    if claim_id:
        number, claim_id = claim_id, ledger.claim(claim_id).id
        first = tuple(ledger.headlines[int(number) - 1].rows) if number.isdigit() else ()
    judged = judge(ledger, read_records(results), load_reference())
    chosen = [result for result in judged if not claim_id or result.claim.id == claim_id]
    if json:
        print_json({"claims": [as_dict(result, ledger) for result in chosen], "summary": summary(chosen)})
    elif claim_id and not details:
        options = "".join(f" --ledger {path}" for path in own) + words.results_option(results)
        print_claim(chosen[0], stdout(PAGE_COLUMNS), first, options)
    elif claim_id:
        print_claim_details(chosen[0], ledger, stdout(PAGE_COLUMNS))
    elif all_claims or details or own:
        files = {path.name for path in own} or {result.claim.file for result in judged}
        listed = [result for result in judged if all_claims or details or result.claim.file in files]
        print_all_claims(listed, ledger, stdout(PAGE_COLUMNS))
    else:
        print_headlines(judged, ledger, stdout(PAGE_COLUMNS))
    return 0


def print_headlines(results: list[ClaimResult], ledger: Ledger, console: Console) -> None:
    """Print counts over all claims, a table of the headline claims, and the machines on which values were measured."""
    lines = headline_lines(ledger, results)
    console.print(textwrap.fill(totals(results), PAGE_COLUMNS) + "\n")
    headings = ("", "claim", "published", *SHOWN_KINDS, "verdict")
    grid = render.new_table(*headings, left=set(headings), gap=1)
    for line in lines:
        verdict = Text(line.verdict, style=VERDICT_STYLES[line.verdict])
        cells = (line.values[kind] for kind in SHOWN_KINDS)
        grid.add_row(f"{line.number:2}", line.name, line.published, *cells, verdict)
    console.print(grid)
    console.print()
    for line in lines:
        if line.miss:
            console.print(_shortened(f"{line.number:2} {line.miss}", PAGE_COLUMNS), markup=False)
    own = (finding for result in results for finding in result.findings if not finding.is_reference)
    notes = DEFINITIONS
    if not any(finding.decided and finding.experiments for finding in own):
        formulas = [
            one.verdict for result in results for one in result.findings if one.itself and one.decided
        ]
        follow = f"{formulas.count(FOLLOWS)} of {len(formulas)} values follow from formulas of their source"
        notes = (f"No experiment has a result yet. {follow}.", "To simulate all claims: `make simulate`.")
    console.print("\n".join(notes))
    machines = [f"claim {line.number}: {machine}" for line in lines for machine in line.machines]
    references = [machine for machine in machines if REFERENCE_SUFFIX in machine]
    for title, some in (
        ("Measured", [machine for machine in machines if machine not in references]),
        ("Reference records", [machine.replace(REFERENCE_SUFFIX, "") for machine in references]),
    ):
        if some:
            console.print(f"{title}: {'; '.join(some)}.")
    console.print("Every claim: `repro claims --all`. One claim in detail: `repro claims 5`.")


def print_claim(
    result: ClaimResult, console: Console, first: Collection[str] = (), options: str = ""
) -> None:
    """Print a claim on one screen: verdict, cause, values (labels in `first` come first), and commands to repeat it.

    `options`: options of the suggested `repro claims`.
    """
    claim = result.claim
    console.print(Text.assemble((claim.id, "bold cyan"), f": {claim.title}."))
    verdict = Text.assemble("Verdict: ", (result.verdict, VERDICT_STYLES[result.verdict]), f". {why(result)}")
    console.print(verdict)
    if result.verdict not in GOOD and (cause := _cause(result)):
        console.print(_shortened(f"Cause: {cause}"))
    console.print(_shortened(f"Conditions: {claim.conditions or 'none are published.'}"))
    main = [row for row in result.rows if row.row.main]
    shown = sorted(main, key=lambda row: row.row.label not in first)
    if len(main) > MAX_CLAIM_ROWS:
        shown.sort(key=lambda row: (row.row.label not in first, DISAGREEING_FIRST.index(row.verdict)))
        shown = shown[:MAX_CLAIM_ROWS]
    kinds = [kind for kind in (ITSELF, *KINDS) if any(row.under(kind) for row in shown)]
    names = ["formula" if kind == ITSELF else kind for kind in kinds]
    headings = ("value", "published", "accepted", *names, "verdict")
    grid = render.new_table(*headings, left=set(headings), wrap={"value"}, gap=1)
    for row in shown:
        cells = (value_text([row], kind) for kind in kinds)
        style = VERDICT_STYLES[row.verdict]
        accepted = headlines.describe_accepted(row)
        grid.add_row(row.row.label, _published(row), accepted, *cells, Text(row.verdict, style=style))
    console.print()
    console.print(grid)
    console.print()
    for line in _strength_lines(shown):
        console.print(_shortened(line, MAX_STRENGTH_TEXT), markup=False)
    for machine in measuring_machines(main):
        console.print(f"Measured: {machine}.")
    hidden = {
        "values of the claim": len(main) - len(shown),
        "supporting values": len(result.rows) - len(main),
    }
    if any(hidden.values()):
        console.print(f"Omitted: {', '.join(f'{count} {what}' for what, count in hidden.items() if count)}.")
    verb = "Run" if result.verdict == NOT_RUN else "Repeat"
    for what, command in _repeat_commands(result):
        console.print(f"{verb} the {what}: {command}", soft_wrap=True)
    details = f"repro claims {claim.id} --details{options}"
    console.print(f"Sources, notes and every value: {details}", soft_wrap=True)


def _repeat_commands(result: ClaimResult) -> list[tuple[str, str]]:
    """Return pairs (kind, command) that repeat a claim's evidence: search, simulation, measurement or emulation."""
    known = {finding.kind for finding in result.findings if finding.experiments}
    found = [("search", result.claim.repeat)] * bool(result.claim.repeat)
    read = {name.partition("/")[0] for finding in result.findings for name in finding.experiments}
    own = sorted(read - {*SUITES.names()})  # `repro run --claim` finds packaged suites only: list other files
    run = f"repro run {' '.join(f'{name}.toml' for name in own) or f'--claim {result.claim.id}'}"
    if SIMULATED in known:
        found.append(("simulation", f"{run} --evidence {SIMULATED}"))
    if known & {MEASURED, EMULATED}:
        what = "measurement" if MEASURED in known else "emulation"
        found.append((what, run))
    return found


def _strength_lines(rows: Sequence[RowResult]) -> list[str]:
    """Return lines on how much reproduced values may change, and on injected simulator faults that alter verdicts."""
    rows = sorted((row for row in rows if row.margin or row.mutations), key=lambda row: not row.weakness)
    margins = [
        f"{row.row.label} {headlines.describe_margin(row)}{', weak' * bool(row.weakness)}" for row in rows
    ]
    changed = dict.fromkeys(row.mutations[0] for row in rows if row.mutations)
    lines = {"Margin (%)": "; ".join(margins), "Would fail with": ", ".join(changed)}
    return [f"{name}: {text}." for name, text in lines.items() if text]


def _cause(result: ClaimResult) -> str:
    """Return the cause of a claim's verdict: for `not reproduced` a note in its file, else the verdict's reason."""
    if result.verdict != NOT_REPRODUCED:
        return result.reason
    notes = (row.row.note for row in result.rows if row.row.main and row.verdict == NOT_REPRODUCED)
    return next(filter(None, notes), result.claim.note or result.reason)


def _shortened(text: str, most: int = MAX_CLAIM_TEXT) -> str:
    """Return `text`, shortened between words to at most `most` characters."""
    indent = " " * (len(text) - len(text.lstrip()))
    return indent + textwrap.shorten(text, most - len(indent), placeholder=" ...")


def print_all_claims(results: list[ClaimResult], ledger: Ledger, console: Console) -> None:
    """Print one line per claim under the title of the file that contains it, and the number of claims by verdict."""
    headings = ("claim", "published", "evidence: rows that agree", "verdict")
    widths = max(len(result.claim.id) for result in results), *ALL_CLAIMS_COLUMNS
    file = ""
    for number, result in enumerate(results):
        if result.claim.file != file:
            file = result.claim.file
            console.print(Text(f"{ledger.titles[file]}  ({file})", style="bold cyan"))
        grid = render.new_table(*headings, left=set(headings), wrap=headings[1:3], gap=1)
        grid.show_header = not number
        for column, width in zip(grid.columns, widths, strict=True):
            column.width = width
        counts = {kind: count_text(result, kind) for kind in KINDS}
        evidence = ", ".join(f"{kind} {count}" for kind, count in counts.items() if "/" in count)
        verdict = Text(result.verdict, style=VERDICT_STYLES[result.verdict])
        grid.add_row(result.claim.id, result.claim.published, evidence or "-", verdict)
        console.print(grid)
        missed = [row for row in result.rows if row.row.main and row.verdict in BAD]
        for row in missed[:1]:
            text = f"  {row.row.label}: {describe_miss(row)}"
            console.print(_shortened(text, PAGE_COLUMNS), style="dim", markup=False)
    counted = summary(results)
    given = Counter(result.verdict for result in results)
    verdicts = (f"[{style}]{given[name]} {name}[/]" for name, style in VERDICT_STYLES.items() if given[name])
    console.print(f"\n{counted['claims']} claims with {counted['rows']} values: {', '.join(verdicts)}.")
    console.print(textwrap.fill(totals(results), PAGE_COLUMNS))


def print_claim_details(result: ClaimResult, ledger: Ledger, console: Console) -> None:
    """Print all properties of one claim, and every value with its evidence."""
    claim = result.claim
    console.print(Text(claim.id, style="bold cyan"), Text(claim.title, style="bold"))
    facts = render.new_facts_table()
    facts.add_row("published", claim.published)
    for source in claim.source:
        key, _, place = source.partition(" ")
        facts.add_row("source", Text(f"{key} {place} - {ledger.sources[key].title}"))
    facts.add_row("certainty", f"{claim.certainty}: {CERTAINTIES[claim.certainty]}")
    for name, text in (
        ("predicted", claim.prediction),
        ("conditions", claim.conditions),
        ("note", claim.note),
        *(("contradiction", text) for text in claim.contradictions),
        ("needs", claim.needs),
        *(("repeat", f"{command}  ({what})") for what, command in _repeat_commands(result)),
    ):
        if text:
            facts.add_row(name, Text(text))
    verdict = Text(result.verdict, style=VERDICT_STYLES[result.verdict])
    if result.basis:
        verdict.append(f"  ({result.basis})", style="dim")
    facts.add_row("verdict", verdict)
    facts.add_row("why", Text(why(result)))
    if result.reason and result.reason != claim.needs:
        facts.add_row("because", Text(result.reason))
    for text in result.disagreements:
        facts.add_row("disagrees", Text(text, style="red"))
    console.print(facts)
    console.print()
    console.print(_evidence_table(result))
    moves = _unknowns_table(result)
    if moves.row_count:
        console.print()
        console.print(moves)


def _evidence_table(result: ClaimResult) -> Table:
    headings = ("row", "published", "evidence", "value", "verdict", "why")
    grid = render.new_table(*headings, left={"row", "evidence", "verdict", "why"}, wrap=headings)
    for row in result.rows:
        first = [Text(row.row.label), Text(_published(row))]
        findings = row.findings or (None,)
        for finding in findings:
            reason = "see needs" if row.reason == result.claim.needs else row.reason
            verdict = Text(row.verdict, style=VERDICT_STYLES[row.verdict])
            missing = [Text("-"), Text("-"), verdict, Text(reason)]
            grid.add_row(*first, *(_finding_cells(finding) if finding else missing))
            first = [Text(""), Text("")]
        note = " ".join(
            part
            for part in (
                row.row.note,
                f"Given: {row.row.given}." * bool(row.row.given),
                headlines.describe_strength(row),
                "[supporting value]" * (not row.row.main),
                f"[predicted blind: {row.row.blind.text}]" if row.row.blind else "",
                f"[{row.row.certainty}]" * (row.row.certainty != result.claim.certainty),
            )
            if part
        )
        if note:
            grid.add_row("", "", "", "", "", Text(note, style="dim"))
    return grid


def _unknowns_table(result: ClaimResult) -> Table:
    """Return a table of the uncertain inputs with the largest effects on each predicted value, each varied alone."""
    headings = ("value", "uncertain input", "value at low input", "value at high input", "uncertainty")
    grid = render.new_table(*headings, left=2, wrap=headings[:2])
    for row in result.rows:
        label = row.row.label
        for finding in row.findings:
            for key, low, high, share in (
                finding.uncertainty.largest_unknowns(MAX_SHOWN_UncertainOWNS)
                if finding.uncertainty is not None
                else ()
            ):
                grid.add_row(label, key, units.number(low), units.number(high), units.percent(share))
                label = ""
    return grid


def _finding_cells(finding: Finding) -> list[Text]:
    return [
        Text(finding.origin if finding.itself else f"{finding.kind}, {finding.scale_label}"),
        Text(finding.text or "-"),
        Text(finding.verdict, style=VERDICT_STYLES[finding.verdict]),
        Text(finding.reason),
    ]


def _published(result: RowResult) -> str:
    row = result.row
    error = f" +-{row.error:g}" if row.error else ""
    unit = (
        row.unit if row.unit in ("x", "%") else f" {row.unit}" * (row.printed is not None and bool(row.unit))
    )
    return f"{row.bound} {row.published}{error}{unit}".strip()


def print_claims_on_system(claim: str, system: str, json: bool, results: Path, details: bool) -> int:
    """Print the predictions of the claims for `system`; return 1 if there are none, else 0. Raises `ConfigError`."""
    ledger = load_ledger()
    questions = other_system.load_questions(ledger)
    if claim:
        family = ledger.claim(claim).family
        asked = tuple(question for question in questions.asked if question.claim == claim)
        if not asked:
            families = ", ".join(other_system.QUESTION_FAMILIES)
            why = questions.left_out.get(claim, f"its kind is {family}, not one of {families}")
            raise ConfigError("claim", claim, says=f"cannot be predicted for another system: {why}")
    else:
        asked = questions.asked
    target = load_system(system)
    name, found = target.name, other_system.answer_questions(asked, read_records(results), target)
    nothing = all(answer.unrecorded for answer in found)
    if json:
        answers = [answer.as_dict() for answer in found]
        print_json({"system": name, "is": other_system.PREDICTIONS, "answers": answers})
        return int(nothing)
    command = other_system.simulation_command(system)
    if nothing:
        render.print_page(f"The folder {results} has no predictions for {name}.", command=command)
        return 1
    console = stdout(PAGE_COLUMNS)
    print_answers(found, name, console, None if details or claim else MAX_ANSWERS)
    if lacking := sum(answer.unrecorded for answer in found):
        missing = words.count_noun(lacking, "prediction")
        console.print(f"No simulation has run for {missing}: `{command}`.", markup=False, soft_wrap=True)
    return 0


def print_answers(found: Sequence[Answer], system: str, console: Console, most: int | None) -> None:
    """Print predictions of claims for `system`; `most`: maximum number of claims, one prediction each; None: all."""
    headings = ("claim" if most else "question", "published", f"on {system}", "comparison", "basis")
    wrapped = () if most else headings[:4]
    grid = render.new_table(*headings, left=set(headings), wrap=wrapped, gap=1)
    before = ""
    first = {answer.question.claim: answer for answer in reversed(found)} if most else {}
    listed = [answer for answer in found if not most or answer is first[answer.question.claim]][:most]
    for answer in listed:
        texts = answer.published, answer.text or NO_VALUE, answer.word or answer.lacks
        basis, question = BASIS_LABELS[answer.rests_on], answer.question
        if most:
            widths = zip(texts, ANSWER_COLUMNS, strict=True)
            cells = (textwrap.shorten(text, width, placeholder=" ...") for text, width in widths)
            grid.add_row(question.claim, *cells, basis)
            continue
        if question.claim != before:
            before = question.claim
            grid.add_row(Text(before, style="cyan"), "", "", "", "")
        note = f" [{question.note}]" if question.note else ""
        grid.add_row(f"  {question.asks}{note}", *texts, basis)
    console.print(grid)
    console.print()
    if hidden := len(found) - len(listed):
        console.print(
            f"--details lists {hidden} more predictions; `repro claims ID --system NAME` lists those of a claim."
        )
    console.print(other_system.PREDICTIONS)
    if rests_on := count_bases(answer.rests_on for answer in found):
        console.print(rests_on)
