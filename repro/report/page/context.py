"""Data of the page for the templates: claims, figures, records, machines, and the limits for large stores.

The page lists every record that a claim or a figure reads, and the newest `MAX_RECORDS` other records of each kind. It
gives the number of omitted records, which `repro export` contains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.accuracy.validate.unknowns import LISTED_INPUTS, RankedInputs, count_by_claim, format_range
from repro.claims.other_system import PREDICTIONS, Answer, simulation_command
from repro.claims.run_commands import SuiteCatalogue
from repro.claims.table import summary, table, totals
from repro.config.words import count_noun
from repro.measure.provenance import program_version
from repro.report import verdicts
from repro.report.evidence import JudgedStore
from repro.report.records import Machines, measured_row, record_identity, simulated_row
from repro.simulate.time.calibration import BASES, basis_of_record
from repro.util import units
from repro.util.units import NO_VALUE, interval

if TYPE_CHECKING:
    from jinja2 import Template

    from repro.results.schema import ComparisonRecord, ExperimentRecord
    from repro.results.select import Selection

TEMPLATES = Path(__file__).parent / "templates"
MAX_RECORDS = 200
"""Maximum number of listed comparisons, and of listed records per kind that no claim and no figure reads."""
MAX_PROVENANCES = 20
"""Maximum number of machines with full provenance in the page."""


def context(
    found: JudgedStore,
    chosen: Selection,
    figures: list[dict[str, Any]],
    remarks: list[str],
    catalogue: SuiteCatalogue,
) -> dict[str, Any]:
    """Return the template's values. `figures`: data from `build`, with `records` by anchor."""
    everything = [*chosen.measured, *chosen.simulated]
    machines = Machines([*everything, *chosen.comparisons])
    known = {_anchor(record): record for record in everything}
    claims = [
        verdicts.claim_view(result, line, found.ledger, catalogue)
        for result, line in zip(found.judged, table(found.judged), strict=True)
    ]
    for claim in claims:
        claim["records"] = [_line(entry, known, machines) for entry in claim["experiments"]]
    read = {entry["anchor"] for claim in claims for entry in claim["experiments"]}
    read |= {anchor for figure in figures for anchor in figure["records"].values()}
    comparisons = sorted(chosen.comparisons, key=lambda record: record.order, reverse=True)
    lists = [
        _listed(chosen.measured, read, measured_row, machines),
        _listed(chosen.simulated, read, simulated_row, machines),
    ]
    compared = [_comparison(record, machines) for record in comparisons[:MAX_RECORDS]]
    named = {row["machine"] for rows in lists for row in [*rows["read"], *rows["others"]]}
    named |= {row["machine"] for row in compared}
    return {
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "program": program_version(),
        "results": str(found.results),
        "claims": claims,
        "groups": list(dict.fromkeys(claim["group"] for claim in claims)),
        "summary": verdicts.count_verdicts(claims),
        "totals": totals(summary(found.judged)),
        "about": verdicts.by_about(claims),
        "figures": figures,
        "unknowns": _unknowns(found.shopping_list),
        "again": _again(found.asked_again),
        "measured": lists[0],
        "simulated": lists[1],
        "bases": BASES,
        "comparisons": compared,
        "more_comparisons": max(0, len(comparisons) - MAX_RECORDS),
        "machines": [entry for entry in machines.entries if entry["number"] in named],
        "more_machines": len(machines.entries) - len(named),
        "provenances": MAX_PROVENANCES,
        "older": chosen.older,
        "remarks": remarks,
    }


def _unknowns(found: RankedInputs) -> dict[str, Any]:
    """Return the ranked unknowns as text."""
    lines = [
        {
            **one.as_dict(),
            "value": format_range(one),
            "settles": len(one.settles),
            "moves": len(one.rows),
            "share": units.percent(one.share),
            "possible": count_by_claim(one.possible),
        }
        for one in found.inputs[:LISTED_INPUTS]
    ]
    return {"words": found.words, "lines": lines}


def _again(found: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
    """Return the claims on other systems as text: one line per question, with an answer for every simulated system."""
    lines = [
        {
            "claim": answers[0].question.claim,
            "asks": answers[0].question.asks,
            "note": answers[0].question.note,
            "published": answers[0].published,
            "answers": [
                {"text": one.text or NO_VALUE, "word": one.word or one.lacks, "rests_on": one.rests_on}
                for one in answers
            ],
        }
        for answers in zip(*found.values(), strict=True)
    ]
    return {
        "words": PREDICTIONS,
        "systems": list(found),
        "lines": lines,
        "command": simulation_command("SYSTEM"),
    }


def render_page(values: dict[str, Any]) -> str:
    """Return the page as HTML."""
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("style.css", "page.js"))
    return template("page.html").render(style=style, script=script, **values)


def template(name: str) -> Template:
    """Return a template of the folder `templates`; an undefined name raises an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["code"] = _code
    environment.filters["counted"] = count_noun
    environment.filters["breaking"] = _breaking
    return environment.get_template(name)


def _breaking(key: str) -> Any:
    """Return a key as HTML that may wrap after its dots and underscores."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"([._])", r"\1<wbr>", str(escape(key))))


def _code(words: str) -> Any:
    """Return text as HTML, with commands in backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(words))))


def _anchor(record: ExperimentRecord) -> str:
    return verdicts.anchor(record.evidence, record.label)


def _listed(
    records: list[ExperimentRecord],
    read: Iterable[str],
    row: Callable[[ExperimentRecord], dict[str, Any]],
    machines: Machines,
) -> dict[str, Any]:
    """Return the rows of cited records, the rows of the newest other records, and the number of omitted records."""
    cited = [record for record in records if _anchor(record) in read]
    others = [record for record in records if _anchor(record) not in read]
    newest = sorted(others, key=lambda record: record.order, reverse=True)[:MAX_RECORDS]
    shown = [
        [{**row(record), "machine": machines.number(record)} for record in part] for part in (cited, newest)
    ]
    return {"all": len(records), "read": shown[0], "others": shown[1], "more": len(others) - len(newest)}


def _line(entry: dict[str, Any], known: dict[str, ExperimentRecord], machines: Machines) -> dict[str, Any]:
    """Return the claim's line for one record that it reads."""
    record = known.get(entry["anchor"])
    if record is None:
        return {**entry, "outcome": "", "machine": 0}
    return {
        **entry,
        "outcome": record.outcome,
        "rests_on": basis_of_record(record),
        "machine": machines.number(record),
        **record_identity(record),
    }


def _comparison(record: ComparisonRecord, machines: Machines) -> dict[str, Any]:
    return {
        "suite": record.suite,
        "subject": record.subject.name,
        "baseline": record.baseline.name,
        "ratio": units.number(record.ratio),
        "interval": interval(record.low, record.high),
        "rounds": record.rounds,
        "machine": machines.number(record),
        **record_identity(record),
    }
