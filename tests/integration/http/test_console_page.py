"""The console in a real browser: its key, what it shows of many instances, empty states, keyboard, contrast."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from tests.support.servers.browser import missing_browser, open_browser
from tests.support.watched import KEY, Watched, watched_router

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_browser() is not None, reason=str(missing_browser())),
]

LOW_CONTRAST = """
const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const behind = (node) => {
  for (let at = node; at; at = at.parentElement) {
    const colour = parse(getComputedStyle(at).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const bad = [];
for (const node of document.querySelectorAll("body *")) {
  const own = [...node.childNodes].some((x) => x.nodeType === 3 && x.textContent.trim());
  if (!own || !node.checkVisibility() || node.closest("svg, .unseen, .skip, .flow-list, noscript")) continue;
  const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) bad.push(`${node.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
}
return bad;
"""


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    async with watched_router(tmp_path, prefills=2, decodes=2) as running:
        yield running


@pytest.fixture
def browser() -> Iterator[Chrome]:
    with open_browser() as driver:
        yield driver


ROW = (
    "const rows = [...document.querySelectorAll('#index tr')].map(x => x.innerText);"
    "return rows.find(x => x.startsWith(arguments[0])) || ''"
)


def wait(driver: Chrome, condition: Callable[[Chrome], Any], seconds: float = 240) -> Any:
    redrawn = [StaleElementReferenceException]
    return WebDriverWait(driver, seconds, poll_frequency=0.1, ignored_exceptions=redrawn).until(condition)


def sign_in(driver: Chrome, url: str) -> None:
    """Open the console as somebody does who has a key."""
    driver.get(f"{url}/console")
    wait(driver, lambda d: d.find_element(By.ID, "key").get_attribute("open"))
    driver.find_element(By.ID, "key-input").send_keys(KEY, Keys.ENTER)
    wait(driver, lambda d: d.find_element(By.ID, "live").get_attribute("data-state") == "live")


def severe(driver: Chrome) -> list[str]:
    """What went wrong in the page, beside the 401 by which it finds out that a key is wanted."""
    logs: list[dict[str, Any]] = driver.get_log("browser")
    return [x["message"] for x in logs if x["level"] == "SEVERE" and "401" not in x["message"]]


async def test_it_asks_for_a_key_and_tells_when_it_is_wrong(watched: Watched, browser: Chrome) -> None:
    def look() -> None:
        browser.get(f"{watched.url}/console")
        field = wait(browser, lambda d: d.find_element(By.ID, "key-input"))
        wait(browser, lambda d: field.is_displayed())
        assert not browser.find_elements(By.CSS_SELECTOR, ".card")
        field.send_keys("wrong", Keys.ENTER)
        wait(browser, lambda d: field.is_displayed() and not field.get_attribute("value"))
        field.send_keys(KEY, Keys.ENTER)
        wait(browser, lambda d: len(d.find_elements(By.CSS_SELECTOR, ".card")) == 4)
        assert browser.find_element(By.ID, "decisions-empty").is_displayed()
        assert "0 since start" in browser.find_element(By.ID, "tiles").text
        assert not severe(browser)

    await asyncio.to_thread(look)


async def test_an_instance_that_dies_and_one_that_leaves(watched: Watched, browser: Chrome) -> None:
    await asyncio.to_thread(sign_in, browser, watched.url)
    await watched.workers[-1].stop()

    def look() -> None:
        script = "return document.querySelector('#decode .card.out')?.innerText"  # at once: cards are drawn anew
        card = wait(browser, lambda d: d.execute_script(script))
        assert "d1" in card
        assert "Down" in card
        wait(browser, lambda d: "d1 is down" in d.find_element(By.ID, "news").get_attribute("textContent"))
        wait(browser, lambda d: "Stale" in d.execute_script(ROW, "d1"))
        wait(browser, lambda d: "1 of 2 ready" in d.find_element(By.ID, "decode-count").text)

    await asyncio.to_thread(look)


async def test_an_odd_link_and_a_router_that_ends(watched: Watched, browser: Chrome) -> None:
    await asyncio.to_thread(sign_in, browser, watched.url)
    browser.execute_script("location.hash = '#request=%zz+1'")
    await asyncio.to_thread(wait, browser, lambda d: "not remember" in d.find_element(By.ID, "explain-body").text)
    await watched.app.stop()
    await asyncio.to_thread(wait, browser, lambda d: d.find_element(By.ID, "banner").is_displayed())
    assert "does not answer" in browser.find_element(By.ID, "banner").text


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_readable_by_eyes_keyboards_and_screen_readers(watched: Watched, browser: Chrome, theme: str) -> None:
    await watched.complete("seen")
    await asyncio.to_thread(sign_in, browser, watched.url)
    await watched.workers[-1].stop()

    def look() -> None:
        wait(browser, lambda d: d.find_elements(By.CSS_SELECTOR, ".card.out"))
        switch = browser.find_element(By.ID, "theme")
        while theme not in switch.text:
            switch.click()
        assert browser.execute_script(LOW_CONTRAST) == []
        for selector in ("button", '[tabindex="0"]', '[role="meter"]', "table", "section"):
            for node in browser.find_elements(By.CSS_SELECTOR, f"main {selector}"):
                assert node.accessible_name or node.text, node.get_attribute("outerHTML")
        switch.send_keys(Keys.SHIFT + Keys.TAB)
        names = [browser.switch_to.active_element.accessible_name]
        while names[-1] != "Explain seen":
            browser.switch_to.active_element.send_keys(Keys.TAB)
            names.append(browser.switch_to.active_element.accessible_name)
        assert names == ["Skip to the dashboard", switch.accessible_name, "Recent decisions", "Explain seen"]
        browser.switch_to.active_element.send_keys(Keys.ENTER)
        wait(browser, lambda d: "chosen" in d.find_element(By.ID, "explain-body").text)
        assert browser.execute_script(LOW_CONTRAST) == []
        assert "#request=cmpl-seen" in browser.current_url
        browser.switch_to.active_element.send_keys(Keys.ESCAPE)
        wait(browser, lambda d: not d.find_element(By.ID, "explain").is_displayed())
        assert "#" not in browser.current_url
        assert browser.switch_to.active_element.accessible_name == "Explain seen"
        assert not severe(browser)

    await asyncio.to_thread(look)


FOCUSED = "return document.activeElement.closest('#decisions tr')?.dataset.key ?? document.activeElement.tagName"
SPARKS = """
const done = arguments[arguments.length - 1];
import("/console/tiles.js").then(({ steps }) => {
  const history = arguments[0].map(([ago_s, seconds, value]) => ({ ago_s, seconds, value }));
  done(steps(history, { series: "value" })[0]);
});
"""


async def test_the_keyboards_place_is_kept_when_its_row_leaves(watched: Watched, browser: Chrome) -> None:
    def keys_of_rows() -> list[str]:
        script = "return [...document.querySelectorAll('#decisions tr')].map((x) => x.dataset.key)"
        return list(browser.execute_script(script))

    async def push_out(name: str) -> None:
        """Have so many requests arrive that the rows of today leave the list."""
        for at in range(41):
            assert (await watched.complete(f"{name}-{at}")).status_code == 200
        await asyncio.to_thread(wait, browser, lambda d: f"{name}-40" in keys_of_rows()[0])

    for at in range(3):
        await watched.complete(f"seen-{at}")
    await asyncio.to_thread(sign_in, browser, watched.url)

    def begin() -> None:
        wait(browser, lambda d: len(keys_of_rows()) == 3)
        script = "return [...document.querySelectorAll('#decisions button')].map((x) => x.tabIndex)"
        assert browser.execute_script(script) == [0, -1, -1], "one stop of the tab key"
        browser.find_element(By.CSS_SELECTOR, "#decisions button").send_keys(Keys.ARROW_DOWN)
        assert browser.execute_script(FOCUSED) == keys_of_rows()[1]

    await asyncio.to_thread(begin)
    await push_out("first")
    focused = browser.execute_script(FOCUSED)
    assert focused in keys_of_rows()
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    await asyncio.to_thread(wait, browser, lambda d: "chosen" in d.find_element(By.ID, "explain-body").text)
    await push_out("second")
    assert focused not in keys_of_rows()
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    await asyncio.to_thread(wait, browser, lambda d: not d.find_element(By.ID, "explain").is_displayed())
    assert browser.execute_script(FOCUSED) in keys_of_rows()


async def test_a_picture_is_of_what_was_measured(watched: Watched, browser: Chrome) -> None:
    await asyncio.to_thread(sign_in, browser, watched.url)
    script = "return getComputedStyle(document.querySelector('.meter i')).transitionDuration"
    assert browser.execute_script(script) == "0s", "a bar agrees with its number at once"
    apart = browser.execute_async_script(SPARKS, [[60, 1, 5], [59, 1, 6], [20, 39, None], [19, 1, 4]])
    assert apart.count("M") == 2, "two lines, with nothing between them"
    assert browser.execute_async_script(SPARKS, [[60, 1, 0], [20, 40, 0]]) == "", "no rate, no line"


async def test_a_phone_shows_what_matters(watched: Watched) -> None:
    def look() -> None:
        with open_browser(390, 844) as driver:
            sign_in(driver, watched.url)
            wait(driver, lambda d: d.find_elements(By.CSS_SELECTOR, "#decisions tr"))
            heads = driver.find_elements(By.CSS_SELECTOR, ".decisions thead th")
            assert [x.text for x in heads if x.is_displayed()] == ["Request", "Way", "Match", "TTFT", "Outcome"]
            for name in ("decisions", "index"):
                script = "const x = document.querySelector(arguments[0]); return x.scrollWidth - x.clientWidth"
                assert driver.execute_script(script, f".{name} .scroll") <= 0, name

    await watched.complete("a-request-with-a-rather-long-name")
    await asyncio.to_thread(look)


async def test_requests_that_stand_still_are_seen(
    watched: Watched, browser: Chrome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton_router.frontend.console.window_stats.STALLED_S", 2.0)
    for worker in watched.workers:
        worker.state.pause_after = 1
    running = asyncio.create_task(watched.complete("stuck"))
    await asyncio.to_thread(sign_in, browser, watched.url)
    tile = '[aria-label="In flight"]'
    await asyncio.to_thread(
        wait, browser, lambda d: "stalled: no token for" in d.find_element(By.CSS_SELECTOR, tile).text
    )
    for worker in watched.workers:
        worker.state.pause_after = None
        worker.changed()
    assert (await running).status_code == 200
    await asyncio.to_thread(wait, browser, lambda d: "since start" in d.find_element(By.CSS_SELECTOR, tile).text)


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (768, 1024), (390, 844)])
@pytest.mark.parametrize("ratio", [(0, 1), (1, 1), (16, 16)])
async def test_it_fits(tmp_path: Path, width: int, height: int, ratio: tuple[int, int]) -> None:
    def look(url: str) -> None:
        with open_browser(width, height) as driver:
            sign_in(driver, url)
            wait(driver, lambda d: len(d.find_elements(By.CSS_SELECTOR, ".card")) == sum(ratio))
            measured: list[int] = driver.execute_script(
                "return [document.documentElement.scrollWidth, innerWidth,"
                " document.documentElement.scrollHeight, innerHeight]"
            )
            assert measured[0] <= measured[1]
            if width >= 1280:
                assert measured[2] <= measured[3]
                box = driver.find_element(By.ID, "topology")
                assert int(box.get_property("scrollHeight")) <= int(box.get_property("clientHeight")) + 1  # type: ignore[arg-type]
            assert not severe(driver)

    async with watched_router(tmp_path, *ratio) as watched:
        await asyncio.to_thread(look, watched.url)


async def test_the_documentation_shows_every_endpoint_and_needs_nothing_from_elsewhere(
    watched: Watched, browser: Chrome
) -> None:
    document = (await watched.http.get("/openapi.json")).json()
    endpoints = sum(map(len, document["paths"].values()))

    def look() -> str:
        browser.get(f"{watched.url}/docs")
        wait(browser, lambda d: len(d.find_elements(By.CSS_SELECTOR, "#endpoints > details")) == endpoints)
        browser.execute_script("document.querySelectorAll('details').forEach(x => { x.open = true; });")
        return browser.find_element(By.TAG_NAME, "body").text

    text = await asyncio.to_thread(look)
    for words in (
        "POST /v1/chat/completions",
        "GET /v1/models/{model}",
        "messages (required)",
        "temperature",
        "Statuses:",
    ):
        assert words in text
    assert not severe(browser)
