"""Workers that launch ahead, real processes: steps take a fixed time and compute nothing (--step-profile)."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import asdict
from random import Random

import pytest
from checkpoints import make_model, save
from deployment import Deployment

from baton.client import AsyncClient
from baton.step_cost import StepCost

PROMPT_STEP = 0.005
DECODE_STEP = 0.25
REQUESTS = 40


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, deployments):
    folder = tmp_path_factory.mktemp("overlap")
    flags = []
    for name, seconds in (("prefill", PROMPT_STEP), ("decode", DECODE_STEP)):
        profile = folder / f"{name}.json"
        profile.write_text(json.dumps({"step": asdict(StepCost(seconds, 0.0, 0.0, 0.0, 0.0))}))
        flags.append(("--step-profile", str(profile), "--overlap", "--kv-tokens", "8192"))
    made = Deployment.split(
        folder, save(make_model("qwen3"), folder / "model"), prefill_flags=flags[0], decode_flags=flags[1]
    )
    with made:
        deployments.append(made)
        yield made


def prompt(number: int) -> list[int]:
    draw = Random(number)
    return [draw.randrange(5, 200) for _ in range(100)]


@pytest.mark.alone
@pytest.mark.times
async def test_prompt_and_first_token_do_not_wait_for_the_step_under_way(deployment):
    async with AsyncClient(deployment.gateway.address) as client:
        async with client.stream(token_ids=prompt(0), max_tokens=100, ignore_eos=True) as busy:
            await anext(aiter(busy))
            late = []
            for number in range(1, 10):
                # At different times within a step.
                await asyncio.sleep(DECODE_STEP * (1 + number / 10))
                began = time.monotonic()
                async with client.stream(token_ids=prompt(number), max_tokens=2, ignore_eos=True) as stream:
                    await anext(aiter(stream))
                    late.append(time.monotonic() - began)
        assert statistics.median(late) < 0.4 * DECODE_STEP, late


async def test_tokens_are_the_same_in_company_that_comes_and_goes(deployment):
    async def ask(client, number, limit):
        found = []
        options = {"max_tokens": 5, "ignore_eos": True, "temperature": 1.0, "seed": number}
        async with client.stream(token_ids=prompt(100 + number), **options) as stream:
            async for delta in stream:
                found += delta.token_ids
                if len(found) >= limit:
                    break
        return found

    async with AsyncClient(deployment.gateway.address) as client:
        alone = [await ask(client, number, 5) for number in range(3)]
        limits = [1 + number % 7 for number in range(REQUESTS)]
        company = await asyncio.gather(*(ask(client, n, limit) for n, limit in enumerate(limits)))
        again = await asyncio.gather(*(ask(client, n, 5) for n in range(REQUESTS)))
    assert again[:3] == alone
    for limit, cut, whole in zip(limits, company, again, strict=True):
        assert len(whole) == 5 and cut == whole[: len(cut)] and len(cut) >= min(limit, 5)
