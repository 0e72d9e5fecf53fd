"""Pictures of the live page, for the documentation: both themes, of a deployment under load.

    python tools/page_screenshots.py docs/pictures [REQUESTS_PER_SECOND]

Starts the demo model on two prefill and two decode nodes, sends it requests for a minute, and lets headless
Chromium (Debian: chromium, chromium-driver; fonts-inter for the pictures' font) look at it. Writes
page-light.png, page-dark.png and page-timeline.png.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from io import BytesIO
from pathlib import Path

from PIL import Image
from rich.console import Console
from selenium.webdriver import Chrome

from baton.cli.deployment import Deployment, DeploymentPlan
from baton.client import AsyncClient

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/cluster"))

from browser import chromium  # noqa: E402

SIZE = (1280, 1000)
LOAD_SECONDS = 60.0
REQUESTS_PER_SECOND = 4.0


async def load(address: str, rate: float) -> None:
    """Prompts of all lengths, some of them handed off whatever they cost, until it is cancelled."""
    text = (ROOT / "docs/protocol.md").read_text()
    rng = random.Random(7)
    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        while True:
            start, length = rng.randrange(20_000), rng.choice((40, 300, 1200, 3000))
            prompt = text[start : start + length]
            tokens, away = rng.choice((8, 24, 64, 120)), rng.choice((None, None, True))
            group.create_task(client.generate(prompt, max_tokens=tokens, temperature=0.7, hand_off=away))
            await asyncio.sleep(rng.expovariate(rate))


def save(browser: Chrome, path: Path) -> None:
    """With few colours: a third of the size, and no difference to be seen."""
    picture = Image.open(BytesIO(browser.get_screenshot_as_png()))
    picture.convert("RGB").quantize(128).save(path, optimize=True)


def take(url: str, folder: Path) -> None:
    for theme in ("light", "dark"):
        with chromium(SIZE, dark=theme == "dark") as browser:
            browser.get(url)
            time.sleep(5)
            browser.find_element("id", "try-send").click()
            time.sleep(4)
            height = browser.execute_script("return document.documentElement.scrollHeight")
            metrics = {"width": SIZE[0], "height": int(height), "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            time.sleep(2)
            save(browser, folder / f"page-{theme}.png")
    with chromium((1000, 760)) as browser:
        browser.get(url)
        time.sleep(4)
        browser.execute_script(
            "const bars = [...document.querySelectorAll('#requests button')]"
            ".filter((each) => each.textContent.includes('tokens'));"
            "bars.sort((a, b) => b.querySelectorAll('i').length - a.querySelectorAll('i').length)[0].click()"
        )
        time.sleep(2)
        save(browser, folder / "page-timeline.png")


async def main(folder: Path, rate: float) -> None:
    plan = DeploymentPlan(prefill=2, decode=2)
    async with Deployment(plan, Console()) as deployment:
        loading = asyncio.create_task(load(deployment.address, rate))
        await asyncio.sleep(LOAD_SECONDS)
        await asyncio.to_thread(take, f"http://{deployment.http_address}/", folder)
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(f"usage: python {sys.argv[0]} FOLDER [REQUESTS_PER_SECOND]")
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(target, float(sys.argv[2]) if len(sys.argv) == 3 else REQUESTS_PER_SECOND))
