"""Chats whose turns land on any node: what one has cached, the others pull rather than compute."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence

import pytest
from deployment import Deployment
from process import Process

from baton.client import Client

PAGE = 16
TURNS = 8
OUTPUT = 12


@pytest.fixture(scope="module")
def split(tmp_path_factory, deployments) -> Iterator[Deployment]:
    """Any prefill and any decode node gets a turn, whatever it holds."""
    folder = tmp_path_factory.mktemp("sources")
    flags = ("--routing", "round-robin", "--split", "always")
    with Deployment.split(folder, "demo", prefill=2, decode=2, gateway_flags=flags) as deployment:
        deployments.append(deployment)
        yield deployment


def computed(workers: Sequence[Process]) -> int:
    """Prompt tokens that these workers have computed."""
    loads = [worker.load() for worker in workers]
    return sum(load.prompt_tokens - load.cached_tokens for load in loads)


class Chat:
    """Each turn's prompt is all that was said before, and some new tokens."""

    def __init__(self, client: Client, seed: int) -> None:
        self._draw = random.Random(seed)
        self._client = client
        self.tokens: list[int] = []
        self.new = self.pages = 0
        """New tokens of all prompts; those of incomplete last pages, which turns compute again."""

    def turn(self) -> None:
        count, held = self._draw.randrange(100, 280), max(0, len(self.tokens) - 1)
        self.tokens += [self._draw.randrange(5, 4000) for _ in range(count)]
        self.new += len(self.tokens) - held
        self.pages += held % PAGE
        answer = self._client.generate(
            token_ids=self.tokens, temperature=0.0, max_tokens=OUTPUT, ignore_eos=True
        )
        self.tokens += answer.choices[0].token_ids


def test_turns_compute_their_new_tokens_alone_wherever_they_land(split: Deployment):
    prefill = split.of("prefill")
    before, chat = computed(prefill), Chat(split.client(), 1)
    for _ in range(TURNS):
        chat.turn()
        time.sleep(0.15)  # reports of caches leave every 50 ms
    assert computed(prefill) - before - chat.pages <= 1.05 * chat.new
