"""The live page in a real browser, against a real deployment under load."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import httpx
import pytest
from browser import CHROMIUM, DRIVER, PHONE, chromium, console
from deployment import Deployment
from process import Process
from prometheus_client.parser import text_string_to_metric_families
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from baton.api.page.window import QUANTILES, quantile
from baton.authentication.cluster import HEADER
from baton.client import Client

pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]

NAME = "<script>document.title='interpreted'</script><img src=x onerror=\"document.title='interpreted'\">"
"""Of the served model: whatever shows it must show it as it is."""
SECONDS = 60.0


@dataclass
class Page:
    deployment: Deployment
    browser: Chrome

    # Elements may be replaced with any frame: what is read is read at once.

    def find(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText.trim())",
            selector,
        )
        return found

    def text(self, selector: str) -> str:
        (found,) = self.texts(selector)
        return found

    def attribute(self, selector: str, name: str) -> str | None:
        found: str | None = self.run(
            "return document.querySelector(arguments[0])?.getAttribute(arguments[1])", selector, name
        )
        return found

    def visible(self, selector: str) -> bool:
        return bool(self.run("return document.querySelector(arguments[0]).checkVisibility()", selector))

    def until(self, condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
            time.sleep(0.05)
        return found

    def frames(self, more: int) -> None:
        """Waits for so many frames."""

        def shown() -> int:
            return int(self.run("return document.body.dataset.frames || '0'"))

        wanted = shown() + more
        self.until(lambda: shown() >= wanted, "frames")


@pytest.fixture(scope="module")
def live(tmp_path_factory, deployments) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("page")
    flags = ("--served-name", NAME)
    with Deployment.split(folder, "demo", decode=2, gateway_flags=flags) as deployment:
        deployments.append(deployment)
        yield deployment


@pytest.fixture(scope="module")
def page(live: Deployment) -> Iterator[Page]:
    with chromium() as browser:
        browser.get(f"http://{live.gateway.http}/")
        found = Page(live, browser)
        found.frames(2)
        yield found


@pytest.fixture(autouse=True)
def nothing_in_the_console(page: Page) -> Iterator[None]:
    yield
    assert console(page.browser) == []
    assert "interpreted" not in page.browser.title.replace(NAME, "")


def load(deployment: Deployment, requests: int, tokens: int = 24, threads: int = 4) -> None:
    """So many requests, handed off or not."""

    def ask(numbers: range) -> None:
        with Client(deployment.gateway.outside) as client:
            for number in numbers:
                prompt = [5 + (number * 31 + i) % 4000 for i in range(40 + 60 * (number % 5))]
                client.generate(
                    token_ids=prompt, max_tokens=tokens, ignore_eos=True, hand_off=bool(number % 3)
                )

    running = [threading.Thread(target=ask, args=[range(i, requests, threads)]) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(120)
        assert not thread.is_alive()


def metrics(deployment: Deployment) -> dict[str, list[Any]]:
    """Samples by name."""
    text = httpx.get(f"http://{deployment.gateway.http}/metrics", trust_env=False).text
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def value(samples: list[Any], **labels: str) -> float:
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def quantiles(samples: list[Any]) -> list[float | None]:
    """Of a histogram's buckets, as histogram_quantile computes them."""
    cumulated = [(float(each.labels["le"]), int(each.value)) for each in samples]
    bounds, sums = zip(*cumulated, strict=True)
    counts = [new - old for new, old in zip(sums, (0, *sums), strict=False)]
    return [quantile(bounds[:-1], counts, share) for share in QUANTILES]


UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}


def shown(text: str) -> tuple[float, float]:
    """A number on the page and the half of its last digit: "p50 8.3 ms" is 0.0083, 0.00005."""
    match = re.search(r"([\d.]+)\s*(µs|ms|s|%)?$", text.replace("\u202f", ""))
    assert match, text
    digits, unit = match.group(1), UNITS.get(match.group(2) or "", 1.0)
    return float(digits) * unit, 0.5 * unit * 10.0 ** -len(digits.partition(".")[2])


