"""Tests of the site: small pages without network access, the judge's verdicts, links to every claim and record.

With REPRO_SITE=DIR the tests of every page read the site in DIR, for example the site of `make smoke`.
"""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from repro import __version__
from repro.claims.headlines import headline_lines
from repro.claims.judge import judge
from repro.claims.other_system import Answer, load_questions
from repro.report.evidence import JudgedStore
from repro.report.figures import zero_stages
from repro.report.figures.style import DARK_THEME, GRID, INK, MUTED
from repro.report.page.build import Report
from repro.report.page.build import print_report as command
from repro.report.page.context import SOURCE_FIGURES, template
from tests import committed

VOID = {"meta", "link", "input", "br", "path", "use", "rect", "circle", "image", "col", "hr", "img", "wbr"}
MAX_BYTES, MAX_NODES = 1_000_000, 5_000
"""Limits of a page, including the data that it loads."""


class Page(HTMLParser):
    """Parser that collects the ids, links and rows of a page and checks that every tag is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.nodes = 0
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.rows: list[dict[str, str | None]] = []
        self.values: list[tuple[str, str]] = []
        """Kind and value of every piece of evidence, in the order of the page."""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.nodes += 1
        if tag not in VOID:
            self.open.append(tag)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag == "a":
            self.links.append(str(values.get("href")))
        if tag in ("script", "img", "link", "iframe", "image"):
            self.sources.append(str(values.get("src") or values.get("href") or ""))
        if tag == "tr" and "data-verdict" in values:
            self.rows.append(values)
        if values.get("class") == "finding":
            self.values.append((str(values["data-kind"]), str(values["data-value"])))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def read_site(folder: Path) -> dict[str, str]:
    """Return the texts of a site's files by path, without its figures and notebooks."""
    paths = [*folder.glob("*.*"), *folder.glob("claims/*.html")]
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in paths}


def parse_pages(site: dict[str, str]) -> dict[str, Page]:
    return {path: Page(text) for path, text in site.items() if path.endswith(".html")}


def stored_rows(script: str) -> list[dict[str, Any]]:
    """Return the rows of the table of experiments from the text of `records.js`."""
    found = json.loads(script.removeprefix("const STORE = ").strip().removesuffix(";"))
    rows = [dict(zip(found["keys"], row, strict=True)) for row in found["rows"]]
    for row in rows:
        row["facts"] = dict(zip(found["labels"][row["evidence"]], row["facts"], strict=True))
    return rows


def oversized_pages(site: dict[str, str]) -> Iterator[str]:
    """Yield the pages of a site that exceed the limits; `site`: texts by path."""
    data = len(site["records.js"].encode())
    for path, text in site.items():
        if path.endswith(".html"):
            size = len(text.encode()) + data * (path == "experiments.html")
            if size >= MAX_BYTES or Page(text).nodes >= MAX_NODES:
                yield f"{path}: {size} bytes, {Page(text).nodes} nodes"


@pytest.fixture(scope="module")
def site(site_dir: Path) -> dict[str, str]:
    return read_site(site_dir)


@pytest.fixture(scope="module")
def pages(site: dict[str, str]) -> dict[str, Page]:
    return parse_pages(site)


def test_every_page_is_small_and_complete_with_valid_links(site_dir: Path) -> None:
    """Every tag is closed, every page is two links from the first, and the site needs no other files."""
    folder = Path(os.environ.get("REPRO_SITE") or site_dir)
    site = read_site(folder)
    pages = parse_pages(site)
    assert len(site) > 100
    assert list(oversized_pages(site)) == []
    anchors = {path: set(page.ids) for path, page in pages.items()}
    anchors["experiments.html"] |= {row["anchor"] for row in stored_rows(site["records.js"])}
    for path, page in pages.items():
        assert page.open == [], path
        assert len(page.ids) == len(set(page.ids)), path
        for link in page.links:
            name, _, part = unquote(link).partition("#")
            target = os.path.normpath(Path(path).parent / name) if name else path
            assert (folder / target).is_file(), (path, link)
            if part and part.partition("=")[0] not in ("verdict", "machine"):  # filters
                assert part in anchors[target], (path, link)
        for source in page.sources:
            assert source.startswith("data:") or ((folder / path).parent / source).is_file(), (path, source)
    assert not re.search(r"url\(|@import", site["style.css"])
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import ", site["site.js"])
    reached = {"index.html"}
    for _ in range(2):
        links = [(path, link.partition("#")[0]) for path in reached for link in pages[path].links]
        reached |= {os.path.normpath(Path(path).parent / link) for path, link in links} & set(pages)
    assert reached == set(pages)


