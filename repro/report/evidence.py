"""Experiment records and the verdicts of published claims as pandas data frames, for report, exports and notebooks.

from repro.report import evidence

found = evidence.read_store()               # $REPRO_RESULTS, else results/ here or in a parent folder
found.claims(about="ZeRO")                  # a row per claim: published, evidence, verdict
found.values("zero-fig1-*")                 # a row per published value, with each kind of evidence
found.experiments("zero_r/*")               # a row per record, a column per metric
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.accuracy.validate.implied_inputs import ImpliedInput, find_implied_inputs
from repro.accuracy.validate.unknowns import RankedInputs, rank_inputs
from repro.claims.headlines import headline_lines
from repro.claims.judge import judge
from repro.claims.ledger import EMULATED, ITSELF, KINDS, Ledger
from repro.claims.other_system import Answer, answer_questions, load_questions, simulated_systems
from repro.claims.reader import load_ledger
from repro.claims.table import as_dict, count_text, summary, why
from repro.claims.verdicts import ClaimResult
from repro.config import Experiment, Layout, Training, models, require
from repro.measure.local_system import load_system
from repro.results.metrics import shown
from repro.results.reference_records import ReferenceFile, load_reference
from repro.results.schema import MEASURED, ComparisonRecord, ExperimentRecord, Record
from repro.results.select import of_today, select
from repro.results.store import Store
from repro.results.tables import comparison_row, experiment_row
from repro.util.units import NO_VALUE

if TYPE_CHECKING:
    import pandas as pd


STORE_VARIABLE = "REPRO_RESULTS"
"""Name of the environment variable that sets the default results folder of `read_store`."""


@dataclass(frozen=True)
class JudgedStore:
    """Records of a results folder, and claims with verdicts; `pattern` is a glob of claim ids or of `suite/name`."""

    results: Path
    records: list[Record]
    """All readable records of the folder, of any version of the measurement protocol, oldest first."""
    torn: list[str]
    """Remark with file, line and reason, for each line of the record files that is not a valid record."""
    ledger: Ledger
    references: Sequence[ReferenceFile] = ()
    """Measurements on other machines that this package contains, for claims that `records` has no measurement for."""

    @cached_property
    def judged(self) -> list[ClaimResult]:
        """Return the verdict and the evidence of every published claim, in the order of the files of claims."""
        return judge(self.ledger, self.records, self.references)

    def documents(self, pattern: str = "*") -> list[dict[str, Any]]:
        """Return the judged claims that match `pattern` as JSON data, in the format of `repro claims --json`."""
        return [as_dict(result, self.ledger) for result in self._judged(pattern)]

    def _judged(self, pattern: str) -> list[ClaimResult]:
        return [result for result in self.judged if fnmatchcase(result.claim.id, pattern)]

    def headlines(self, pattern: str = "*") -> pd.DataFrame:
        """Return a data frame of headline claims: published value, value of each kind of evidence, and verdict."""
        rows = [
            {"claim": line.name, "published": line.published, **line.values, "verdict": line.verdict}
            for line in headline_lines(self.ledger, self.judged)
            if fnmatchcase(line.claim, pattern)
        ]
        return _frame(rows)

    def claims(self, pattern: str = "*", about: str = "") -> pd.DataFrame:
        """Return a data frame with one row per claim: published value, counts of reproduced values, and verdict.

        A count states how many values of the claim a kind of evidence, such as `simulated`, reproduces.
        """
        rows = [
            {
                "claim": result.claim.id,
                "about": self.ledger.about[result.claim.file],
                "title": result.claim.title,
                "published": result.claim.published,
                **{kind: count_text(result, kind) for kind in KINDS},
                "itself": count_text(result, ITSELF),
                "verdict": result.verdict,
                "basis": result.basis,
                "reason": result.reason,
                "why": why(result),
            }
            for result in self._judged(pattern)
            if about in ("", self.ledger.about[result.claim.file])
        ]
        return _frame(rows)

    def summary(self) -> pd.DataFrame:
        """Return a data frame with counts of verdicts and of reproduced values, by subject (such as ZeRO) and in total.

        Several values may test one quantity, such as a formula; the column `quantities` counts distinct quantities.
        """
        groups: dict[str, list[ClaimResult]] = {}
        for result in self.judged:
            groups.setdefault(self.ledger.about[result.claim.file], []).append(result)
        return _frame([_counts(about, results) for about, results in [*groups.items(), ("all", self.judged)]])

    def values(self, pattern: str = "*") -> pd.DataFrame:
        """Return a data frame of published values, with the strongest result and interval of each kind of evidence."""
        return _frame([_value(claim, row) for claim in self.documents(pattern) for row in claim["rows"]])

    def table(self, pattern: str = "*") -> pd.DataFrame:
        """Return a data frame of text with one row per published value, as in the HTML report; a dash: no evidence."""
        from repro.report.views import VERDICT_SIGNS, row_view

        rows = []
        for result in self._judged(pattern):
            for row in result.rows:
                view = row_view(row, result.claim)
                seen = dict.fromkeys(KINDS, NO_VALUE)
                # Findings are sorted, strongest first. Reversed, the strongest of each kind overwrites the others.
                for finding in reversed(view["findings"]):
                    seen[finding["kind"]] = f"{finding['value']} {VERDICT_SIGNS[finding['verdict']]}"
                shown = {"claim": result.claim.id, "value": view["label"], "published": view["published"]}
                rows.append({**shown, **seen, "verdict": view["verdict"]})
        return _frame(rows)

    def tidy(self, pattern: str = "*") -> pd.DataFrame:
        """Return a data frame for plots with one row per number: published values and the values of their evidence.

        The column `kind` is `published` or the kind of evidence, such as `simulated`.
        """
        rows = []
        for claim in self.documents(pattern):
            for row in claim["rows"]:
                at = {"claim": claim["id"], "value": row["label"], "unit": row["unit"]}
                if row["value"] is not None:
                    rows.append({**at, "kind": "published", "amount": row["value"]})
                seen: set[str] = set()
                for finding in row["evidence"]:
                    if isinstance(finding["value"], int | float) and finding["kind"] not in seen:
                        seen.add(finding["kind"])
                        rows.append({**at, **{key: finding[key] for key in ("kind", "low", "high")}})
                        rows[-1]["amount"] = finding["value"]
        return _frame(rows)

    def to_run(self, pattern: str = "*") -> list[str]:
        """Return the `repro` commands that run the missing experiments of the claims whose ids match `pattern`."""
        from repro.claims.run_commands import SuiteCatalogue, experiments_of

        known = {(record.evidence, record.label) for record in self.latest() if record.conclusive}
        lacking = [
            (kind, at)
            for result in self._judged(pattern)
            for kind, at in experiments_of(result.claim.rows)
            if (MEASURED if kind == EMULATED else kind, at) not in known
        ]
        return [command.text for command in SuiteCatalogue().commands(lacking)]

    def experiments(self, pattern: str = "*", evidence: str = "") -> pd.DataFrame:
        """Return a data frame with one row per experiment record: conditions, outcome, and every metric."""
        found = (record for record in self._matching(pattern) if isinstance(record, ExperimentRecord))
        return _frame([experiment_row(record) for record in found if evidence in ("", record.evidence)])

    def latest(self, pattern: str = "*", evidence: str = "") -> list[ExperimentRecord]:
        """Return the record of each experiment that decides verdicts: the newest repeatable one, else the newest."""
        chosen = select(self.records)
        found = [r for r in [*chosen.measured, *chosen.simulated] if fnmatchcase(r.label, pattern)]
        return [record for record in found if evidence in ("", record.evidence)]

    def comparisons(self, pattern: str = "*") -> pd.DataFrame:
        """Return a data frame of the speed ratio and 95 % interval of each pair of alternately run experiments."""
        found = (record for record in self._matching(pattern) if isinstance(record, ComparisonRecord))
        return _frame([comparison_row(record) for record in found])

    def provenance(self) -> pd.DataFrame:
        """Return a data frame with one row per record of any kind: id, time, machine, package versions and commit."""
        return _frame([_origin(record) for record in self.records])

    @cached_property
    def shopping_list(self) -> RankedInputs:
        """Return the unknown properties of systems that make predictions uncertain, the most decisive ones first."""
        return rank_inputs(self.judged, self.records)

    @cached_property
    def implied(self) -> list[ImpliedInput]:
        """Return the values that published results imply for each uncertain property of the systems."""
        return find_implied_inputs(self.judged, self.records)

    @cached_property
    def asked_again(self) -> dict[str, list[Answer]]:
        """Return predictions of the claims for systems other than the published ones, by name of the system."""
        simulated = simulated_systems(self.records)
        questions = load_questions(self.ledger).asked if simulated else ()
        return {name: answer_questions(questions, self.records, load_system(name)) for name in simulated}

    def unknowns(self) -> pd.DataFrame:
        """Return a data frame of uncertain system properties: range, affected predictions, and how to measure them."""
        counted = ("rows", "settles", "possible")
        inputs = [one.as_dict() for one in self.shopping_list.inputs]
        counts = [{key: len(one[key]) for key in counted} for one in inputs]
        return _frame([{"unknown": one.pop("key")} | one | n for one, n in zip(inputs, counts, strict=True)])

    def _matching(self, pattern: str) -> list[Record]:
        return [record for record in self.records if fnmatchcase(record.label, pattern)]


def read_store(results: Path | str | None = None, own: Sequence[Path] = ()) -> JudgedStore:
    """Return records in `results` (default: `default_store()`) and judged claims. `own`: additional files of claims."""
    store = Store(Path(results) if results is not None else default_store())
    records, torn = store.readable()
    return JudgedStore(store.root, records, torn, load_ledger(own=tuple(own)), load_reference())


def default_store() -> Path:
    """Return the default results folder: `$REPRO_RESULTS` if set, else the nearest folder `results` with records.

    The search covers the working directory and its parents. Without any such folder, return `results`.
    """
    named = os.environ.get(STORE_VARIABLE, "")
    if named:
        return Path(named)
    here = Path.cwd()
    found = (folder / "results" for folder in (here, *here.parents) if (folder / "results/records").is_dir())
    return next(found, Path("results"))


def _counts(about: str, results: list[ClaimResult]) -> dict[str, Any]:
    counts = summary(results)
    rows = {
        kind: f"{found['rows_reproduced']}/{found['rows_decided']}" if found["rows_decided"] else "-"
        for kind, found in (*counts["evidence"].items(), ("itself", counts["against_itself"]))
    }
    agreeing = "{hold}/{tested}".format(**counts["quantities"])
    return {"about": about, "claims": counts["claims"], **counts["verdicts"], **rows, "quantities": agreeing}


def _value(claim: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for finding in row["evidence"]:  # strongest first, so retain the first of each kind
        found.setdefault(finding["kind"], finding)
    parts = {"value": "", **{key: f"_{key}" for key in ("low", "high", "tolerance", "origin", "verdict")}}
    evidence = {f"{k}{suffix}": found.get(k, {}).get(key) for k in KINDS for key, suffix in parts.items()}
    return {
        "claim": claim["id"],
        **{key: claim[key] for key in ("family", "about")},
        "value": row["label"],
        "published": row["value"],
        "printed": row["published"],
        **{key: row[key] for key in ("unit", "certainty", "main", "given")},
        **evidence,
        **{key: row[key] for key in ("verdict", "basis", "reason")},
    }


def _origin(record: Record) -> dict[str, Any]:
    from repro.report.views import describe_origin

    names = ("id", "kind", "suite", "name", "key", "evidence", "outcome", "written", "protocol")
    row = {name: getattr(record, name, None) for name in names}
    return {**row, "judged": of_today(record), **describe_origin(record.provenance)}


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)


def simulated_step(model: str, system: str, **layout: Any) -> dict[str, float | str]:
    """Simulate one training step of `model` on `system`; return its metrics and `outcome` (`ok` or `oom`) by name.

    `layout`: fields of `repro.Layout`, such as `dp=64, zero=2, micro_batch=8, precision="fp16"`. Raises `ConfigError`
    if the layout cannot be simulated.
    """
    from repro.launch.simulated import simulate_experiment

    known = models.load_model(model)
    keys: dict[str, Any] = {"layout": Layout(**layout), "training": Training(seq=known.seq), "system": system}
    experiment = Experiment(name="what-if", model=known, **keys)
    record = simulate_experiment(experiment, load_system(system), "notebook")
    require(record.outcome in ("ok", "oom"), "layout", layout, says=f"cannot be simulated: {record.reason}")
    return {"outcome": record.outcome, **shown(record.metrics, record.outcome)}