def equal(text: str, expected: float | None) -> None:
    assert expected is not None
    found, half = shown(text)
    assert found == pytest.approx(expected, abs=1.001 * half), f"{text} is not {expected}"


def figure(page: Page, tile: str, name: str) -> str:
    tiles = {"requests": 1, "tokens": 2, "ttft": 3, "itl": 4, "goodput": 5}
    return page.text(f".tile:nth-child({tiles[tile]}) [data-figure='{name}']")


def test_without_traffic_it_says_what_to_do_first_and_that_works(page):
    assert page.visible("#first")
    command = page.text("#first-command")
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("needs curl")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert "[DONE]" in done.stdout, done.stdout + done.stderr
    page.until(lambda: not page.visible("#first"), "the hint is gone")


def test_names_are_text(page):
    assert page.text("#model") == NAME
    assert NAME in page.browser.title


def test_numbers_equal_the_metrics(page):
    load(page.deployment, 40)
    page.deployment.assert_idle()
    found = metrics(page.deployment)
    finished = value(found["baton_gateway_requests_total"], outcome="finished")
    assert finished >= 41
    page.until(lambda: shown(figure(page, "requests", "finished"))[0] == finished, "all have finished")
    page.frames(4)  # the last sample holds them too
    equal(figure(page, "tokens", "since start"), value(found["baton_gateway_output_tokens_total"]))
    for tile in ("ttft", "itl"):
        expected = quantiles(found[f"baton_{tile}_seconds_bucket"])
        for name, each in zip(("p50", "p90", "p99"), expected, strict=True):
            equal(figure(page, tile, name), each)
    both = found["baton_gateway_target_requests_total"]
    met, missed = (value(both, target="both", met=word) for word in ("yes", "no"))
    equal(page.text("#goodput-big") + " %", 100 * met / (met + missed))
    decisions = found["baton_gateway_prompts_total"]
    terms, numbers = (page.texts(f"#split {tag}") for tag in ("dt", "dd"))
    asked = dict(zip(terms, numbers, strict=True))["on prefill nodes: the client asked for it"]
    assert asked.split()[0] == f"{value(decisions, way='split', why='client'):.0f}"


def test_every_process_and_its_pages_are_there(page):
    for process in page.deployment.processes:
        row = f"#processes [data-address='{process.address}']"
        assert page.attribute(row, "data-role") == process.role
        assert page.attribute(row, "data-health") == "serving"
        assert f"pid {process.pid}" in page.text(row)
    for process in (*page.deployment.of("prefill"), *page.deployment.of("decode")):
        pages = process.load().pages

        def counts(address: str = process.address) -> dict[str, int]:
            return json.loads(page.attribute(f".pool[data-address='{address}']", "data-counts") or "{}")

        page.until(lambda counts=counts, pages=pages: counts()["cached"] == pages.cached > 0, "cached pages")
        assert counts()["free"] == pages.free and sum(counts().values()) == pages.total


def test_try_it_streams_an_answer_with_the_arrival_of_each_token(page):
    prompt = page.find("#try-prompt")
    prompt.clear()
    prompt.send_keys("<script>document.title='interpreted'</script> What is textwrap?")
    scripts = len(page.texts("script"))
    page.find("#try-send").click()
    page.until(lambda: "apart" in page.text("#try-note"), "the answer's end")
    pieces = page.run(
        "return [...document.querySelectorAll('#try-answer span')].map((each) => each.textContent)"
    )
    assert len(pieces) > 2 and page.find("#try-answer").get_property("textContent") == "".join(pieces)
    assert len(page.texts("#try-arrivals tr")) == len(pieces)
    assert len(page.texts("script")) == scripts
    page.find("#try-tokens").clear()
    page.find("#try-tokens").send_keys("4096")
    page.find("#try-send").click()
    page.until(lambda: "maximum context length" in page.text("#try-note"), "why it is refused")
    page.until(lambda: "CONTEXT" in page.text("#failures") or page.text("#failures"), "the failure's reason")
    console(page.browser)  # the browser logs that the answer was 400


