"""Values for the HTML templates of the report (claims, figures, records, machines), and the rendered files.

The report lists every record that a claim or a figure reads, and the newest `MAX_RECORDS` other records of each kind.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.accuracy.validate.unknowns import LISTED_INPUTS, count_by_claim, format_range
from repro.claims.headlines import SHOWN_KINDS, headline_lines
from repro.claims.other_system import PREDICTIONS, simulation_command
from repro.claims.run_commands import SuiteCatalogue
from repro.claims.table import totals
from repro.config.words import count_noun
from repro.measure.provenance import program_version
from repro.report import views
from repro.report.evidence import JudgedStore
from repro.report.views import Machines, record_row
from repro.simulate.time.calibration import BASES, basis_of_record
from repro.util import units

if TYPE_CHECKING:
    from jinja2 import Template

    from repro.claims.ledger import Ledger
    from repro.results.schema import ExperimentRecord
    from repro.results.select import Selection

TEMPLATES = Path(__file__).parent / "templates"
MAX_RECORDS = 200
"""Maximum number of comparisons in the report, and of records of each kind that neither a claim nor a figure reads."""
MAX_MACHINES = 100
"""Maximum number of origins of records (machine, commit and versions) that the report's page of machines lists."""
BEST_FIGURES = {
    "zero-fig1": "Model states per GPU without ZeRO and with its three stages: published, by formula, simulated.",
    "turing-degrees": "Memory per GPU at each model-parallel degree, with and without ZeRO 1, and the limit of a V100.",
    "validation": "Each dot is one published run: its published throughput, and the throughput predicted for it.",
}
"""Captions of the figures on the first page of the report, by figure id."""
BEYOND = "beyond"
"""Name of the page for claims that no reproduced report published; the files of such claims have no date."""
SOURCE_FIGURES = {
    "megatron-2019": "megatron-2019 megatron-2020",
    "zero": "zero-fig1 states memory-timeline peak zero-fig2 zero-fig3 zero-fig4 zero-fig6 zero-fig7 zero-fig8"
    " communication links",
    "deepspeed-feb2020": "deepspeed-release windtunnel deepspeed-64gpu",
    "turing-nlg": "turing-degrees turing-nlg",
    "megatron-2021": "megatron-2021 schedules breakdown",
    "yuan": "map",
    BEYOND: "loss convergence engines",
}
"""Ids of the figures on the page of each published report; the page of machines has all other figures."""


def context(
    found: JudgedStore,
    chosen: Selection,
    figures: list[dict[str, Any]],
    remarks: list[str],
    catalogue: SuiteCatalogue,
) -> dict[str, Any]:
    """Return the values for the report's HTML templates by name; `figures`: title, caption and records of figures."""
    everything = [*chosen.measured, *chosen.simulated]
    machines = Machines([*everything, *chosen.comparisons])
    known = {_anchor(record): record for record in everything}
    headlines = headline_lines(found.ledger, found.judged)
    first = list(dict.fromkeys(line.claim for line in headlines))
    claims = [views.claim_view(result, found.ledger, catalogue) for result in found.judged]
    claims.sort(key=lambda claim: first.index(claim["id"]) if claim["id"] in first else len(first))
    readers = defaultdict(list)
    for claim in claims:
        claim["is_headline"] = claim["id"] in first
        for entry in claim["experiments"]:
            readers[entry["anchor"]].append(claim["id"])
            entry["record"] = known.get(entry["anchor"])
    cited = {*readers, *(anchor for figure in figures for anchor in figure["records"].values())}
    comparisons = sorted(chosen.comparisons, key=lambda record: record.order, reverse=True)
    listed = [*_listed(chosen.measured, cited), *_listed(chosen.simulated, cited)]
    return {
        "written": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "program": program_version(),
        "results": str(found.results),
        "claims": claims,
        "headlines": headlines,
        "kinds": SHOWN_KINDS,
        "summary": views.count_verdicts(claims),
        "totals": totals(found.judged),
        "sources": (sources := _sources(found.ledger, claims, figures)),
        "groups": [
            (title, [claim for claim in members if not claim["is_headline"]])
            for source in sources
            for title, members in source["files"]
        ],
        "figures": figures,
        "best": [
            (one, BEST_FIGURES[one["id"]]) for one in figures if one["id"] in BEST_FIGURES and one["is_drawn"]
        ],
        "unknowns": found.shopping_list,
        "again": found.asked_again,
        "ledger": found.ledger,
        "rows": [
            {**record_row(one), "machine": machines.number(one), "claims": readers[_anchor(one)]}
            for one in listed
        ],
        "more_records": len(everything) - len(listed),
        "bases": BASES,
        "basis_of_record": basis_of_record,
        "comparisons": comparisons[:MAX_RECORDS],
        "more_comparisons": max(0, len(comparisons) - MAX_RECORDS),
        "machines": machines.entries[:MAX_MACHINES],
        "machine_number": machines.number,
        "more_machines": max(0, len(machines.entries) - MAX_MACHINES),
        "older": chosen.older,
        "remarks": remarks,
    }