def test_pages_have_the_judges_verdicts(
    site: dict[str, str], pages: dict[str, Page], store: JudgedStore
) -> None:
    judged = judge(store.ledger, store.records, store.references)
    wanted = sorted((f"claim-{result.claim.id}", result.verdict) for result in judged)
    by_source = [row for path, page in pages.items() if path.startswith("source-") for row in page.rows]
    for rows in (pages["claims.html"].rows, by_source):
        assert sorted((str(row["id"]), row["data-verdict"]) for row in rows) == wanted
    for result in judged:
        page = site[f"claims/{result.claim.id}.html"]
        assert f" {result.verdict}</span>" in page[page.index("<h1>") : page.index("<main>")]
    assert "scaled twin" in site["claims/zero-mem-formula-stages.html"], "the measurements are judged"


def test_headline_claims_and_sources_are_in_order(
    site: dict[str, str], pages: dict[str, Page], store: JudgedStore
) -> None:
    """Headline claims come first in all lists; sources are in the order of publication."""
    text, lines = site["index.html"], headline_lines(store.ledger, store.judged)
    table = text[text.index('class="stack cards headlines"') : text.index("</table>")]
    assert re.findall(r'href="claims/(.*?).html"', table) == [line.claim for line in lines]
    assert re.findall(r"badge [^>]*>. (.*?)</span>", table) == [line.verdict for line in lines]
    published = map(html.unescape, re.findall(r'"Published">(.*?)</td>', table))
    assert list(published) == [line.published for line in lines]
    first = list(dict.fromkeys(f"claim-{line.claim}" for line in lines))
    assert [row["id"] for row in pages["claims.html"].rows][: len(first)] == first
    sources = ["megatron-2019", "zero", "deepspeed-feb2020", "turing-nlg", "megatron-2021", "yuan", "beyond"]
    assert re.findall(r'href="source-(.*?).html"', text[: text.index("</nav>")]) == sources
    assert sources == list(SOURCE_FIGURES)


def test_records_and_claims_link_to_each_other(site: dict[str, str], pages: dict[str, Page]) -> None:
    rows = stored_rows(site["records.js"])
    forth = {(row["anchor"], claim) for row in rows for claim in row["claims"]}
    links = [
        (path, link) for path, page in pages.items() for link in page.links if path.startswith("claims/")
    ]
    back = {
        (unquote(link).partition("#")[2], Path(path).stem)
        for path, link in links
        if "experiments.html#" in link
    }
    assert forth == back != set()


def test_texts_name_reference_records_failures_and_the_program(site: dict[str, str]) -> None:
    """The reason of a failure is data, which `site.js` inserts as text nodes, never as HTML."""
    measured = "as measured on NVIDIA H200, 2026-"
    assert f"one rank of 64, {measured}" in site["claims/zero-ddp-oom-limit.html"]
    assert "come from reference records of this package" in site["index.html"]
    devices = site["machines.html"].partition('id="devices"')[2]
    assert measured in devices.partition('href="claims/zero-ddp-oom-limit.html"')[0]
    assert "without a conclusive result: smoke/fp16-z2-dp2 (hang)" in site["index.html"]
    assert "no interval" in site["experiments.html"]
    assert "step 1 <not enough>" in site["records.js"]
    assert "innerHTML" not in site["site.js"]
    rev_parse = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(rev_parse, capture_output=True, text=True, check=False).stdout[:9]
    footer = site["index.html"].partition("<footer>")[2]
    assert f"of repro {__version__}{' at ' if commit else ''}{commit}" in footer


