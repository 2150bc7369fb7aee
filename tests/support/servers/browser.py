"""A headless Chromium for tests and screenshots of the console, driven by selenium.

Debian's ``chromium`` and ``chromium-driver``, or any pair found under these names; selenium's own way of downloading
browsers is not used.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_DRIVERS = ("chromedriver", "chromium.chromedriver")


def missing_browser() -> str | None:
    """Return why there is no browser; ``None``: there is one."""
    for what, names in (("Chromium", _BROWSERS), ("chromedriver", _DRIVERS)):
        if not any(map(shutil.which, names)):
            return f"no {what} on this machine (apt-get install chromium chromium-driver)"
    return None


@contextlib.contextmanager
def open_browser(width: int = 1280, height: int = 800, *, dark: bool = False) -> Iterator[webdriver.Chrome]:
    """Start a browser with a profile of its own, and end it.

    Args:
        width: Of the page, in CSS pixels.
        height: Of the page, in CSS pixels.
        dark: Whether it prefers dark pages.

    Raises:
        RuntimeError: There is no browser; see :func:`missing_browser`.
    """
    if reason := missing_browser():
        raise RuntimeError(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = next(filter(None, map(shutil.which, _BROWSERS)))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver_path = next(filter(None, map(shutil.which, _DRIVERS)))
    with tempfile.TemporaryDirectory(prefix="baton-browser-") as profile:
        # Each a reason of its own: no window; containers have a small /dev/shm; nothing is asked of the internet.
        for flag in (
            "--headless=new",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            "--no-proxy-server",
            "--force-device-scale-factor=1",
            f"--window-size={width},{height}",
            f"--user-data-dir={Path(profile) / 'profile'}",
        ):
            options.add_argument(flag)
        if os.geteuid() == 0:
            options.add_argument("--no-sandbox")  # Chromium refuses to run as root with it
        driver = webdriver.Chrome(options=options, service=Service(driver_path))
        try:
            driver.set_page_load_timeout(240)
            _command(
                driver,
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
            )
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            _command(driver, "Emulation.setEmulatedMedia", {"features": [scheme]})
            yield driver
        finally:
            driver.quit()


def _command(driver: webdriver.Chrome, name: str, parameters: dict[str, object]) -> None:
    driver.execute_cdp_cmd(name, parameters)
