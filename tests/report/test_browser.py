"""Tests of the site in headless Chromium, offline, at the width of a desktop and of a phone.

Without Chromium or playwright the tests are skipped, or fail if REPRO_BROWSER=1 is set. With REPRO_SCREENSHOTS=DIR,
screenshots of the pages are saved in DIR.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from repro.claims.headlines import headline_lines
from repro.report.evidence import JudgedStore
from tests.report.test_page import MAX_NODES, stored_rows

pytestmark = pytest.mark.slow
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
CLAIM = "claims/zero-mem-formula-stages.html"
PAGES = ("index.html", "claims.html", "source-zero.html", "experiments.html", "machines.html", CLAIM)
NAMES = ("chromium", "chromium-browser", "google-chrome")


def skip_or_fail(reason: str) -> NoReturn:
    if os.environ.get("REPRO_BROWSER"):
        pytest.fail(f"REPRO_BROWSER is set, and there is {reason}")
    pytest.skip(f"{reason}: the page is not tested in a browser")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        skip_or_fail("no playwright; it is in the extra test")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        skip_or_fail(f"no {' or '.join(NAMES)} on the path (Debian: apt-get install chromium)")
    # Chromium's sandbox cannot start in a container without user namespaces; the page is trusted.
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


class Visit:
    """One page in a new offline browser context, with its requests and its console."""

    def __init__(self, browser: Any, address: str, size: dict[str, int], scheme: str = "light"):
        options = {"offline": True, "is_mobile": False, "service_workers": "block"}
        self.context = browser.new_context(viewport=size, color_scheme=scheme, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(90_000)
        self.requests: list[str] = []
        self.console: list[tuple[str, str]] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.console.append((message.type, message.text)))
        self.page.on("pageerror", lambda error: self.console.append(("error", str(error))))
        self.page.goto(address)

    def follow(self, link: str) -> None:
        """Click a link to another page, and wait until the scripts of that page have run."""
        with self.page.expect_navigation(wait_until="load"):
            self.page.click(link)

    def shown(self) -> list[str]:
        """Return the ids of the claims that no filter hides."""
        ids = "all => all.map(one => one.id.slice('claim-'.length))"
        return list(self.page.eval_on_selector_all("tr[data-verdict]:not([hidden])", ids))

    def names(self) -> list[str]:
        """Return the names in the visible rows of the table of experiments."""
        return list(self.page.eval_on_selector_all("#records a", "all => all.map(one => one.textContent)"))


@pytest.fixture
def visit(browser: Any, site_dir: Path) -> Iterator[Any]:
    """Return a function that opens a page of the synthetic store's site: `visit(address, size, scheme)`."""
    visits: list[Visit] = []

    def open_page(address: str, size: dict[str, int] = DESK, scheme: str = "light") -> Visit:
        name, mark, part = address.partition("#")
        visits.append(Visit(browser, (site_dir / name).as_uri() + mark + part, size, scheme))
        return visits[-1]

    yield open_page
    for one in visits:
        one.context.close()


@pytest.fixture(scope="module")
def records(site_dir: Path) -> list[dict[str, Any]]:
    return stored_rows((site_dir / "records.js").read_text(encoding="utf-8"))


