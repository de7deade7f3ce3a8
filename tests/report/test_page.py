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
from repro.config import ConfigError
from repro.report.evidence import JudgedStore
from repro.report.figures import zero_stages
from repro.report.figures.style import DARK_THEME, GRID, INK, MUTED
from repro.report.page.build import Report, build_report
from repro.report.page.build import print_report as command
from repro.report.page.context import SOURCE_FIGURES

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


def read_pages(folder: Path) -> dict[str, Page]:
    """Return the pages of a site by path, without its notebooks."""
    paths = [*folder.glob("*.html"), *folder.glob("claims/*.html")]
    return {str(path.relative_to(folder)): Page(path.read_text(encoding="utf-8")) for path in paths}


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
def folder(site_dir: Path) -> Path:
    return Path(os.environ.get("REPRO_SITE") or site_dir)


@pytest.fixture(scope="module")
def pages(folder: Path) -> dict[str, Page]:
    return read_pages(folder)


@pytest.fixture(scope="module")
def text(site_dir: Path) -> str:
    return (site_dir / "index.html").read_text(encoding="utf-8")


def test_every_page_has_closed_tags_and_valid_links(pages: dict[str, Page], folder: Path) -> None:
    records = {row["anchor"] for row in stored_rows((folder / "records.js").read_text(encoding="utf-8"))}
    filters = ("verdict", "machine")
    for path, page in pages.items():
        assert page.open == [], path
        assert len(page.ids) == len(set(page.ids)), path
        for link in page.links:
            name, _, part = unquote(link).partition("#")
            target = ((folder / path).parent / name).resolve() if name else folder / path
            assert target.is_file(), (path, link)
            if part and part.partition("=")[0] not in filters:
                known = pages[str(target.relative_to(folder.resolve() if name else folder))].ids
                assert part in known or (target.name == "experiments.html" and part in records), (path, link)


def test_every_page_is_two_links_from_the_first(pages: dict[str, Page], folder: Path) -> None:
    reached = {"index.html"}
    for _ in range(2):
        found = [
            ((folder / path).parent / link.partition("#")[0])
            for path in reached
            for link in pages[path].links
        ]
        reached |= {os.path.relpath(target, folder) for target in found} & set(pages)
    assert reached == set(pages)


def test_every_page_needs_only_files_of_the_site(pages: dict[str, Page], folder: Path) -> None:
    for path, page in pages.items():
        for source in page.sources:
            assert source.startswith("data:") or ((folder / path).parent / source).is_file(), (path, source)
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("style.css", "site.js"))
    assert "url(" not in style
    assert "@import" not in style
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import ", script)


def test_every_page_is_below_the_size_limits(folder: Path) -> None:
    paths = [*folder.glob("*.*"), *folder.glob("claims/*.html")]
    site = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in paths}
    assert len(site) > 100
    assert list(oversized_pages(site)) == []


def test_pages_have_the_judges_verdicts(pages: dict[str, Page], site_dir: Path, store: JudgedStore) -> None:
    judged = judge(store.ledger, store.records, store.references)
    wanted = {f"claim-{result.claim.id}": result.verdict for result in judged}
    site = read_pages(site_dir)
    rows = site["claims.html"].rows
    assert {row["id"]: row["data-verdict"] for row in rows} == wanted
    assert len(rows) == len(judged)
    lists = [row for path, page in site.items() if path.startswith("source-") for row in page.rows]
    assert {row["id"]: row["data-verdict"] for row in lists} == wanted
    assert len(lists) == len(judged)
    for result in judged:
        page = (site_dir / "claims" / f"{result.claim.id}.html").read_text(encoding="utf-8")
        assert f" {result.verdict}</span>" in page[page.index("<h1>") : page.index("<main>")]


def test_headline_claims_come_first(text: str, site_dir: Path, store: JudgedStore) -> None:
    lines = headline_lines(store.ledger, store.judged)
    table = text[text.index('class="stack cards headlines"') : text.index("</table>")]
    assert re.findall(r'href="claims/(.*?).html"', table) == [line.claim for line in lines]
    assert re.findall(r"badge [^>]*>. (.*?)</span>", table) == [line.verdict for line in lines]
    published = map(html.unescape, re.findall(r'"Published">(.*?)</td>', table))
    assert list(published) == [line.published for line in lines]
    first = list(dict.fromkeys(line.claim for line in lines))
    rows = Page((site_dir / "claims.html").read_text(encoding="utf-8")).rows
    assert [str(row["id"]).removeprefix("claim-") for row in rows][: len(first)] == first


def test_sources_are_in_the_order_of_publication(text: str) -> None:
    named = re.findall(r'href="source-(.*?).html"', text[: text.index("</nav>")])
    assert named == [
        *("megatron-2019", "zero", "deepspeed-feb2020", "turing-nlg", "megatron-2021", "yuan", "beyond"),
    ]
    assert named == list(SOURCE_FIGURES)


