"""A split deployment whose pages travel over UCX, by TCP. Skipped where nixl is not installed."""

from __future__ import annotations

import asyncio
import time

import pytest
from asking import ask, greedy
from deployment import Deployment
from polling import until

from baton.client import Completion

pytest.importorskip("nixl", reason="nixl is not installed: pip install 'baton-serve[nixl]'")

LENGTHS = [17, 33, 64, 100, 160, 300]
OUTPUT = 24
WORKER = ("--transports", "nixl", "--kv-tokens", "8192", "--local-prefill-tokens", "0")


def test_split_over_nixl_equals_aggregated_also_after_a_restart(qwen3, tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    folder, reference = qwen3
    answers = reference.answers(LENGTHS, OUTPUT)
    deployment = Deployment(tmp_path, folder)
    prefill = deployment.add_worker("prefill", *WORKER[:4])
    decode = deployment.add_worker("decode", *WORKER)
    split = deployment.add_gateway([decode], [prefill])
    alone = deployment.add_gateway([decode])

    def tokens_of(gateway, namespace: str) -> list[Completion]:
        requests = [greedy(answer.prompt, OUTPUT, namespace=namespace) for answer in answers]
        completions = asyncio.run(ask(gateway.address, requests))
        assert [each.token_ids for each in completions] == [answer.tokens for answer in answers]
        return completions

    def handed_off(completions: list[Completion]) -> list[bool]:
        return [each.stats.transport == "nixl" and each.stats.pulled_pages > 0 for each in completions]

    async def reconnected() -> None:
        await until(lambda: any(peer.connected for peer in decode.info().peers), "prefill connected again")

    with deployment:
        assert all(each.stats.pulled_pages == 0 for each in tokens_of(alone, "alone"))
        assert all(handed_off(tokens_of(split, "split")))
        prefill.kill()
        tokens_of(split, "without")
        prefill.start()
        prefill.wait_ready()
        asyncio.run(reconnected())
        deadline = time.monotonic() + 20
        while not all(handed_off(tokens_of(split, f"again {time.monotonic()}"))):
            assert time.monotonic() < deadline
        deployment.assert_idle()
        assert "Traceback" not in prefill.log.read_text() + decode.log.read_text()