def test_a_bar_opens_the_timeline_which_adds_up_to_the_time_to_the_first_token(page):
    """By keyboard, too."""
    tokens = [*range(7, 307)]
    answer = page.deployment.client().generate(
        token_ids=tokens, max_tokens=12, ignore_eos=True, hand_off=True
    )
    assert answer.stats is not None and answer.stats.prefill_address
    bar = f"#requests button[data-id='{answer.request_id}']"
    page.until(lambda: page.texts(bar) and "12 tokens" in page.text(bar), "its bar, ended")
    page.run("document.querySelector(arguments[0]).focus()", bar)
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    page.until(lambda: page.texts("#timeline .events"), "the timeline")
    assert answer.request_id in page.text("#timeline-title")
    facts = dict(each.split(" ", 1) for each in page.texts("#timeline [data-fact='outcome']"))
    assert facts == {"outcome": "finished"}
    cells = page.run(
        "return [...document.querySelector('#timeline .events').tBodies[0].rows].map((row) =>"
        " [...row.cells].map((cell) => cell.dataset.seconds ?? cell.textContent))"
    )
    phases = [(float(start), float(took), name, process) for start, took, name, process, _ in cells]
    # The answer's own times are read from the clock a moment before or after the events': on a busy machine,
    # the process may stand still between the two.
    ttft = min((start for start, *_ in phases), key=lambda start: abs(start - answer.stats.ttft))
    assert ttft == pytest.approx(answer.stats.ttft, rel=0.25, abs=0.002)
    assert sum(took for start, took, _, _ in phases if start < ttft) == pytest.approx(ttft, abs=0.002)
    assert sum(took for _, took, _, _ in phases) == pytest.approx(answer.stats.total, rel=0.25, abs=0.002)
    where = {(name, process.split()[0]) for _, _, name, process in phases}
    assert {("prefill", "prefill"), ("decode", "decode")} <= where, where
    lanes = page.texts("#timeline .lane")
    assert {lane.split()[0] for lane in lanes} >= {"gateway", "prefill", "decode"}
    check_accessibility(page)
    page.find("#timeline").send_keys(Keys.ESCAPE)
    page.until(lambda: not page.visible("#timeline"), "it is closed")
    page.run("document.activeElement.blur()")  # the list is held while the focus is new there


def test_requests_under_way_are_shown(page):
    def rows(word: str) -> list[str]:
        return [each for each in page.texts("#requests li") if word in each]

    client = page.deployment.client()
    with client.stream(token_ids=[9] * 20, max_tokens=900, ignore_eos=True) as stream:
        next(iter(stream))
        assert len(page.until(lambda: rows("running"), "it runs")) == 1
        assert "1 request running" in page.text("#requests-note")
    page.until(lambda: rows("cancelled"), "it was left")


def test_no_row_moves_under_the_pointer(page):
    def first() -> str | None:
        return page.attribute("#requests button", "data-id")

    def point(kind: str) -> None:
        page.run("document.querySelector('#requests').dispatchEvent(new Event(arguments[0]))", kind)

    before = first()
    point("pointermove")
    page.deployment.client().generate(token_ids=[8] * 20, max_tokens=1)
    for _ in range(12):  # the list is renewed every two seconds
        point("pointermove")
        time.sleep(0.25)
        assert first() == before
    assert "list held" in page.text("#requests-note")
    point("pointerleave")
    page.until(lambda: first() != before, "the newest is the first again")


