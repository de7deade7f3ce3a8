"""Tests of README, CONTRIBUTING and docs: links and named files exist, and lists and reference pages are complete."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from repro import __version__
from repro.claims.ledger import ClaimEntry
from repro.config import Layout, Model
from repro.config.errors import ConfigError
from repro.config.files import build_dataclass
from repro.config.links import Link
from tests.test_text import PAGES, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:repro|kernels|suites|slurm|reports|tests|docs)/[\w./*-]*)`")
PLACEHOLDER = re.compile(r"NAME|NN")
ABSENT = ("reports/out/", "reports/artifact.md", "slurm/mine.toml", "repro/kernels")
"""Files that commands create, a file of the user, and a folder of the user's cache."""


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def targets(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    yield from (link for link in LINK.findall(text) if not link.startswith("http"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_have_existing_targets(page: Path) -> None:
    missing = []
    for link in targets(page):
        name, _, anchor = link.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(link)
    assert not missing
    text = page.read_text(encoding="utf-8")
    named = [name for name in FILE.findall(text) if not (name.startswith(ABSENT) or PLACEHOLDER.search(name))]
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


def test_the_citation_names_the_current_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [__version__]
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_suite_is_in_a_table_of_the_docs() -> None:
    tables = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("suites.md", "twins.md"))
    assert [f.stem for f in (ROOT / "suites").glob("*.toml") if f"\n| `{f.stem}` |" not in tables] == []


@pytest.mark.parametrize("name", ["command", "key"])
def test_reference_pages_equal_their_generators(name: str) -> None:
    page = (ROOT / "docs" / f"{name}s.md").read_text(encoding="utf-8")
    module = importlib.import_module(f"tests.{name}_reference")
    assert page == module.reference(), "run `make artifact`"


def test_the_reference_lists_every_key_of_a_file() -> None:
    """The error about an unknown key lists all known keys."""
    page = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    for cls in (Layout, Model, Link, ClaimEntry):
        with pytest.raises(ConfigError, match="known are") as caught:
            build_dataclass(cls, {"qqqqqqqq": 1})
        known = str(caught.value).partition("known are ")[2].split(", ")
        assert len(known) > 10
        assert [key for key in known if f"\n| `{key}` |" not in page] == []


@pytest.mark.parametrize(
    ("listing", "pattern"),
    [
        ("README.md", r"\(docs/([\w-]+\.md)\)"),
        ("docs/index.md", r"\(([\w-]+\.md)\)"),
        ("mkdocs.yml", r" ([\w-]+\.md)$"),
    ],
)
def test_lists_of_pages_have_every_page_once(listing: str, pattern: str) -> None:
    """README, the index page and the navigation of the site list all pages except `index.md`."""
    text = (ROOT / listing).read_text(encoding="utf-8").rpartition("## Documentation\n")[2]
    listed = re.findall(pattern, text, re.MULTILINE)
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(name for name in listed if name != "index.md") == sorted(pages)


def test_pages_of_the_site_link_only_to_its_pages() -> None:
    """`build/docs` has no other file of the repository."""
    links = [(page.name, link) for page in (ROOT / "docs").glob("*.md") for link in targets(page)]
    assert [(page, link) for page, link in links if "/" in link] == []
