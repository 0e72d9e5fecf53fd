"""Which prompts are handed off: by what steps are measured to cost, or by somebody's word.

Forward passes are sleeps (--step-profile), so that the machine's pace has no say in what prompts cost.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator

import pytest
from asking import ask, greedy
from deployment import Deployment
from polling import until
from process import Process

from baton.client import Completion

pytestmark = [pytest.mark.alone, pytest.mark.times]

STEP = {"fixed": 0.01, "row": 1e-4, "key": 0.0, "token": 2e-4, "pair": 0.0}
SHORT, LONG = [*range(5, 69)], [*range(5, 1405)]
"""Alone 13 and 280 ms of prompt."""
ROWS = 6


@pytest.fixture(scope="module")
def gateways(tmp_path_factory, deployments) -> Iterator[tuple[Deployment, dict[str, Process]]]:
    """One for each mode, in front of the same prefill and decode node."""
    folder = tmp_path_factory.mktemp("modes")
    (folder / "profile.json").write_text(json.dumps({"step": STEP}))
    flags = ("--step-profile", str(folder / "profile.json"), "--token-budget", "2048", "--kv-tokens", "32768")
    deployment = Deployment(folder, "demo")
    prefill = deployment.add_worker("prefill", *flags)
    decode = deployment.add_worker("decode", *flags, "--local-prefill-tokens", "none")
    modes = {
        mode: deployment.add_gateway([decode], [prefill], "--split", mode)
        for mode in ("auto", "always", "never")
    }
    with deployment:
        deployments.append(deployment)
        yield deployment, modes


def metric(gateway: Process, name: str) -> float:
    with urllib.request.urlopen(f"http://{gateway.http}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def one(gateway: Process, prompt: list[int], number: int, **options) -> Completion:
    """Nobody has the prompt cached."""
    options = {"namespace": f"{gateway.name} {number}", **options}
    return (await ask(gateway.address, [greedy(prompt, 4, **options)]))[0]


def handed_off(completion: Completion) -> bool:
    assert completion.stats is not None
    assert bool(completion.stats.prefill_address) == bool(completion.stats.pulled_pages)
    return bool(completion.stats.prefill_address)


async def test_workers_say_what_they_have_measured(gateways):
    deployment, modes = gateways
    for worker in (deployment.prefill, deployment.decode):
        cost = worker.load().step_cost
        assert cost.fixed == pytest.approx(STEP["fixed"], rel=0.25)
        assert cost.token == pytest.approx(STEP["token"], rel=0.25)
        assert "steps measured" in worker.log.read_text()
    await one(modes["always"], LONG, 0)
    pull = deployment.decode.load().pull_cost
    assert 0 < pull.fixed + 1400 * pull.token < 0.1


async def test_always_and_never_do_as_they_say(gateways):
    _, modes = gateways
    for number, prompt in enumerate((SHORT, LONG), 10):
        assert handed_off(await one(modes["always"], prompt, number))
        assert not handed_off(await one(modes["never"], prompt, number))


async def test_the_client_has_the_last_word(gateways):
    _, modes = gateways
    for number, gateway in enumerate(modes.values(), 20):
        assert handed_off(await one(gateway, SHORT, number, hand_off=True))
        assert not handed_off(await one(gateway, LONG, number, hand_off=False))


async def test_auto_hands_off_what_would_hold_others_up(gateways):
    """With rows to delay, a long prompt goes to the prefill node and a short one stays."""
    deployment, modes = gateways
    auto = modes["auto"]
    await until(lambda: deployment.decode.load().running == 0, "an idle decode node")
    before = metric(auto, 'baton_gateway_prompts_total{model="demo",way="split",why="cost"}')
    rows = [greedy(SHORT[row:], 400, namespace=f"rows {row}", hand_off=False) for row in range(ROWS)]
    running = asyncio.create_task(ask(auto.address, rows))
    await until(lambda: deployment.decode.load().running >= ROWS, "rows")
    short, long = await one(auto, SHORT[:2], 30), await one(auto, LONG, 31)
    still = deployment.decode.load().running
    await running
    assert still >= ROWS, "rows were there all the time"
    assert not handed_off(short) and handed_off(long)
    assert metric(auto, 'baton_gateway_prompts_total{model="demo",way="split",why="cost"}') == before + 1
    assert metric(auto, "baton_gateway_actual_over_expected_count") >= 4
