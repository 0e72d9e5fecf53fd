"""Chats in rotation that take more pages than the pool has: the host tier gives them back, as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from asking import ask, greedy
from checkpoints import make_model, save
from deployment import Deployment
from polling import until
from process import Process

CHATS, TURNS, FIRST, MORE, OUTPUT = 6, 4, 120, 48, 8
POOL = ("--kv-tokens", "480")
TIER = (*POOL, "--host-memory", "64M")


@dataclass
class Pair:
    """Workers that differ in their tiers only, each behind a gateway of its own."""

    deployment: Deployment
    workers: dict[str, Process]
    gateways: dict[str, Process]
    disk: Path


@pytest.fixture(
    scope="module",
    params=[("qwen3", "prefill"), ("qwen3", "decode"), ("gemma3", "prefill"), ("qwen3", "prefill", "2")],
    ids="-".join,
)
def pair(request, tmp_path_factory, deployments) -> Iterator[Pair]:
    family, role, *ranks = request.param
    of_ranks = ("--tp", *ranks) if ranks else ()
    folder = tmp_path_factory.mktemp("tier")
    deployment = Deployment(folder, save(make_model(family), folder / "model"))
    flags = {"plain": POOL, "tier": TIER, "disk": (*TIER, "--disk", str(folder / "disk"))}
    workers = {name: deployment.add_worker(role, *flags[name], *of_ranks) for name in flags}
    if role == "decode":
        gateways = {name: deployment.add_gateway([worker]) for name, worker in workers.items()}
    else:
        # As small: it soon has nothing to lend of what a prefill node has forgotten.
        decode = deployment.add_worker("decode", "--local-prefill-tokens", "0", *POOL)
        gateways = {name: deployment.add_gateway([decode], [worker]) for name, worker in workers.items()}
    with deployment:
        deployments.append(deployment)
        yield Pair(deployment, workers, gateways, folder / "disk")


async def _rotate(address: str, chats: list[list[int]], turns: int, rng: random.Random) -> None:
    """Each chat in turn asks with all that was said and some new tokens; the answers are added to it."""
    for _ in range(turns):
        for chat in chats:
            chat += [rng.randrange(3, 200) for _ in range(MORE if chat else FIRST)]
            (answer,) = await ask(address, [greedy(chat, OUTPUT)])
            chat += answer.choices[0].token_ids


async def test_chats_larger_than_the_pool_are_not_computed_again(pair):
    said, computed = {}, {}
    for name in ("plain", "tier"):
        gateway = pair.gateways[name]
        before = pair.workers[name].load().computed_tokens
        chats: list[list[int]] = [[] for _ in range(CHATS)]
        await _rotate(gateway.address, chats, TURNS, random.Random(0))
        said[name], computed[name] = chats, pair.workers[name].load().computed_tokens - before
    assert said["tier"] == said["plain"]
    fresh = sum(len(chat) for chat in said["tier"])
    load = pair.workers["tier"].load()
    assert load.promotions >= CHATS * (TURNS - 1) - 2
    assert load.host_pages.cached and load.promoted_pages and load.demoted_pages
    assert computed["tier"] < 1.35 * fresh, "incomplete pages and the last token of each turn are computed"
    assert computed["plain"] > 1.9 * computed["tier"]
    pair.deployment.assert_idle()


async def test_a_node_with_a_tier_starts_again_with_nothing(pair):
    worker, gateway = pair.workers["tier"], pair.gateways["tier"]
    chats: list[list[int]] = [[] for _ in range(3)]
    await _rotate(gateway.address, chats, 2, random.Random(1))
    worker.kill()
    worker.start()
    worker.wait_ready()
    again: list[list[int]] = [[] for _ in range(3)]
    await _rotate(gateway.address, again, 2, random.Random(1))
    assert again == chats
    pair.deployment.assert_idle()


async def test_a_node_with_a_disk_starts_again_with_what_it_had(pair, request):
    """But for what was torn, here the last pages; with a window, which has pages at a prompt's end only, they
    are all that counts."""
    worker, gateway = pair.workers["disk"], pair.gateways["disk"]
    prompt = [random.Random(2).randrange(3, 200) for _ in range(400)]
    await ask(gateway.address, [greedy(prompt, OUTPUT)])
    more = [*prompt, 5, 6, 7]
    (expected,) = await ask(pair.gateways["plain"].address, [greedy(more, OUTPUT)])
    files = lambda: sorted(pair.disk.rglob("*-0"))  # noqa: E731
    await until(lambda: worker.load().disk_written_pages >= 400 // 16, "its pages are written")
    worker.kill()
    # A file has all tokens before its page, too: those of the last pages are the largest.
    for path in sorted(files(), key=lambda path: path.stat().st_size)[-2:]:
        path.write_bytes(path.read_bytes()[:-1])
    worker.start()
    worker.wait_ready()
    peers = lambda: [peer for node in pair.deployment.of("decode") for peer in node.info().peers]  # noqa: E731
    await until(lambda: all(peer.connected for peer in peers()), "the decode node reaches it")
    (after,) = await ask(gateway.address, [greedy(more, OUTPUT)])
    assert after.choices[0].token_ids == expected.choices[0].token_ids
    usage = after.usage
    assert usage.disk_tokens == usage.cached_tokens and usage.host_tokens == usage.peer_tokens == 0
    assert (usage.cached_tokens > 0) == ("gemma3" not in request.node.name)
    load = worker.load()
    assert load.disk_reads == 1 and set(load.disk_faults) == {"damaged"}
    await until(lambda: len(files()) >= 400 // 16, "what was torn is written again")
    pair.deployment.assert_idle()
