"""The page: one self-contained file, the same verdicts as the judge, every claim and record reachable."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from repro import __version__
from repro.claims.judge import judge
from repro.claims.table import table
from repro.config import ConfigError
from repro.report.evidence import JudgedStore
from repro.report.figures import model_states
from repro.report.figures.style import GRID, INK, MUTED, adapt_to_page
from repro.report.page.build import Report, build_report
from repro.report.page.build import print_report as command

VOID = {"meta", "link", "input", "br", "path", "use", "rect", "circle", "image", "col", "hr", "img"}


class Page(HTMLParser):
    """Tags, ids, links and whether every tag is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.rows: list[dict[str, str | None]] = []
        self.values: list[tuple[str, str]] = []
        """Kind and number of every piece of evidence, in the page's order."""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "a":
            self.links.append(str(values.get("href")))
        if tag in ("script", "img", "link", "iframe", "image"):
            self.sources.append(str(values.get("src") or values.get("href") or ""))
        if tag == "details" and values.get("class") == "claim":
            self.rows.append(values)
        if values.get("class") == "finding":
            self.values.append((str(values["data-kind"]), str(values["data-value"])))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.append(str(values["id"]))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def text(built: Path) -> str:
    return (built / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_is_well_formed_with_unique_ids_and_links_that_lead_somewhere(page: Page, built: Path) -> None:
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        if link.startswith("#"):
            # Experiments that were never run have no line to lead to; the link still names them.
            assert link[1:] in page.ids or link.startswith(("#run-", "#sim-")), link
        else:
            assert (built / link).is_file(), link


def test_needs_nothing_but_itself(text: str, page: Page) -> None:
    assert all(not source or source.startswith("data:") for source in page.sources)
    assert not re.search(r"url\((?!#|['\"]?#)", text)
    assert "@import" not in text


def test_says_what_the_judge_says(page: Page, text: str, found: JudgedStore) -> None:
    judged = judge(found.ledger, found.records, found.references)
    assert [row["data-verdict"] for row in page.rows] == [result.verdict for result in judged]
    for line in table(judged):
        assert f'id="claim-{line.id}"' in text


def test_measured_evidence_of_the_store_is_judged(text: str) -> None:
    details = text[text.index('id="claim-zero-mem-formula-stages"') :]
    assert "scaled twin" in details[: details.index("</details>")]


def test_reference_records_are_marked_with_machine_and_day(text: str) -> None:
    details = text[text.index('id="claim-zero-ddp-oom-limit"') :]
    assert "one rank of 64, as measured on NVIDIA H200, 2026-" in details[: details.index("</details>")]
    assert "come from reference records of this package" in text


def test_the_footer_says_which_program_wrote_it(text: str) -> None:
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout[:9]
    footer = text[text.index("<footer>") :]
    assert f"of repro {__version__}{' at ' if commit else ''}{commit}" in footer


def test_reasons_are_escaped(text: str) -> None:
    assert "step 1 &lt;not enough&gt;" in text
    assert "<not enough>" not in text


def test_failures_and_missing_intervals_are_said(text: str) -> None:
    assert "without a conclusive result: smoke/fp16-z2-dp2 (hang)" in text
    assert "no interval" in text


def test_every_figure_is_in_the_page_and_beside_it(text: str, built: Path) -> None:
    for name in ("states", "communication", "loss", "comparison", "peak"):
        assert f'id="figure-{name}"' in text
        assert (built / "figures" / f"{name}.svg").read_text().startswith("<svg")
        assert (built / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_figures_take_ink_and_paper_from_the_page(text: str) -> None:
    """Before, they were white cards where the page is dark.  Where it is light, both are those of the files."""
    light = dict(
        re.findall(r"--([a-z]+): (#[0-9a-f]{6})", text[: text.index("@media (prefers-color-scheme: dark)")])
    )
    assert [light[name] for name in ("ink", "muted", "line", "page")] == [INK, MUTED, GRID, "#ffffff"]
    pictures = re.findall(r'<div class="picture".*?</svg>', text, re.DOTALL)
    assert len(pictures) >= 5
    for picture in pictures:
        assert "fill: var(--page)" in picture
        assert 'fill: var(--ink)" x=' in picture, "letters"
        assert not {INK, MUTED, GRID}.intersection(re.findall("#[0-9a-f]{6}", picture))


def test_letters_in_a_coloured_field_stay_as_they_are() -> None:
    assert adapt_to_page('<text style="fill: #ffffff"><use style="fill: #ffffff">') == (
        '<text style="fill: #ffffff"><use style="fill: var(--page)">'
    )


def test_json_is_one_document(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("repro.report.page.build.build_report", lambda *of, **options: report)
    assert command(Path("results"), Path("out"), json=True, notebooks=False) == 0
    document = json.loads(capsys.readouterr().out)
    assert Path(document["page"]).is_file()
    assert sum(document["verdicts"].values()) == document["claims"] > 0
    assert len(document["figures"]) >= 10


def test_empty_store_gives_the_ledger_and_says_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "repro.report.figures.draw_all", lambda measured, *of: [model_states.draw_measured_states(measured)]
    )
    (tmp_path / "out" / "figures").mkdir(parents=True)
    stale = tmp_path / "out" / "figures" / "states.svg"
    stale.touch()
    assert command(tmp_path / "results", tmp_path / "out", json=False, notebooks=False) == 0
    text = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert Page(text).rows
    assert "repro run suites/smoke.toml --only &#39;states-*&#39;" in text
    assert "no records in" in capsys.readouterr().out
    assert not stale.exists()
    assert not (tmp_path / "results").exists()


@pytest.mark.usefixtures("without_figures")
def test_torn_lines_and_other_protocols_are_said(synthetic_results: Path, tmp_path: Path) -> None:
    shutil.copytree(synthetic_results, tmp_path / "results")
    file = next((tmp_path / "results" / "records").glob("*.jsonl"))
    lines = file.read_text().splitlines(keepends=True)
    old = json.loads(lines[0]) | {"protocol": -1, "name": "from-another-time"}
    file.write_text(json.dumps(old) + "\n" + "".join(lines[1:]) + '{"torn')
    report = build_report(tmp_path / "results", tmp_path / "out")
    assert any("torn record" in remark for remark in report.remarks)
    assert any("another measurement protocol" in remark for remark in report.remarks)
    assert "from-another-time" not in report.page.read_text(encoding="utf-8")


def test_out_that_is_a_file_is_one_clear_error(synthetic_results: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"out = '.*file'"):
        build_report(synthetic_results, tmp_path / "file")
