"""Between services one message a step carries the tokens of all requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import ask, greedy
from deployment import Deployment
from reference import Reference

ROWS = 64
OUTPUT = 48


@pytest.fixture(scope="module")
def deployment(qwen3: tuple[Path, Reference], tmp_path_factory, deployments) -> Iterator[Deployment]:
    worker = ("--max-rows", "64", "--kv-tokens", "32768")
    with Deployment.split(tmp_path_factory.mktemp("messages"), qwen3[0], worker=worker) as deployment:
        deployments.append(deployment)
        yield deployment


async def test_at_most_one_message_a_step_when_aggregated(deployment, qwen3):
    """Every token, prompt event and end of a request comes from a step: not one message beside them."""
    steps, messages = await grown(deployment, 30, shift=0)
    assert OUTPUT <= messages <= steps
    # Rows ran together, in the end all of them: far fewer messages than the tokens' number.
    assert messages < ROWS * OUTPUT / 4


async def test_at_most_one_message_a_step_and_hand_off_when_split(deployment, qwen3):
    """A first token sampled elsewhere is sent at once, between steps: one message more a hand-off at most."""
    steps, messages = await grown(deployment, 100, shift=1)
    assert deployment.decode.load().pulled_pages == 7 * ROWS, "all handed off"
    assert messages <= steps + ROWS


async def grown(deployment: Deployment, length: int, shift: int) -> tuple[int, int]:
    """Steps and messages of the decode node for ROWS prompts of this length, sent at once."""
    before = deployment.decode.load()
    prompts = [[shift, *((7 * number + i) % 300 for i in range(length - 1))] for number in range(ROWS)]
    completions = await ask(deployment.gateway.address, [greedy(prompt, OUTPUT) for prompt in prompts])
    assert all(len(completion.token_ids) == OUTPUT for completion in completions)
    after = deployment.decode.load()
    return after.steps - before.steps, after.messages - before.messages