def test_records_and_claims_link_to_each_other(pages: dict[str, Page], site_dir: Path) -> None:
    rows = stored_rows((site_dir / "records.js").read_text(encoding="utf-8"))
    forth = {(row["anchor"], claim) for row in rows for claim in row["claims"]}
    back = {
        (unquote(link).partition("#")[2], Path(path).stem)
        for path, page in read_pages(site_dir).items()
        if path.startswith("claims/")
        for link in page.links
        if "experiments.html#" in link
    }
    assert forth == back != set()


def test_measured_evidence_of_the_store_is_judged(site_dir: Path) -> None:
    assert "scaled twin" in (site_dir / "claims/zero-mem-formula-stages.html").read_text(encoding="utf-8")


def test_reference_records_are_marked_with_device_and_date(text: str, site_dir: Path) -> None:
    details = (site_dir / "claims/zero-ddp-oom-limit.html").read_text(encoding="utf-8")
    assert "one rank of 64, as measured on NVIDIA H200, 2026-" in details
    assert "come from reference records of this package" in text
    devices = (site_dir / "machines.html").read_text(encoding="utf-8").partition('id="devices"')[2]
    assert (
        "as measured on NVIDIA H200, 2026-"
        in devices[: devices.index('href="claims/zero-ddp-oom-limit.html"')]
    )


def test_footer_has_version_and_commit_of_the_program(text: str) -> None:
    rev_parse = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(rev_parse, capture_output=True, text=True, check=False).stdout[:9]
    footer = text[text.index("<footer>") :]
    assert f"of repro {__version__}{' at ' if commit else ''}{commit}" in footer


def test_failure_reasons_are_escaped(site_dir: Path) -> None:
    """`site.js` inserts the data as text nodes, never as HTML."""
    assert "step 1 <not enough>" in (site_dir / "records.js").read_text(encoding="utf-8")
    assert "innerHTML" not in (site_dir / "site.js").read_text(encoding="utf-8")


def test_failures_and_missing_intervals_are_reported(text: str, site_dir: Path) -> None:
    assert "without a conclusive result: smoke/fp16-z2-dp2 (hang)" in text
    assert "no interval" in (site_dir / "experiments.html").read_text(encoding="utf-8")


def test_every_figure_is_on_one_page_with_its_files(
    site_dir: Path, pages: dict[str, Page], report: Report
) -> None:
    shown = [one for page in read_pages(site_dir).values() for one in page.ids if one.startswith("figure-")]
    assert len(shown) == len(set(shown))
    assert {f"figure-{path.stem}" for path in report.figures} <= set(shown)
    assert {f"figure-{name}" for name in " ".join(SOURCE_FIGURES.values()).split()} <= set(shown)
    zero = (site_dir / "source-zero.html").read_text(encoding="utf-8")
    for name in ("states", "communication", "peak"):
        assert f'<img src="figures/{name}.svg" alt=' in zero
    for name in ("states", "communication", "loss", "peak"):
        assert (site_dir / "figures" / f"{name}.svg").read_text().startswith("<svg")
        assert (site_dir / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_figures_have_colours_for_light_and_dark_pages(site_dir: Path) -> None:
    """Each SVG has the colours of the light page and style rules for the dark page."""
    style = (site_dir / "style.css").read_text(encoding="utf-8")
    themes = re.findall(r"--([a-z]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", style)
    light, dark = ({name: colours[place] for name, *colours in themes} for place in (0, 1))
    names = ("ink", "muted", "line", "page")
    assert [light[name] for name in names] == [INK, MUTED, GRID, "#ffffff"] == list(DARK_THEME)
    assert [dark[name] for name in names] == list(DARK_THEME.values())
    for path in (site_dir / "figures").glob("*.svg"):
        rules = re.search(
            r"<style>@media screen and \(prefers-color-scheme: dark\) (.*?)</style>", path.read_text()
        )
        assert rules, path
        for before, after in DARK_THEME.items():
            assert f'[style*="fill: {before}"], [fill="{before}"]) {{ fill: {after} !important }}' in rules[1]
        assert ':not(text):is([style*="fill: #ffffff"]' in rules[1], "white letters are on coloured areas"


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
    monkeypatch.setattr(
        "repro.report.figures.draw_all", lambda measured, *of: [zero_stages.draw_measured_states(measured)]
    )
    (tmp_path / "out" / "figures").mkdir(parents=True)
    stale = tmp_path / "out" / "figures" / "states.svg"
    stale.touch()
    assert command(tmp_path / "results", tmp_path / "out", json=False, notebooks=False) == 0
    text = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert 'class="stack cards headlines"' in text
    assert read_pages(tmp_path / "out")["claims.html"].rows
    zero = (tmp_path / "out" / "source-zero.html").read_text(encoding="utf-8")
    assert "repro run suites/smoke.toml --only &#39;states-*&#39;" in zero
    assert "no records in" in capsys.readouterr().out
    assert not stale.exists()
    assert not (tmp_path / "results").exists()


def test_output_path_of_a_file_is_an_error(synthetic_results: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"out = '.*file'"):
        build_report(synthetic_results, tmp_path / "file")