def check_accessibility(page: Page) -> None:
    """With axe-core; not as a script of the page, which its policy forbids."""
    axe = (files("axe_core_python") / "axe.min.js").read_text()
    page.run(axe + "; window.axe = axe;")
    found = page.browser.execute_async_script(
        "const done = arguments[0];"
        "axe.run(document).then((found) => done(found.violations), (error) => done([{id: `${error}`}]))"
    )
    serious = [
        (each["id"], [node["html"][:200] for node in each.get("nodes", [])])
        for each in found
        if each.get("impact") in ("serious", "critical", None)
    ]
    assert not serious, serious


def test_nothing_serious_for_people_with_other_needs(page):
    for theme in ("dark", "light"):
        while page.text("#theme") != f"Theme: {theme}":
            page.find("#theme").click()
        page.frames(1)
        check_accessibility(page)


def test_it_fits_a_phone(live):
    with chromium(PHONE) as browser:
        browser.get(f"http://{live.gateway.http}/")
        phone = Page(live, browser)
        phone.frames(2)
        assert phone.run("return document.documentElement.scrollWidth") <= PHONE[0]
        live.client().generate(token_ids=[8] * 20, max_tokens=1)
        phone.until(lambda: phone.texts("#requests .took"), "a request is shown")
        cut = "return [...document.querySelectorAll('#requests .mono, #requests .took')]"
        cut += ".filter((each) => !each.clientWidth || each.scrollWidth > each.clientWidth)"
        assert phone.run(cut + ".map((each) => each.textContent)") == []
        assert console(browser) == []


def test_by_keyboard(page):
    page.run("document.querySelector('.skip').focus()")
    reached = []
    for _ in range(40):
        page.browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.browser.switch_to.active_element.get_attribute("id"))
    assert {"theme", "try-prompt", "try-tokens", "try-send"} <= set(reached), reached


def test_more_tabs_than_a_browser_has_connections_to_a_host(live):
    """A tab that is not seen holds none; one that is seen again goes on."""
    with chromium() as browser:
        tabs = Page(live, browser)
        for _ in range(7):
            browser.switch_to.new_window("tab")
            browser.get(f"http://{live.gateway.http}/")
            tabs.frames(1)
        browser.switch_to.window(browser.window_handles[1])
        tabs.frames(2)
        assert console(browser) == []


@pytest.mark.times
def test_without_the_secret_it_is_refused_where_keys_are_set(live, tmp_path):
    secret = secrets.token_hex(32)
    for name, content in (("keys", secrets.token_hex(16)), ("secret", secret)):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(content + "\n")
    flags = ["--tokenizer", live.tokenizer.address, "--decode", live.decode.address]
    flags += ["--api-keys", str(tmp_path / "keys"), "--cluster-secret-file", str(tmp_path / "secret")]
    closed = Process("gateway", "closed", flags, tmp_path)
    closed.metadata = ((HEADER, secret),)
    closed.start()
    try:
        closed.wait_ready()
        with chromium() as browser:
            browser.get(f"http://{closed.http}/")
            assert not browser.find_elements(By.CSS_SELECTOR, ".tile")
            browser.get(f"http://me:{secret}@{closed.http}/")
            assert browser.find_elements(By.CSS_SELECTOR, ".tile")
    finally:
        closed.stop()


@pytest.mark.alone
@pytest.mark.times
def test_a_killed_node_is_seen_within_two_seconds(page):
    """Last: it stays dead."""
    for process in (page.deployment.decode, page.deployment.prefill):
        row = f"#processes [data-address='{process.address}']"
        page.until(lambda row=row: page.attribute(row, "data-health") == "serving", "it serves")
        process.kill()
        killed = time.monotonic()
        page.until(lambda row=row: page.attribute(row, "data-health") == "unreachable", "it is seen", 2.0)
        assert process.address in page.text("#health")
        assert not page.texts(f".pool[data-address='{process.address}']"), "what its pages are is not known"
        print(f"{process.role} seen dead after {time.monotonic() - killed:.2f} s")
