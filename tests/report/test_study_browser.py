"""A report over studies in headless Chromium."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from normsmith.report.study_page import write_study_report
from tests.report.synthetic import make
from tests.report.test_report_browser import NARROW, WIDE, browser, opened

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
__all__ = ["browser"]


def log(arm: int, seed: int, step: int) -> dict[str, Any]:
    return {"gate_entropy": 0.69 * math.exp(-step / 5), **{f"c/layers.{i}": 1 + i * 0.2 + seed for i in range(6)}}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("studies")
    swept = make(
        folder / "swept",
        sweep={"training.learning_rate": ("1e-3", "1e-2", "1e-1")},
        diverge=lambda cell: cell.point.endswith("1e-1"),
        log=log,
    )
    (swept / "published.json").write_text(
        '[{"arm": "dyt", "metric": "test loss", "value": 2.97, "source": "arXiv 2503.10622"}]'
    )
    write_study_report([swept, make(folder / "other")], folder / "report.html")
    return (folder / "report.html").as_uri()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    page = opened(browser, address, WIDE)
    yield page
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_complaint_or_request_and_shows_every_picture(
    browser: Browser, address: str, scheme: str
) -> None:
    page = browser.new_page(viewport=WIDE, color_scheme=scheme)
    complaints: list[str] = []
    requested: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    page.goto(address, wait_until="networkidle")
    assert complaints == []
    assert [url for url in requested if not url.startswith("data:")] == [address]
    shown = page.locator("figure img").evaluate_all(
        "all => all.map(i => [i.naturalWidth, i.clientWidth, i.alt.length])"
    )
    assert len(shown) >= 12
    assert all(natural > 0 and width > 300 and alt > 40 for natural, width, alt in shown)
    page.close()


def test_a_wide_page_needs_no_scrolling_for_the_results(page: Page) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") == WIDE["width"]
    for name in ("s1-results", "s1-statistics", "s2-results"):
        region = page.locator(f'.scroll[aria-labelledby="{name}"]')
        assert region.evaluate("e => e.scrollWidth <= e.clientWidth"), name


def test_a_telephone_scrolls_the_tables_but_not_the_page(browser: Browser, address: str) -> None:
    page = opened(browser, address, NARROW)
    page.locator("details").evaluate_all("all => all.forEach(details => details.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator(".scroll").first.evaluate("e => e.scrollWidth > e.clientWidth")
    page.close()


def test_the_keyboard_sorts_numbers_and_what_is_missing_stays_last(page: Page) -> None:
    table = page.locator('.scroll[aria-labelledby="s1-results"] table')
    button = table.get_by_role("button", name="Difference")

    def arms() -> list[str]:
        return table.locator("tbody th").all_inner_texts()

    assert arms() == ["rmsnorm", "layernorm", "dyt"]
    for key, expected in (("Enter", "ascending"), ("Space", "descending")):
        button.focus()
        page.keyboard.press(key)
        order = ["dyt", "layernorm", "rmsnorm"] if expected == "ascending" else ["layernorm", "dyt", "rmsnorm"]
        assert arms() == order
        assert table.locator(f'[aria-sort="{expected}"]').count() == 1
    assert page.locator("[aria-sort]").count() == 1


def test_links_lead_to_the_studies(page: Page) -> None:
    page.get_by_role("link", name="other").click()
    assert page.locator("#s2-study").evaluate("e => Math.abs(e.getBoundingClientRect().top) < 100")


def test_printing_shows_all_runs(page: Page) -> None:
    page.set_viewport_size({"width": 720, "height": 1000})  # A4 between its margins
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == 720
    assert len(page.pdf(format="A4")) > 20_000
