"""Takes the screenshot of docs/router/console.md: ``baton up`` under some load, its console in a headless Chromium.

Prompts begin with one of a few texts, so that there are hits; every tenth is short, so that some are prefilled locally.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
from pathlib import Path

import httpx
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).resolve().parents[1]
NEWEST = "return document.querySelector('#decisions tr')?.dataset.key"
READY = b"Ctrl-C ends everything"


async def main() -> int:
    """Start, load, look, end; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "console.png")
    parser.add_argument("--ratio", default="3P4D")
    parser.add_argument("--port", type=int, default=18088)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load before the picture is taken")
    parser.add_argument("--size", default="1440x900")
    parser.add_argument("--light", action="store_true")
    args = parser.parse_args()
    command = [sys.executable, "-m", "baton.cli.main", "up", "--ratio", args.ratio, "--port", str(args.port)]
    command += ["--grpc-port", "0", "--model", str(ROOT / "models" / "baton-tiny"), "--kv-blocks", "1500"]
    up = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert up.stdout is not None
        while READY not in (line := await up.stdout.readline()):
            if not line:
                print("baton up ended", file=sys.stderr)
                return 1
        drain = asyncio.create_task(up.stdout.read())
        url = f"http://127.0.0.1:{args.port}"
        texts = shared_texts()
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            load = [asyncio.create_task(keep_asking(http, texts, seed)) for seed in range(args.clients)]
            try:
                await asyncio.sleep(args.seconds)
                await asyncio.to_thread(take, f"{url}/console", args)
            finally:
                for task in load:
                    task.cancel()
                await asyncio.gather(*load, return_exceptions=True)
        print(f"wrote {args.out}")
    finally:
        if up.returncode is None:
            up.terminate()
        await up.wait()
    await drain
    return 0


def shared_texts() -> list[str]:
    """Beginnings of prompts, each some hundred tokens."""
    source = (ROOT / "src" / "baton" / "testing.py").read_text(encoding="utf-8")
    return [source[at * 900 : at * 900 + 1400] for at in range(6)]


async def keep_asking(http: httpx.AsyncClient, texts: list[str], seed: int) -> None:
    """One client: asks, waits for the whole answer, asks again."""
    rng = random.Random(seed)
    while True:
        tail = rng.choice(texts)[: rng.randrange(60, 700)]
        prompt = f"{rng.choice(texts)}\n# {rng.random()}\n{tail}" if rng.random() < 0.9 else "def main():\n"
        body = {"prompt": prompt, "max_tokens": rng.randrange(8, 80), "ignore_eos": True}
        (await http.post("/v1/completions", json=body)).raise_for_status()
        await asyncio.sleep(0.3 * rng.random())


def take(url: str, args: argparse.Namespace) -> None:
    """Open the page, let it fill and write the picture."""
    sys.path.insert(0, str(ROOT))
    from tests.support.servers.browser import open_browser

    width, height = map(int, args.size.split("x"))
    with open_browser(width, height, dark=not args.light) as driver:
        driver.get(url)
        wait = WebDriverWait(driver, 60)
        wait.until(lambda d: len(d.find_elements(By.CSS_SELECTOR, "#flows .flow")) > 2)
        shown = driver.execute_script(NEWEST)
        wait.until(lambda d: d.execute_script(NEWEST) != shown)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(args.out))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