@pytest.mark.parametrize("is_desk", [True, False], ids=["desk", "phone"])
@pytest.mark.parametrize("name", PAGES)
def test_pages_load_offline_without_console_errors(
    visit: Any, name: str, is_desk: bool, site_dir: Path, tmp_path: Path
) -> None:
    """Each page has each size and each colour scheme once; half of the pages are dark on a desk."""
    size = DESK if is_desk else PHONE
    scheme = "dark" if is_desk == (PAGES.index(name) % 2 == 0) else "light"
    seen = visit(name, size, scheme)
    seen.page.wait_for_load_state("load")
    assert [url for url in seen.requests if not url.startswith(("data:", site_dir.as_uri()))] == []
    assert [line for line in seen.console if line[0] in ("error", "warning")] == []
    assert seen.page.evaluate("document.getElementsByTagName('*').length") < MAX_NODES
    # Only tables and pictures, which have their own scroll bars, may be wider than the window.
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    if size is DESK:  # no table scrolls at this width
        wide = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
        assert seen.page.evaluate(wide) == 0
    light = seen.page.evaluate(
        "['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name]"
        ".match(/[0-9]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 765)"
    )
    assert (light[0] < 0.2 < 0.8 < light[1]) if scheme == "dark" else (light[0] > 0.9 and light[1] < 0.3)
    folder = Path(os.environ.get("REPRO_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{Path(name).stem}-{size['width']}-{scheme}.png"
    seen.page.screenshot(path=picture)
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_figure_has_the_background_of_its_page(visit: Any, scheme: str) -> None:
    from PIL import Image

    page = visit("source-zero.html", scheme=scheme).page
    figure = page.locator("#figure-states .picture")
    assert figure.locator("img").evaluate("one => one.naturalWidth") > 100
    picture = Image.open(io.BytesIO(figure.screenshot())).convert("RGB")
    _, usual = max(picture.getcolors(1 << 20) or [])
    assert usual == ((255, 255, 255) if scheme == "light" else (0x14, 0x19, 0x1F))


def test_each_filter_shows_the_matching_claims(visit: Any, store: JudgedStore) -> None:
    seen, results = visit("claims.html"), {result.claim.id: result for result in store.judged}
    first = dict.fromkeys(line.claim for line in headline_lines(store.ledger, store.judged))
    everything = [*first, *(claim for claim in results if claim not in first)]
    author = {claim: store.ledger.about[result.claim.file] for claim, result in results.items()}
    assert seen.shown() == everything

    def check(is_wanted: Callable[[str], bool], **filters: str) -> None:
        for name, value in filters.items():
            seen.page.select_option(f"[name={name}]", value)
        shown = seen.shown()
        assert shown == [claim for claim in everything if is_wanted(claim)]
        assert seen.page.inner_text("#count") == f"{len(shown)} of {len(everything)} claims"

    check(lambda claim: author[claim] == "ZeRO", source="zero")
    check(lambda claim: not store.ledger.dates[results[claim].claim.file], source="beyond")
    for verdict in {result.verdict for result in store.judged}:
        check(lambda claim, verdict=verdict: results[claim].verdict == verdict, source="", verdict=verdict)
    decided = {
        kind: {c for c, r in results.items() if any(k.kind == kind and k.decided for k in r.kinds)}
        for kind in ("measured", "analytic")
    }
    assert all(decided.values())
    check(lambda claim: claim in decided["measured"], verdict="", evidence="measured")
    check(lambda claim: claim in decided["analytic"], evidence="analytic")
    check(lambda claim: claim in decided["analytic"] and author[claim] == "Yuan", source="yuan")
    seen.page.click("[type=reset]")
    assert seen.shown() == everything
    seen.page.fill("[name=text]", "ZERO-FIG1")
    assert seen.shown() == [claim for claim in everything if "zero-fig1" in claim]


def test_verdict_tiles_link_to_their_claims_and_back(visit: Any, store: JudgedStore) -> None:
    page = visit("index.html")
    page.follow(".tile.not-comparable")
    wanted = sorted(result.claim.id for result in store.judged if result.verdict == "not comparable")
    assert sorted(page.shown()) == wanted != []
    page.follow("tr[data-verdict]:not([hidden]) a")
    assert page.page.inner_text("header .badge").endswith("not comparable")
    page.page.go_back()
    page.page.wait_for_selector("#count")
    assert sorted(page.shown()) == wanted, "the address contains the filter"


def test_claim_page_has_its_evidence_and_links_to_its_records(visit: Any) -> None:
    seen = visit("claims.html")
    page = seen.page
    seen.follow("#claim-zero-mem-formula-stages a")
    text = page.inner_text("body")
    for expected in (
        *("Conditions", "Source", "Certainty", "confirmed", "Verdict", "tolerance:", "scaled twin"),
        "repro run suites/smoke.toml --only 'states-z",
        "repro claims zero-mem-formula-stages",
        "are in the store",
    ):
        assert expected in text
    page.click("summary >> text=List of the records")
    seen.follow("a[href*='experiments.html#run-']")
    assert page.is_visible("#record")
    name = page.evaluate("decodeURIComponent(location.hash).split('.').slice(1).join('.')")
    assert page.inner_text("#record-name") == f"{name}, measured"
    seen.follow("#record a >> text=zero-mem-formula-stages")
    assert page.url.endswith(CLAIM)


def test_scrolling_reaches_all_rows_of_the_table(visit: Any, records: list[dict[str, Any]]) -> None:
    """The table renders only visible rows."""
    seen = visit("experiments.html", {"width": 1280, "height": 300})
    assert 0 < len(seen.names()) < len(records)
    reached = set(seen.names())
    for _ in records:
        seen.page.evaluate("document.getElementById('records').scrollTop += 90")
        seen.page.wait_for_timeout(20)
        reached |= set(seen.names())
    assert reached == {row["name"] for row in records}


def test_experiments_can_be_searched_and_sorted(visit: Any, records: list[dict[str, Any]]) -> None:
    seen = visit("experiments.html", {"width": 1280, "height": 6000})
    page = seen.page
    assert page.inner_text("#count") == f"{len(records)} of {len(records)} experiments"
    heads = {"states_gb": "Model states (GB)", "step_s": "Step time (s)", "name": "Experiment"}
    for key, head in heads.items():
        wanted = sorted(row[key] for row in records if row[key] is not None)
        cells = f"#records td.{key}"
        for order, values in (("ascending", wanted), ("descending", wanted[::-1])):
            page.click(f"#records button >> text={head}")
            assert page.get_attribute(f"th.{key}", "aria-sort") == order
            if key != "name":
                texts = page.locator(cells).all_inner_texts()
                assert [float(text) for text in texts if text != "–"] == values
                assert texts[len(values) :] == ["–"] * (len(records) - len(values)), "missing values are last"
    page.fill("[name=text]", "PARITY-Z3")
    assert sorted(seen.names()) == sorted(row["name"] for row in records if "parity-z3" in row["name"])
    page.select_option("[name=outcome]", "hang")
    assert seen.names() == []
    page.click("[type=reset]")
    assert len(seen.names()) == len(records)


def test_the_keyboard_opens_and_closes_an_experiment(visit: Any, records: list[dict[str, Any]]) -> None:
    page = visit("experiments.html").page
    page.focus("#records a")
    name = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    assert page.is_visible("#record")
    (row,) = (row for row in records if row["name"] == name)
    shown = json.dumps(page.inner_text("#record"))
    assert row["layout"] in shown
    assert all(value in shown for value in row["facts"].values())
    page.keyboard.press("Escape")
    assert page.is_hidden("#record")
    assert page.evaluate("document.activeElement.textContent") == name
    page.focus("#records")
    page.keyboard.press("End")
    page.wait_for_function("document.getElementById('records').scrollTop > 0")


def test_printed_page_has_no_filters_and_navigation(visit: Any, tmp_path: Path) -> None:
    page = visit("claims.html").page
    page.emulate_media(media="print")
    assert page.is_hidden("#filters")
    assert page.is_hidden("nav")
    path = Path(os.environ.get("REPRO_SCREENSHOTS") or tmp_path) / "page.pdf"
    page.pdf(path=path, format="A4")
    assert path.read_bytes().startswith(b"%PDF")
