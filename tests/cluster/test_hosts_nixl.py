"""Pages between two hosts (network namespaces) over UCX, by TCP; the cable is cut in mid-pull. Skipped where
nixl is not installed."""

from __future__ import annotations

import asyncio

import pytest
from asking import ask, greedy
from hosts.host import CannotMakeHosts
from hosts.lan import Lan, LanDeployment
from polling import until

pytest.importorskip("nixl", reason="nixl is not installed: pip install 'baton-serve[nixl]'")

OUTPUT = 16
LONG = 900
KBIT = 1500
CUT_SECONDS = 60.0
"""A request whose pages do not come has ended by then: a pull that brings nothing fails after 20 s."""
WORKER = ("--transports", "nixl", "--kv-tokens", "8192")


async def test_pages_cross_the_wire_and_a_cut_ends_in_the_right_tokens(qwen3, tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    answers = qwen3[1].answers([64, 300, LONG], OUTPUT)
    lan = None
    try:
        lan = Lan()
        deployment = LanDeployment(tmp_path, qwen3[0], lan)
        prefill = deployment.at(lan.right).add_worker("prefill", *WORKER)
        decode = deployment.at(lan.left).add_worker("decode", *WORKER, "--local-prefill-tokens", "0")
        gateway = deployment.at(lan.front).add_gateway([decode], [prefill])
        with deployment:
            before = lan.left_right.carried
            completions = await ask(gateway.outside, [greedy(each.prompt, OUTPUT) for each in answers])
            assert [each.token_ids for each in completions] == [each.tokens for each in answers]
            assert all(s.transport == "nixl" and s.pulled_pages for s in (c.stats for c in completions))
            assert lan.left_right.carried - before > sum(each.stats.pulled_bytes for each in completions)
            lan.left_right.throttle(KBIT)
            before = lan.left_right.carried
            request = greedy(answers[-1].prompt, OUTPUT, namespace="cut")
            asking = asyncio.create_task(ask(gateway.outside, [request], CUT_SECONDS))
            await until(lambda: lan.left_right.carried - before > 100_000, "a pull is under way")
            lan.left_right.cut()
            assert (await asking)[0].token_ids == answers[-1].tokens
            deployment.assert_idle(30)
            lan.left_right.throttle(0)
            lan.left_right.heal()
    except CannotMakeHosts as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        if lan is not None:
            lan.close()
