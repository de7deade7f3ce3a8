"""Tests of the site in headless Chromium, offline, at the width of a desktop and of a phone.

Without Chromium or playwright the tests are skipped, or fail if REPRO_BROWSER=1 is set. With REPRO_SCREENSHOTS=DIR,
screenshots of the pages are saved in DIR.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
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
    """One page in a new offline browser context, with its requests and its console errors."""

    def __init__(self, browser: Any, address: str, size: dict[str, int], scheme: str = "light"):
        self.context = browser.new_context(
            viewport=size, color_scheme=scheme, offline=True, is_mobile=False, service_workers="block"
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(90_000)
        self.requests: list[str] = []
        self.console_errors: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.console_errors.append(str(error)))
        self.page.goto(address)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.console_errors.append(message.text)

    def shown(self) -> list[str]:
        """Return the ids of the claims that no filter hides."""
        found: list[str] = self.page.eval_on_selector_all(
            "tr[data-verdict]:not([hidden])", "all => all.map(one => one.id.slice('claim-'.length))"
        )
        return found

    def names(self) -> list[str]:
        """Return the names in the visible rows of the table of experiments."""
        found: list[str] = self.page.eval_on_selector_all(
            "#records a", "all => all.map(one => one.textContent)"
        )
        return found


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


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_pages_load_offline_without_console_errors(
    visit: Any, name: str, size: dict[str, int], scheme: str, site_dir: Path, tmp_path: Path
) -> None:
    seen = visit(name, size, scheme)
    seen.page.wait_for_load_state("load")
    assert [url for url in seen.requests if not url.startswith(("data:", site_dir.as_uri()))] == []
    assert seen.console_errors == []
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

    page = visit("source-zero.html", DESK, scheme).page
    figure = page.locator("#figure-states .picture")
    assert figure.locator("img").evaluate("one => one.naturalWidth") > 100
    picture = Image.open(io.BytesIO(figure.screenshot())).convert("RGB")
    colours = picture.getcolors(1 << 20)
    assert colours
    usual = max(colours)[1]
    assert usual == ((255, 255, 255) if scheme == "light" else (0x14, 0x19, 0x1F))


def test_each_filter_shows_the_matching_claims(visit: Any, store: JudgedStore) -> None:
    page, about = visit("claims.html"), store.ledger.about
    first = list(dict.fromkeys(line.claim for line in headline_lines(store.ledger, store.judged)))
    others = [result.claim.id for result in store.judged if result.claim.id not in first]
    everything = [*first, *others]
    results = {result.claim.id: result for result in store.judged}
    files = {claim: results[claim].claim.file for claim in everything}
    assert page.shown() == everything

    def choose(name: str, value: str) -> list[str]:
        page.page.select_option(f"[name={name}]", value)
        shown: list[str] = page.shown()
        assert page.page.inner_text("#count") == f"{len(shown)} of {len(everything)} claims"
        return shown

    zero = [claim for claim in everything if about[files[claim]] == "ZeRO"]
    assert choose("source", "zero") == zero != []
    beyond = [claim for claim in everything if not store.ledger.dates[files[claim]]]
    assert choose("source", "beyond") == beyond != []
    choose("source", "")
    for verdict in {result.verdict for result in store.judged}:
        wanted = [claim for claim in everything if results[claim].verdict == verdict]
        assert choose("verdict", verdict) == wanted
    choose("verdict", "")
    for kind in ("measured", "analytic"):
        decided = [any(k.kind == kind and k.decided for k in results[claim].kinds) for claim in everything]
        wanted = [claim for claim, yes in zip(everything, decided, strict=True) if yes]
        assert choose("evidence", kind) == wanted != []
    both = [claim for claim in wanted if about[files[claim]] == "Yuan"]
    assert choose("source", "yuan") == both
    page.page.click("[type=reset]")
    assert page.shown() == everything
    page.page.fill("[name=text]", "ZERO-FIG1")
    assert page.shown() == [claim for claim in everything if "zero-fig1" in claim]


def test_verdict_tiles_link_to_their_claims_and_back(visit: Any, store: JudgedStore) -> None:
    page = visit("index.html")
    page.page.click(".tile.not-comparable")
    wanted = sorted(result.claim.id for result in store.judged if result.verdict == "not comparable")
    assert sorted(page.shown()) == wanted != []
    page.page.click("tr[data-verdict]:not([hidden]) a")
    assert page.page.inner_text("header .badge").endswith("not comparable")
    page.page.go_back()
    page.page.wait_for_selector("#count")
    assert sorted(page.shown()) == wanted, "the address contains the filter"


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_claim_page_has_conditions_source_verdict_and_commands(visit: Any, size: dict[str, int]) -> None:
    seen = visit("claims.html", size)
    seen.page.click("#claim-zero-mem-formula-stages a")
    text = seen.page.inner_text("body")
    for word in ("Conditions", "Source", "Certainty", "confirmed", "Verdict", "tolerance:", "scaled twin"):
        assert word in text, word
    assert "repro run suites/smoke.toml --only 'states-z" in text
    assert "repro claims zero-mem-formula-stages" in text
    assert "are in the store" in text
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_claims_and_records_link_to_each_other(visit: Any) -> None:
    page = visit(CLAIM).page
    page.click("summary >> text=List of the records")
    page.click("a[href*='experiments.html#run-']")
    assert page.is_visible("#record")
    name = page.evaluate("decodeURIComponent(location.hash).split('.').slice(1).join('.')")
    assert page.inner_text("#record-name") == f"{name}, measured"
    page.click("#record a >> text=zero-mem-formula-stages")
    assert page.url.endswith(CLAIM)


def test_table_renders_visible_rows_and_scrolling_reaches_all(
    visit: Any, records: list[dict[str, Any]]
) -> None:
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
    for key, head in (
        ("states_gb", "Model states (GB)"),
        ("step_s", "Step time (s)"),
        ("name", "Experiment"),
    ):
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


def test_an_experiment_is_opened_and_closed_with_the_keyboard(
    visit: Any, records: list[dict[str, Any]]
) -> None:
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
