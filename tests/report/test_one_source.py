"""Tests that the page, the data frames of notebooks, `repro claims --json` and the exports have the same numbers."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from repro import cli
from repro.claims.reader import load_ledger
from repro.report.evidence import KINDS, JudgedStore
from repro.report.views import experiments_of
from repro.results.schema import Record
from tests.records import made_up
from tests.report.synthetic import experiment
from tests.report.test_page import parse_pages, read_site


def output_of(*command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main([*command]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def claims(synthetic_results: Path) -> list[dict[str, Any]]:
    """Return the claims of `repro claims --json`."""
    document = json.loads(output_of("claims", "--json", "--results", str(synthetic_results)))
    return list(document["claims"])


def rows(claims: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for claim in claims for row in claim["rows"]]


def finding_of(row: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the first piece of evidence of a kind; empty without one."""
    return next((finding for finding in row["evidence"] if finding["kind"] == kind), {})


def as_text(value: Any) -> str:
    return "" if value is None else str(value)


def test_page_has_the_numbers_of_the_claims(claims: list[dict[str, Any]], site_dir: Path) -> None:
    pages = parse_pages(read_site(site_dir))
    values = [value for claim in claims for value in pages[f"claims/{claim['id']}.html"].values]
    findings = [finding for row in rows(claims) for finding in row["evidence"]]
    expected = [(finding["kind"], as_text(finding["value"])) for finding in findings]
    assert values == expected
    assert sum(value != "" for _, value in expected) > 100
    shown = {str(row["id"]).removeprefix("claim-"): row for row in pages["claims.html"].rows}
    assert {id: row["data-verdict"] for id, row in shown.items()} == {
        claim["id"]: claim["verdict"] for claim in claims
    }
    authors = {(str(shown[claim["id"]]["data-source"]), claim["about"]) for claim in claims}
    assert [about for source, about in authors if source == "zero"] == ["ZeRO"]
    assert {source for source, about in authors if about == "Megatron"} == {"megatron-2019", "megatron-2021"}
    assert all(source == "beyond" for source, about in authors if about in ("this suite", "one node of 2023"))


def test_data_frames_have_the_numbers_of_the_claims(claims: list[dict[str, Any]], store: JudgedStore) -> None:
    frame = store.values()
    assert list(frame["verdict"]) == [row["verdict"] for row in rows(claims)]
    assert list(store.claims()["verdict"]) == [claim["verdict"] for claim in claims]
    for (_, line), row in zip(frame.iterrows(), rows(claims), strict=True):
        for kind in KINDS:
            seen = finding_of(row, kind)
            value, low, high = (line[kind], line[f"{kind}_low"], line[f"{kind}_high"])
            if seen.get("value") is None:
                assert pd.isna(value)
            else:
                assert value == seen["value"]
                if not isinstance(value, str):  # a word has no interval
                    assert (low, high) == (seen["low"], seen["high"])
    assert list(store.table()["verdict"]) == list(frame["verdict"])
    tidy = store.tidy()
    numbers = [value for value in frame["analytic"].dropna() if isinstance(value, int | float)]
    assert list(tidy.loc[tidy["kind"] == "analytic", "amount"]) == numbers


def test_exports_match_the_claims(claims: list[dict[str, Any]], synthetic_results: Path) -> None:
    command = ["export", "--table", "values", "--format", "csv", "--results", str(synthetic_results)]
    exported = pd.read_csv(io.StringIO(output_of(*command)), keep_default_na=False, dtype=str)
    labels = [(claim["id"], row["label"], row["verdict"]) for claim in claims for row in claim["rows"]]
    assert list(exported[["claim", "value", "verdict"]].itertuples(index=False, name=None)) == labels
    for (_, line), row in zip(exported.iterrows(), rows(claims), strict=True):
        for kind in KINDS:
            value = finding_of(row, kind).get("value")
            is_number = isinstance(value, int | float)
            same = float(line[kind]) == value if is_number else line[kind] == as_text(value)
            assert same, (line["claim"], line["value"], kind)


def test_summary_counts_the_verdicts_of_the_claims(claims: list[dict[str, Any]], store: JudgedStore) -> None:
    frame = store.summary().set_index("about")
    assert frame.loc["all", "claims"] == len(claims) == frame["claims"].iloc[:-1].sum()
    for about, line in frame.iloc[:-1].iterrows():
        verdicts = [claim["verdict"] for claim in claims if claim["about"] == about]
        assert line["reproduced"] == verdicts.count("reproduced")
        assert line["not run"] == verdicts.count("not run")


@pytest.mark.parametrize(
    ("kind", "outcome", "left"),
    [
        *(("simulated", "error", True), ("simulated", "oom", False)),
        *(("emulated", "hang", True), ("emulated", "ok", False)),
        *(("measured", "error", True), ("measured", "ok", False), ("measured", "oom", False)),
    ],
)
def test_failed_experiments_remain_to_be_run(tmp_path: Path, kind: str, outcome: str, left: bool) -> None:
    """The record of a run on an emulated network has measured evidence."""
    ledger = load_ledger()
    claim = next(claim for claim in ledger.claims if kind in dict(experiments_of(claim.rows)))
    ledger = replace(ledger, claims=(claim,))
    all_commands = JudgedStore(tmp_path, [], [], ledger).to_run(claim.id)
    assert all_commands
    records: list[Record] = []
    for read_as, at in experiments_of(claim.rows):
        suite, _, name = at.partition("/")
        stored = "simulated" if read_as == "simulated" else "measured"
        conditions = experiment(name).as_dict()
        records.append(made_up(name, suite=suite, evidence=stored, outcome=outcome, experiment=conditions))
    assert JudgedStore(tmp_path, records, [], ledger).to_run(claim.id) == all_commands * left
