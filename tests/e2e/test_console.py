"""The console of ``baton up``, watched in a real browser while requests run and a process dies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from tests.support.servers.browser import missing_browser, open_browser
from tests.support.servers.up import Running, running_up

from baton.cli.main import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing_browser() is not None, reason=str(missing_browser())),
]

LONG = "import os\n\n\ndef main():\n    print(os.environ)\n" * 8


@pytest.fixture(scope="module")
def up(model: str) -> Iterator[Running]:
    with running_up("--ratio", "1P2D", "--model", model, "--kv-blocks", "500") as running:
        yield running


@pytest.fixture
def page(up: Running) -> Iterator[Chrome]:
    with open_browser(1280, 800) as driver:
        driver.get(f"{up.url}/console")
        wait(driver, lambda d: len(d.find_elements(By.CSS_SELECTOR, ".card:not(.out)")) == 3)
        yield driver


def wait(driver: Chrome, condition: Callable[[Chrome], Any]) -> Any:
    """Wait until something is there; the page may replace it while it is looked at."""
    gone = (NoSuchElementException, StaleElementReferenceException)
    return WebDriverWait(driver, 240, poll_frequency=0.1, ignored_exceptions=gone).until(condition)


def row_of(driver: Chrome, name: str) -> Any:
    """The row of the newest decision, once it is this request's and done."""
    rows = driver.find_elements(By.CSS_SELECTOR, "#decisions tr")
    return rows[0] if rows and name in rows[0].text and "done" in rows[0].text else None


def test_a_request_is_seen_to_flow(up: Running, page: Chrome, capsys: pytest.CaptureFixture[str]) -> None:
    assert not page.find_elements(By.CSS_SELECTOR, "#flows g g")
    name = f"seen-{os.urandom(3).hex()}"
    body = {"prompt": f"# {os.urandom(8).hex()}\n" + LONG, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{up.url}/v1/completions", json=body, headers={"x-request-id": name}, timeout=240)
    prefill, decode = (answer.headers[f"x-baton-{role}-instance"] for role in ("prefill", "decode"))
    assert (answer.headers["x-baton-path"], prefill) == ("remote", "prefill-0")

    # It flows: a curve with moving beads from card to card, with its bytes, and a row in the table behind it.
    flow = wait(page, lambda d: d.find_element(By.CSS_SELECTOR, f'#flows g[data-key="{prefill}→{decode}"]'))
    line, beads = flow.find_elements(By.TAG_NAME, "path")
    assert beads.value_of_css_property("animation-name") == "run"
    ends = page.execute_script(
        """
        const path = arguments[0], box = document.getElementById("topology").getBoundingClientRect();
        const at = (length) => { const p = path.getPointAtLength(length); return [p.x + box.x, p.y + box.y]; };
        const inside = ([x, y]) => [...document.querySelectorAll(".card")].find((card) => {
          const r = card.getBoundingClientRect();
          return x >= r.left - 1 && x <= r.right + 1 && y >= r.top && y <= r.bottom;
        });
        return [at(0), at(path.getTotalLength())].map((end) => inside(end)?.querySelector(".name").textContent);
        """,
        line,
    )
    assert ends == [prefill, decode]
    cells = [cell.get_attribute("textContent") for cell in page.find_elements(By.CSS_SELECTOR, "#flow-rows td")]
    assert cells[:4] == [prefill, decode, answer.headers["x-baton-pipe"], "1"]

    # Its decision, found by the keyboard alone.
    row = wait(page, lambda d: row_of(d, name))
    assert prefill in row.text
    row.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    sheet = page.find_element(By.ID, "explain")
    wait(page, lambda d: "chosen" in sheet.text)
    for part in (name, "Why", f"from {prefill} to {decode}", "Decode candidates", "Prefill candidates", "decode-1"):
        assert part in sheet.text
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    wait(page, lambda d: not sheet.is_displayed())

    # The numbers on top are of this request.
    wait(page, lambda d: "1 since start" in d.find_element(By.ID, "tiles").text)
    assert "ms" in page.find_element(By.CSS_SELECTOR, '[aria-label="TTFT, median"]').text

    # The same in a terminal.
    assert main(["explain", name, "--url", up.url]) == 0
    text = capsys.readouterr().out
    for part in (f"{prefill} -> {decode}", "chosen", f"{int(answer.headers['x-baton-kv-bytes']):,} bytes"):
        assert part in text


def test_an_instance_dies_and_comes_back(up: Running, page: Chrome) -> None:
    child = next(
        x for x in psutil.Process(up.process.pid).children(recursive=True) if "baton_decode.main" in x.cmdline()
    )
    name = child.cmdline()[child.cmdline().index("--instance-id") + 1]
    child.kill()
    wait(page, lambda d: name in d.find_element(By.CSS_SELECTOR, "#decode .card.out").text)
    wait(page, lambda d: len(d.find_elements(By.CSS_SELECTOR, "#decode .card:not(.out)")) == 2)
    assert "2 of 2 ready" in page.find_element(By.ID, "decode-count").text


def test_it_keeps_to_itself(up: Running, page: Chrome) -> None:
    loaded = page.execute_script("return performance.getEntriesByType('resource').map((x) => x.name)")
    assert loaded
    assert all(name.startswith(f"{up.url}/") for name in loaded)
    assert page.get_log("browser") == []