def _sources(
    ledger: Ledger, claims: Sequence[dict[str, Any]], figures: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the data of one page per source of claims, in order of publication; set each claim's and figure's page.

    A source is a file of claims, or consecutive files about one subject. All files without a date are one source.
    """
    files = [file for file in ledger.titles if any(claim["file"] == file for claim in claims)]
    found = []
    for author, group in itertools.groupby(
        files, lambda file: ledger.about[file] if ledger.dates[file] else ""
    ):
        members = list(group)
        stem = members[0].removesuffix(".toml") if len(members) == 1 else author.lower().replace(" ", "-")
        name = stem if author else BEYOND
        own = [claim for claim in claims if claim["file"] in members]
        for claim in own:
            claim["source"] = name
        found.append(
            {
                "name": name,
                "page": f"source-{name}.html",
                "title": f"{author}, {ledger.dates[members[0]][:4]}" if author else "Beyond the reports",
                "files": [
                    (ledger.titles[file], [one for one in own if one["file"] == file]) for file in members
                ],
                "claims": len(own),
                "verdicts": views.count_verdicts(own),
                "figures": [
                    one for at in SOURCE_FIGURES.get(name, "").split() for one in figures if one["id"] == at
                ],
            }
        )
    pages = {one: f"source-{name}.html" for name, ids in SOURCE_FIGURES.items() for one in ids.split()}
    for figure in figures:
        figure["page"] = pages.get(figure["id"], "machines.html")
    return found


def render_site(values: dict[str, Any]) -> dict[str, str]:
    """Return the text of each file of the HTML report by its path, except for figures and notebooks."""
    site = {name: (TEMPLATES / name).read_text(encoding="utf-8") for name in ("style.css", "site.js")}
    site["records.js"] = f"const STORE = {json.dumps(_records(values['rows']), separators=(',', ':'))};\n"

    def add(path: str, name: str, **own: Any) -> None:
        root = "../" * path.count("/")
        site[path] = template(name).render(**values, root=root, page=path, **own)

    for name in ("index.html", "claims.html", "experiments.html", "machines.html"):
        add(name, name)
    for source in values["sources"]:
        add(source["page"], "source.html", source=source)
    for claim in values["claims"]:
        add(f"claims/{claim['id']}.html", "claim.html", claim=claim)
    return site


def _records(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the table of experiments as lists of values with one list of keys, which halves the size of its JSON."""
    keys = list(rows[0]) if rows else []
    labels = {row["evidence"]: list(row["facts"]) for row in rows}
    values = [[*{**row, "facts": [*row["facts"].values()]}.values()] for row in rows]
    return {"keys": keys, "labels": labels, "machines": MAX_MACHINES, "rows": values}


@functools.cache
def template(name: str) -> Template:
    """Return the Jinja template `name` of the report, in which an undefined variable is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "code": _code,
        "counted": count_noun,
        "sign": views.VERDICT_SIGNS.get,
        "slug": lambda verdict: verdict.replace(" ", "-"),
        "percent": units.percent,
        "number": units.number,
        "value_range": format_range,
        "by_claim": count_by_claim,
    }
    environment.globals |= {
        "anchor": views.anchor,
        "interval": units.interval,
        "zip": zip,
        "listed_inputs": LISTED_INPUTS,
        "predictions": PREDICTIONS,
        "simulation_command": simulation_command,
    }
    return environment.get_template(name)


def _code(words: str) -> Any:
    """Return text as HTML in which words in backticks are code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(words))))


def _anchor(record: ExperimentRecord) -> str:
    return views.anchor(record.evidence, record.label)


def _listed(records: list[ExperimentRecord], cited: Iterable[str]) -> list[ExperimentRecord]:
    """Return the records that the report cites (by HTML anchor), then the newest `MAX_RECORDS` other records."""
    others = [record for record in records if _anchor(record) not in cited]
    newest = sorted(others, key=lambda record: record.order, reverse=True)[:MAX_RECORDS]
    return [*(record for record in records if _anchor(record) in cited), *newest]
