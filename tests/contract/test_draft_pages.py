"""What a drafter keeps of a prompt crosses the split: real nodes, with pages over both transports."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager, suppress

import pytest
from test_first_drafts import MADE, MOST, answer_of, running, save_eagle3
from test_roles import running as process_of
from test_roles import set_role

from baton.config import DecodeConfig, PrefillConfig
from baton.engine import step_loop
from baton.rpc.channel import open_channel
from baton.rpc.errors import BatonError, failed_precondition
from baton.transport import TransportError
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from baton.worker.decode import draft_pulls
from baton.worker.decode.remote_prefill import RemotePrefill
from baton.worker.decode.server import DecodeNode
from baton.worker.prefill.server import PrefillNode

RNG = random.Random(3)
LONG = [RNG.randrange(20, 900) for _ in range(150)]
PROMPTS = [LONG, LONG[:33], LONG[5:69], LONG[9:11]]


@asynccontextmanager
async def asking(decode, prefill=None):
    """ask(number, prompt) -> its tokens, and the drafts of each decode step. Without `prefill` the node
    computes it itself."""
    plans = []
    launch = decode.engine.runner.launch
    decode.engine.runner.launch = lambda plan: plans.append(plan.rows) or launch(plan)
    async with open_channel(decode._address) as channel, asyncio.timeout(120):
        call = decode_pb2_grpc.DecodeStub(channel).Generate()
        await call.write(decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=7)))

        async def ask(number, prompt, n=1, tokens=12, namespace="", lost=False):
            """`lost`: the prefill node is, meanwhile."""
            sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0, seed=1)
            start = decode_pb2.DecodeStart(
                request=number,
                token_ids=prompt,
                sampling=sampling,
                n=n,
                namespace=namespace,
                prefill=[] if prefill is None else [prefill._address],
                local_prefill_tokens=4096 if prefill is None else 0,
            )
            plans.clear()
            await call.write(decode_pb2.GenerateCommand(start=start))
            found, stats = await answer_of(call, n)
            assert lost or bool(stats.prefill_address) == (prefill is not None)
            return found, [[row.drafts for row in rows] for rows in plans if rows and rows[0].tokens is None]

        yield ask


@pytest.fixture(scope="module")
def drafts(tmp_path_factory):
    return {"eagle3": save_eagle3(tmp_path_factory.mktemp("heads") / "eagle3"), "model": "demo"}


def nodes(draft, prefill_draft, transports=("shm",)):
    made = {**MADE, "transports": transports}
    prefill = PrefillNode(PrefillConfig(**made, draft=prefill_draft, token_budget=64))
    return prefill, DecodeNode(DecodeConfig(**made, draft=draft, draft_tokens=MOST))


async def answers(decode, prefill, prompts=PROMPTS, **options):
    async with asking(decode, prefill) as ask:
        return [await ask(number, prompt, **options) for number, prompt in enumerate(prompts, 1)]


@pytest.mark.parametrize(("kind", "transports"), [("eagle3", ("shm",)), ("model", ("grpc",))])
async def test_drafts_are_those_of_one_node(drafts, monkeypatch, kind, transports):
    """From the first step on, behind prompts of several chunks; and with pages that are here already."""
    monkeypatch.setattr(draft_pulls, "WAIT_SECONDS", 20.0)
    prefill, decode = nodes(drafts[kind], drafts[kind], transports)
    async with running(prefill), running(decode):
        alone = await answers(decode, None, namespace="alone")
        assert await answers(decode, prefill) == alone
        # Of the second prompt, with which the first begins, whole pages were here.
        assert decode.core_or_none.handoffs.drafts.pulled_pages == 10 + 1 + 4 + 1 - (kind == "eagle3")
        (found,) = await answers(decode, prefill, [[*LONG[:100], 7]], n=2)
        assert found[0][0] == found[0][1] and all(found[1][0])
        await asyncio.to_thread(prefill.check_idle)
        await asyncio.to_thread(decode.check_idle)
        assert not leased(prefill)


async def test_without_these_pages_texts_are_the_same(drafts, monkeypatch):
    """They fail to come, come late or damaged, their node is lost meanwhile, or has another drafter."""
    prefill, decode = nodes(drafts["eagle3"], drafts["eagle3"])
    async with running(prefill), running(decode), asking(decode, prefill) as ask:
        async with asking(decode) as ask_alone:
            ((expected,), steps) = await ask_alone(1, LONG, namespace="alone")
        await ask(1, PROMPTS[1])
        pulls = decode.core_or_none.handoffs.drafts
        (peer,) = decode.peers._peers.values()
        receiver = peer.draft_receiver
        pull, known = receiver.pull, pulls.pulled_pages
        namespaces = iter(range(100))

        async def failing(*arguments):
            raise TransportError("no")

        async def slow(*arguments):
            await asyncio.sleep(5.0)
            await pull(*arguments)

        def broken(prompts):
            raise RuntimeError("no")

        async def lost(*arguments):
            peer.link.reset(failed_precondition("lost", "TEST"))
            await asyncio.sleep(0.2)
            raise TransportError("lost")

        async def asked(number, wait=20.0, lost=False):
            monkeypatch.setattr(draft_pulls, "WAIT_SECONDS", wait)
            # Nothing of it is known to any node.
            found, steps = await ask(number, LONG, namespace=str(next(namespaces)), lost=lost)
            assert found == [expected]
            await asyncio.to_thread(decode.check_idle)
            for _ in range(400):
                if leased(prefill):
                    await asyncio.sleep(0.05)
            assert not leased(prefill)
            return steps[0]

        assert await asked(2) == steps[0] and pulls.pulled_pages == known + 10
        monkeypatch.setattr(receiver, "pull", failing)
        assert await asked(3)
        monkeypatch.setattr(receiver, "pull", slow)
        monkeypatch.setattr(step_loop, "TICK_SECONDS", 5.0)
        began = time.monotonic()
        assert await asked(4, wait=0.5)
        assert time.monotonic() - began < 3.0, "an idle node notices"
        monkeypatch.undo()
        monkeypatch.setattr(receiver, "generations", lambda pages: [7 for _ in pages])
        assert await asked(5)
        arrive, seen = RemotePrefill.arrived, []
        monkeypatch.setattr(RemotePrefill, "arrived", lambda *own: seen.append(own[1].seen) or arrive(*own))
        assert await asked(6) and seen == [True]
        # Over gRPC nobody sees them: then the answer to the release says whether the pages were good.
        monkeypatch.setattr(receiver, "generations", lambda pages: None)
        assert await asked(7) == steps[0] and seen == [True, False]
        assert pulls.pulled_pages == known + 20
        drafter = prefill.core_or_none.prompt_drafts._drafter
        monkeypatch.setattr(drafter, "fill", broken)
        assert await asked(8) and await asked(9)
        assert "DRAFTER_FAILED" in [each.reason for each in prefill.load().problems]
        assert len(drafter._waiting) <= 1, "nothing gathers for it any more"
        monkeypatch.setattr(receiver, "pull", lost)
        await asked(10, lost=True)
        assert pulls.pulled_pages == known + 20
        assert not pulls.pulls.running
    other, decode = nodes(drafts["eagle3"], "demo")[0], nodes(drafts["eagle3"], "off")[1]
    async with running(other), running(decode):
        ((found, steps),) = await answers(decode, other, [LONG])
        assert found == [expected] and steps[0]
        assert not decode.core_or_none.handoffs.drafts.pulled_pages


async def test_a_drafter_stays_when_its_node_changes_its_role(drafts, monkeypatch):
    """A node that began as a prefill node drafts nothing, and asks for no such pages; one that began as a
    decode node lends them; back in its role each does as before."""
    monkeypatch.setattr(draft_pulls, "WAIT_SECONDS", 20.0)
    first, second = nodes(drafts["eagle3"], drafts["eagle3"])
    async with process_of(first) as one, process_of(second) as two:
        (expected,) = await answers(two.node, one.node, [LONG], namespace="before")
        pulls = two.node.core_or_none.handoffs.drafts
        assert pulls.pulled_pages == 10 and expected[1][0]
        await set_role(one, "decode")
        await set_role(two, "prefill")
        assert one.node.draft_layout is None
        (found,) = await answers(one.node, two.node, [LONG], namespace="swapped")
        assert found[0] == expected[0] and not any(map(any, found[1]))
        assert not two.node.core_or_none.prompt_drafts._launched
        async with running(nodes(drafts["eagle3"], "off")[1]) as third:
            assert await answers(third, two.node, [LONG], namespace="lent") == [expected]
            assert third.core_or_none.handoffs.drafts.pulled_pages == 10
        await set_role(one, "prefill")
        await set_role(two, "decode")
        assert await answers(two.node, one.node, [LONG], namespace="after") == [expected]
        assert two.node.core_or_none.handoffs.drafts.pulled_pages == 10
        for process in (one, two):
            await asyncio.to_thread(process.node.check_idle)
        assert not leased(one.node)


async def test_a_role_waits_for_copies_of_drafts(drafts, monkeypatch):
    """Nobody else would hear of their end, and give their pages back."""
    monkeypatch.setattr(draft_pulls, "WAIT_SECONDS", 2.0)
    monkeypatch.setattr("baton.worker.process.QUIET_SECONDS", 0.2)
    first, second = nodes(drafts["eagle3"], drafts["eagle3"])
    async with running(first), process_of(second) as process, asking(second, first) as ask:
        await ask(1, PROMPTS[1])
        (peer,) = second.peers._peers.values()
        ends = asyncio.Event()

        async def hangs(*arguments):
            while not ends.is_set():
                with suppress(asyncio.CancelledError):
                    await ends.wait()
            raise TransportError("it took too long")

        monkeypatch.setattr(peer.draft_receiver, "pull", hangs)
        assert await ask(2, LONG)
        assert second.core_or_none.handoffs.drafts.pulls.running
        asyncio.get_running_loop().call_later(20.0, ends.set)
        with pytest.raises(BatonError, match="stays a decode node"):
            await set_role(process, "prefill")
        ends.set()
        await set_role(process, "prefill")
        assert not second.engine.drafter.cache.pending


async def test_a_drafter_that_failed_is_sent_nothing(drafts):
    first, second = nodes(drafts["eagle3"], drafts["eagle3"])
    async with running(first), running(second), asking(second, first) as ask:
        second.core_or_none.scheduler.drafts.broken = "it failed"
        assert await ask(1, LONG)
        assert not second.core_or_none.handoffs.drafts.pulls.begun


def leased(prefill):
    """What is lent of the drafter's pages, and what waits to be freed."""
    cache = prefill.core_or_none.prompt_drafts._drafter.slots.cache
    kept = {id(kv.block_table) for kv in prefill.core_or_none.prompt_drafts._drafter.slots._kept}
    return [block_table for block_table in cache._block_tables if id(block_table) not in kept] + [
        cache.pending
    ] * bool(cache.pending)
