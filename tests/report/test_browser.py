"""The page in a real browser: headless Chromium, offline, at the width of a desk and of a phone.

Without Chromium or playwright the tests are skipped; with REPRO_BROWSER=1 they fail then.  With
REPRO_SCREENSHOTS=DIR the pages are saved there as pictures, to be looked at.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from repro.report.evidence import JudgedStore

pytestmark = pytest.mark.slow
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
NAMES = ("chromium", "chromium-browser", "google-chrome")


def missing(what: str) -> NoReturn:
    if os.environ.get("REPRO_BROWSER"):
        pytest.fail(f"REPRO_BROWSER is set, and there is {what}")
    pytest.skip(f"{what}: the page is not tested in a browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("no playwright; it is in the extra test")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        missing(f"no {' or '.join(NAMES)} on the path (Debian: apt-get install chromium)")
    # Where a container has no user namespaces Chromium's sandbox cannot start; the page is our own.
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


class Visit:
    """One page in a fresh offline context, with what it asked for and complained about."""

    def __init__(self, browser: Any, address: str, size: dict[str, int], scheme: str = "light"):
        self.context = browser.new_context(
            viewport=size, color_scheme=scheme, offline=True, is_mobile=False, service_workers="block"
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(90_000)
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(address)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def shown(self) -> list[str]:
        """Ids of the claims that no filter hides."""
        found: list[str] = self.page.eval_on_selector_all(
            "details.claim:not([hidden])", "all => all.map(one => one.id.slice('claim-'.length))"
        )
        return found


@pytest.fixture
def visit(browser: Any, built: Path) -> Iterator[Any]:
    """Opens the synthetic store's page: `visit(size, scheme, anchor)`."""
    visits: list[Visit] = []

    def open_page(size: dict[str, int] = DESK, scheme: str = "light", anchor: str = "") -> Visit:
        visits.append(Visit(browser, (built / "index.html").as_uri() + anchor, size, scheme))
        return visits[-1]

    yield open_page
    for one in visits:
        one.context.close()


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_loads_alone_and_without_complaint(
    visit: Any, size: dict[str, int], scheme: str, built: Path, tmp_path: Path
) -> None:
    seen = visit(size, scheme)
    assert [url for url in seen.asked if not url.startswith("data:")] == [(built / "index.html").as_uri()]
    assert seen.complaints == []
    # Nothing but tables and pictures, which scroll by themselves, is wider than the window.
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    if size is DESK:  # where no table has to
        wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
        assert seen.page.evaluate(wide) == 0
    light = seen.page.evaluate(
        "['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name]"
        ".match(/[0-9]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765)"
    )
    assert (light[0] < 0.2 < 0.8 < light[1]) if scheme == "dark" else (light[0] > 0.9 and light[1] < 0.3)
    folder = Path(os.environ.get("REPRO_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"page-{size['width']}-{scheme}.png"
    seen.page.screenshot(path=picture)
    assert picture.stat().st_size > 10_000


def test_every_filter_leaves_what_the_ledger_says(visit: Any, found: JudgedStore) -> None:
    page, about = visit(), found.ledger.about
    everything = [result.claim.id for result in found.judged]
    assert page.shown() == everything

    def choose(name: str, value: str) -> list[str]:
        page.page.select_option(f"[data-filter={name}]", value)
        shown: list[str] = page.shown()
        assert page.page.inner_text("#count") == f"{len(shown)} of {len(everything)} claims"
        return shown

    for system in dict.fromkeys(about[result.claim.file] for result in found.judged):
        wanted = [result.claim.id for result in found.judged if about[result.claim.file] == system]
        assert choose("about", system) == wanted
    choose("about", "")
    for verdict in {result.verdict for result in found.judged}:
        wanted = [result.claim.id for result in found.judged if result.verdict == verdict]
        assert choose("verdict", verdict) == wanted
    choose("verdict", "")
    for kind in ("measured", "analytic"):
        decided = [any(k.kind == kind and k.decided for k in result.kinds) for result in found.judged]
        wanted = [claim for claim, yes in zip(everything, decided, strict=True) if yes]
        assert choose("evidence", kind) == wanted != []
    both = [result.claim.id for result in found.judged if result.claim.id in wanted]
    both = [claim for claim in both if about[found.ledger.claim(claim).file] == "Yuan"]
    assert choose("about", "Yuan") == both
    page.page.click("#reset")
    page.page.fill("[data-filter=text]", "ZERO-FIG1")
    assert page.shown() == [claim for claim in everything if "zero-fig1" in claim]
    page.page.click("#reset")
    assert page.shown() == everything


def test_a_verdict_s_tile_and_a_system_s_name_filter_and_let_go(visit: Any) -> None:
    page = visit()
    before = page.shown()
    for selector in (".tile[data-verdict='not comparable']", "button[data-about='Yuan']"):
        page.page.click(selector)
        assert 0 < len(page.shown()) < len(before)
        page.page.click(selector)
        assert page.shown() == before


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_a_line_opens_in_place_to_everything_about_its_claim(visit: Any, size: dict[str, int]) -> None:
    seen = visit(size)
    claim = seen.page.locator("#claim-zero-mem-formula-stages")
    inside = claim.locator(".inside")
    assert not inside.is_visible()
    claim.locator("> summary").click()
    assert inside.is_visible()
    text = inside.inner_text()
    for word in ("Conditions", "Source", "Certainty", "confirmed", "Verdict", "tolerance:", "scaled twin"):
        assert word in text, word
    assert "repro run suites/smoke.toml --only 'states-z" in text
    assert "repro claims zero-mem-formula-stages" in text
    assert "are in the store" in text
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    if os.environ.get("REPRO_SCREENSHOTS"):
        claim.screenshot(path=Path(os.environ["REPRO_SCREENSHOTS"]) / f"claim-{size['width']}.png")
    claim.locator("> summary").click()
    assert not inside.is_visible()


def test_a_link_opens_what_it_leads_to(visit: Any) -> None:
    seen = visit(anchor="#claim-zero-mem-formula-stages")
    assert seen.page.locator("#claim-zero-mem-formula-stages").get_attribute("open") is not None
    seen.page.locator("#claim-zero-mem-formula-stages .behind > summary").click()
    seen.page.locator("#claim-zero-mem-formula-stages a[href^='#run-']").first.click()
    target = seen.page.evaluate("location.hash.slice(1)")
    assert seen.page.locator(f"[id='{target}']").is_visible()


def test_open_all_opens_what_is_shown(visit: Any) -> None:
    page = visit().page
    page.select_option("[data-filter=about]", "Yuan")
    page.click("#toggle")
    assert page.locator("details.claim[open]").count() == page.locator("details.claim:not([hidden])").count()
    assert page.inner_text("#toggle") == "close all"
    page.click("#toggle")
    assert page.locator("details.claim[open]").count() == 0


def test_prints_without_its_controls(visit: Any, tmp_path: Path) -> None:
    page = visit().page
    page.emulate_media(media="print")
    assert page.is_hidden("#filters")
    assert page.is_hidden("nav")
    path = Path(os.environ.get("REPRO_SCREENSHOTS") or tmp_path) / "page.pdf"
    page.pdf(path=path, format="A4")
    assert path.read_bytes().startswith(b"%PDF")
