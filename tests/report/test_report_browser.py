import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from normsmith.report import Results, write_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE = {"width": 1280, "height": 900}
NARROW = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    from playwright.sync_api import sync_playwright

    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        pytest.fail(
            "no chromium, chromium-browser or google-chrome on PATH; install one, for example: apt install chromium"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def address(results: Results, tmp_path: Path) -> str:
    lost = results.arms[0].model_copy(
        update={"name": "lost", "label": "Post-LN", "diverged": True, "validation_loss": None, "perplexity": None}
    )
    changed = results.model_copy(update={"arms": (*results.arms, lost)})
    return write_report(changed, tmp_path / "report.html").as_uri()


def opened(browser: "Browser", address: str, size: dict[str, int], scheme: str = "light") -> "Page":
    page = browser.new_page(viewport=size, color_scheme=scheme)
    page.set_default_timeout(10_000)
    page.goto(address)
    return page


def column(page: "Page", index: int) -> list[str]:
    return page.locator("table.sortable tbody tr").evaluate_all(
        f"rows => rows.map(row => row.cells[{index}].innerText)"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_opens_without_complaint_or_request(browser: "Browser", address: str, scheme: str) -> None:
    page = browser.new_page(viewport=WIDE, color_scheme=scheme)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url[:80]}"))
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(address, wait_until="networkidle")
    assert complaints == []
    assert [url for url in requested if not url.startswith("data:")] == [address]
    widths = page.locator("figure img").evaluate_all("images => images.map(i => [i.naturalWidth, i.clientWidth])")
    assert len(widths) == 4
    assert all(natural > 0 and shown > 300 for natural, shown in widths)
    page.close()


def test_clicking_a_title_sorts_and_clicking_again_reverses(browser: "Browser", address: str) -> None:
    page = opened(browser, address, WIDE)
    head = page.get_by_role("columnheader", name="Validation loss")
    head.get_by_role("button").click()
    assert column(page, 1) == ["3.4088", "3.4312", "3.4497", "diverged"]
    assert head.get_attribute("aria-sort") == "ascending"
    head.get_by_role("button").click()
    assert column(page, 1) == ["3.4497", "3.4312", "3.4088", "diverged"]
    assert head.get_attribute("aria-sort") == "descending"
    page.close()


def test_the_keyboard_sorts(browser: "Browser", address: str) -> None:
    page = opened(browser, address, WIDE)
    page.keyboard.press("Tab")  # the scrolling region
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert [name.split("\n")[0] for name in column(page, 0)] == sorted(column(page, 0))
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert column(page, 1)[0] == "3.4088"
    assert page.locator("[aria-sort]").count() == 1
    page.close()


def test_a_telephone_scrolls_the_tables_but_not_the_page(browser: "Browser", address: str) -> None:
    page = opened(browser, address, NARROW)
    page.locator("details").evaluate_all("all => all.forEach(details => details.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator(".scroll").first.evaluate("element => element.scrollWidth > element.clientWidth")
    page.close()


def test_dark_pages_get_dark_pictures(browser: "Browser", address: str) -> None:
    shown = {}
    for scheme in ("light", "dark"):
        page = opened(browser, address, WIDE, scheme)
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        shown[scheme] = (back, page.locator("figure img").first.evaluate("image => image.currentSrc"))
        page.close()
    assert shown["light"][0] == "rgb(255, 255, 255)"
    assert shown["dark"][0] == "rgb(21, 24, 29)"
    assert shown["light"][1] != shown["dark"][1]


def test_printing_opens_the_configuration_and_closes_it_again(browser: "Browser", address: str) -> None:
    page = opened(browser, address, WIDE)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0
    page.close()