def test_every_figure_is_on_one_page_with_its_files(
    site: dict[str, str], pages: dict[str, Page], site_dir: Path, report: Report
) -> None:
    shown = [one for page in pages.values() for one in page.ids if one.startswith("figure-")]
    assert len(shown) == len(set(shown))
    names = [*(path.stem for path in report.figures), *" ".join(SOURCE_FIGURES.values()).split()]
    assert {f"figure-{name}" for name in names} <= set(shown)
    for name in ("states", "communication", "loss", "peak"):
        assert (f'<img src="figures/{name}.svg" alt=' in site["source-zero.html"]) == (name != "loss")
        assert (site_dir / "figures" / f"{name}.svg").read_text().startswith("<svg")
        assert (site_dir / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_figures_have_colours_for_light_and_dark_pages(site: dict[str, str], site_dir: Path) -> None:
    """Each SVG has the colours of the light page and style rules for the dark page."""
    themes = re.findall(r"--([a-z]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", site["style.css"])
    light, dark = ({name: colours[place] for name, *colours in themes} for place in (0, 1))
    names = ("ink", "muted", "line", "page")
    assert [light[name] for name in names] == [INK, MUTED, GRID, "#ffffff"] == list(DARK_THEME)
    assert [dark[name] for name in names] == list(DARK_THEME.values())
    for path in (site_dir / "figures").glob("*.svg"):
        rule = r"<style>@media screen and \(prefers-color-scheme: dark\) (.*?)</style>"
        (rules,) = re.findall(rule, path.read_text())
        for before, after in DARK_THEME.items():
            assert f'[style*="fill: {before}"], [fill="{before}"]) {{ fill: {after} !important }}' in rules
        assert ':not(text):is([style*="fill: #ffffff"]' in rules, "white letters are on coloured areas"


def test_json_is_one_document(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("repro.report.page.build.build_report", lambda *of, **options: report)
    assert command(Path("results"), Path("out"), json=True, notebooks=False) == 0
    document = json.loads(capsys.readouterr().out)
    assert Path(document["page"]).is_file()
    assert sum(document["verdicts"].values()) == document["claims"] > 0
    assert len(document["figures"]) >= 10


def test_empty_store_gives_the_ledger_and_commands_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = zero_stages.draw_measured_states
    monkeypatch.setattr("repro.report.figures.draw_all", lambda measured, *of: [draw(measured)])
    (tmp_path / "out" / "figures").mkdir(parents=True)
    stale = tmp_path / "out" / "figures" / "states.svg"
    stale.touch()
    assert command(tmp_path / "results", tmp_path / "out", json=False, notebooks=False) == 0
    site = read_site(tmp_path / "out")
    assert 'class="stack cards headlines"' in site["index.html"]
    assert Page(site["claims.html"]).rows
    assert "repro run suites/smoke.toml --only &#39;states-*&#39;" in site["source-zero.html"]
    assert "no records in" in capsys.readouterr().out
    assert not stale.exists()
    assert not (tmp_path / "results").exists()


def test_section_on_other_systems_has_published_values_and_predictions() -> None:
    asked = load_questions(committed.ledger()).asked
    words = {"word": "a smaller gain (or as published)", "rests_on": "published point"}
    gain = Answer(question=asked[0], value=1.5, low=1.25, high=4.0, **words)
    unanswered = Answer(question=asked[1], lacks="1.5b-dp: the step does not fit in memory")

    def section(*systems: str) -> str:
        again = {system: [gain, unanswered] for system in systems}
        return template("again.html").render(again=again, ledger=committed.ledger())

    text = section("dgx-h100", "dgx-h200")
    basis = 'title="rests on: published point"'
    predictions = ("<b>1.5x [1.25, 4]</b>", words["word"], basis, unanswered.lacks)
    assert [text.count(prediction) for prediction in predictions] == [2, 2, 2, 2]
    for expected in ("Predicted on dgx-h200", "<td>3.75x</td>", "claims/ds-3p75x-lowbw.html", "no verdicts"):
        assert expected in text
    assert section().strip() == "", "the store has no simulations"
