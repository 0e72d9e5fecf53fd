"""Headless Chromium of the system, driven by Selenium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WIDE, PHONE = (1440, 1000), (390, 844)


@contextmanager
def chromium(
    size: tuple[int, int] = WIDE, *, scale: float = 1.0, dark: bool = False
) -> Iterator[webdriver.Chrome]:
    """A browser with an empty profile. scale: device pixels for each of `size`."""
    options = Options()
    options.binary_location = CHROMIUM or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",  # CI runs as root
        "--disable-dev-shm-usage",
        "--disable-gpu",
        f"--window-size={size[0]},{size[1]}",
        f"--force-device-scale-factor={scale}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": scale, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.set_page_load_timeout(120)
        browser.set_script_timeout(120)
        yield browser
    finally:
        browser.quit()


def console(browser: webdriver.Chrome) -> list[str]:
    """Warnings and errors of the console since the last call."""
    entries: list[dict[str, Any]] = browser.get_log("browser")
    return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
