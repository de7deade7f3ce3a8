"""Tests of reading ledger files: errors name file, claim, key, value and the accepted values in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from repro.claims.ledger import TRACE, Ledger
from repro.claims.reader import check_shared_documents, load_ledger
from repro.config import ConfigError
from tests import committed
from tests.claims.constructed_records import SOURCE as HEAD

CLAIM = """
[[claim]]
id = "a-claim"
title = "Two is two"
family = "memory"
published = "2"
source = ["PAPER p.1"]
certainty = "confirmed"
unit = "GB"
"""
ROW = 'rows = [{ label = "x", published = "2", analytic = "2 * GB" }]\n'


def read(folder: Path, text: str) -> Ledger:
    (folder / "test.toml").write_text(text)
    return load_ledger(folder)


VALID = HEAD + CLAIM + ROW
TABLE = """[[claim.table]]
keys = ["a"]
columns = ["a", "b"]
cells = [{ column = "b" }]
body = [["x", "1"]]
"""
MEASURED = """measured = { scale = "scaled twin", value = "2" }, metric = "memory" }"""
ANALYTIC = 'analytic = "2 * GB" }'
THREE_ROWS = """rows = [
{ label = "x", published = "2", main = true }, { label = "y", published = "3" }, { label = "z", published = "4" }]
"""
DATE = 'predicted_blind = "2026-11-22 at 1c75963"\n'
BLIND = """blind = "2.1", simulated = { value = 'metric("s/e", "m")' }"""

MISTAKES: dict[str, tuple[str, ...]] = {
    # A part of the valid file, its replacement, and the parts that the error must contain.
    "unknown key in a file": ('title = "Test"', 'titel = "Test"', "titel", "did you mean title?"),
    "no title": ('title = "Test"', "", "title", "is missing: add title"),
    "no claims": (CLAIM + ROW, "", "files of published claims"),
    "not TOML": ("[[claim]]", "[[claim", "not TOML"),
    "unknown key": ("certainty", "certanty", "a-claim", "certanty", "did you mean certainty?"),
    "unknown key in a row": ("analytic", "analitic", "a-claim.rows[x]", "did you mean analytic?"),
    "missing id": ('id = "a-claim"', "", "id", "is missing"),
    "bad id": ("a-claim", "A claim", "id = 'A claim'", "hyphens"),
    "same id": (CLAIM + ROW, 2 * (CLAIM + ROW), "a-claim", "used once", "has another claim with this id"),
    "wrong type": ('published = "2"\n', "published = 2\n", "a-claim", "published = 2", "string"),
    "wrong type in a row": ('published = "2",', "published = 2,", "rows[x].published = 2", "string"),
    "row not a table": (ROW, "rows = [1]\n", "a-claim.rows[0] = 1", "a table"),
    "no rows": (ROW, "", "a-claim.rows", "at least one row"),
    "few main rows": (CLAIM + ROW, CLAIM.replace('"2"', '"2; 3; 4"') + THREE_ROWS, "true in 3 or more rows"),
    "same label twice": ("}]", '}, { label = "x", published = "3" }]', "label = 'x'", "different"),
    "unknown family": ('"memory"', '"memoir"', "family = 'memoir'", "did you mean memory?"),
    "unknown certainty": ('"confirmed"', '"sure"', "certainty = 'sure'", "one of"),
    "unknown source": ("PAPER p.1", "PAPERS p.1", "source = 'PAPERS'", "did you mean PAPER?"),
    "no source": ('["PAPER p.1"]', "[]", "source = []", "at least one"),
    "unknown unit": ('"GB"', '"furlong"', "unit = 'furlong'", "one of"),
    "unknown metric": ("label", 'metric = "speed", label', "metric = 'speed'", "one of"),
    "unknown bound": ("label", 'bound = "roughly", label', "bound = 'roughly'", "one of"),
    "negative error": ("label", "error = -1, label", "error = -1", "0 or more"),
    "calibrates nothing": ("label", 'calibrates = "a name", label', "calibrates = 'a name'", "simulated"),
    "undated prediction": ("label", f"{BLIND}, label", "predicted_blind = ''", "2026-11-22 at 1c75963"),
    "only a date": ('unit = "GB"', f'unit = "GB"\n{DATE}', "predicted_blind", "empty without `blind`"),
    "prediction without a simulation": ("label", 'blind = "2", label', "blind = '2'", "simulated"),
    "unknown formula": ("2 * GB", "max_parms(1)", "rows[x].analytic", "did you mean max_params?"),
    "not arithmetic": ("2 * GB", "().__class__", "rows[x].analytic", "is not arithmetic"),
    "record in a closed form": ("2 * GB", "metric('a/b', 'c')", "unknown function metric"),
    "text for a number": ('published = "2",', 'published = "two",', "published = 'two'", "a number"),
    "share in GB": ("label", 'metric = "share", label', "unit = 'GB'", "% with metric share, whose toler"),
    "limit without steps": ("label", 'metric = "limit", label', "steps", "is missing"),
    "unknown scale": (ANALYTIC, MEASURED.replace("scaled twin", "half"), "scale = 'half'", "twin"),
    "twin without expect": (ANALYTIC, MEASURED, "rows[x].expect", "the scale of the scaled-down twin"),
    "short table line": (ROW, TABLE.replace('"x", ', ""), "table.body", "2 values"),
    "unknown column": (ROW, TABLE.replace('column = "b"', 'column = "c"'), "table.columns = 'c'"),
    "published number not in quotes": (ROW, TABLE.replace('"1"', "1"), "b = 1", "in quotes"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_error_of_a_mistake_is_one_line(tmp_path: Path, mistake: str) -> None:
    before, after, *parts = MISTAKES[mistake]
    text = VALID.replace(before, after)
    assert text != VALID
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert "\n" not in str(error.value)
    for part in (str(tmp_path), *parts):
        assert part in str(error.value)


def test_claim_shows_the_median_error_of_its_blind_predictions(tmp_path: Path) -> None:
    """The errors are -10 %, +20 % and +30 %."""
    blind = """{{ label = "{0}", published = "2", blind = "{0}", simulated = {{ value = 'metric("s/e", "m")' }} }}, """
    rows = "".join(map(blind.format, ("1.8", "2.4", "2.6"))) + "{ label"
    ledger = read(tmp_path, HEAD + CLAIM + DATE + ROW.replace("{ label", rows))
    assert ledger.claims[0].prediction == (
        "3 predictions made before their published values were read (2026-11-22 at 1c75963), median error 20.0%"
    )
    assert not read(tmp_path, VALID).claims[0].prediction


def test_table_notes_apply_to_a_line_or_one_value(tmp_path: Path) -> None:
    table = TABLE.replace('"b"]', '"b", "c", "note", "c note"]').replace('"b" }]', '"b" }, { column = "c" }]')
    ledger = read(tmp_path, HEAD + CLAIM + table.replace('"1"]', '"1", "2", "both", "only c"]'))
    notes = {row.label: row.note for row in ledger.claims[0].rows}
    assert notes == {"x: b": "both", "x: c": "both only c"}


def test_row_unit_replaces_the_unit_of_its_claim(tmp_path: Path) -> None:
    """The integer 1 is accepted as the floating-point number of a key."""
    for key, unit in (("", "GB"), ('unit = "", ', ""), ('unit = "s", ', "s")):
        (row,) = read(tmp_path, VALID.replace("label", f"error = 1, {key}label")).claims[0].rows
        assert (row.unit, row.error) == (unit, 1.0)


def test_tested_row_and_system_must_not_share_a_document() -> None:
    """A system constant from the document of a claim would make the test of this claim circular."""
    claim = committed.ledger().claim("ds-zero1-doc-1p5b-8gpu")
    row = next(row for row in claim.rows if "reserved" in row.label)
    assert row.given
    traces = tuple(dataclasses.replace(one, origin=TRACE) for one in row.evidence)
    claim = dataclasses.replace(claim, rows=(dataclasses.replace(row, evidence=traces),))
    check_shared_documents([claim], ["another.png"])
    same = 'source = "DeepSpeed 38327e07 docs/assets/images/oom_dp8_1.5B_log.png"'
    with pytest.raises(ConfigError, match="takes a number from oom_dp8"):
        check_shared_documents([claim], [same])
