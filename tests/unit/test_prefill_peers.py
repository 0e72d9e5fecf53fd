"""worker.decode.peers: which prefill nodes are usable, and that forgotten addresses make room for others."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from baton.config import DecodeConfig
from baton.handoff.messages import AttemptName, Beat, CancelPrefill, StartPull
from baton.rpc.errors import BatonError, unavailable
from baton.v1 import common_pb2, prefill_pb2
from baton.worker import peers as module
from baton.worker.decode.peers import PrefillPeers
from baton.worker.peers import FORGET_SECONDS, PagePeer
from baton.worker.shell import WorkerShell
from virtual_time import skip_waits

LAYOUT = common_pb2.Layout(model_fingerprint="m", page_size=16, version=1)


@pytest.fixture(autouse=True)
async def virtual_time(monkeypatch):
    skip_waits(monkeypatch)


class Link:
    """Connected from the start to a node that sends nothing by itself."""

    connected, last_error, error, closed = True, None, None, False

    def __init__(self, peer):
        self.peer, self.sent = peer, []

    def start(self):
        pass

    def reset(self, error):
        self.error = error

    def send(self, message):
        self.sent.append(message)

    async def close(self):
        self.closed = True


class Receiver:
    kind, sees_steps, closed = "shm", True, False

    async def close(self):
        self.closed = True


class Shell:
    """A decode node's shell without an engine."""

    layout, incarnation, model_info = LAYOUT, 7, SimpleNamespace(vocab_size=100)
    hidden_form = None
    draft_layout = None
    has_drafts_of = WorkerShell.has_drafts_of

    def __init__(self):
        self.now, self.calls, self.links = 1000.0, [], {}
        self.steps = self

    def call(self, function):
        self.calls.append(function)

    def clock(self):
        return self.now

    def spawn(self, work, name):
        return asyncio.get_running_loop().create_task(work)

    def make_link(self, address, peer):
        link = self.links[address] = Link(peer)
        return link

    def endpoints(self):
        return []

    async def open_receiver(self, endpoints, address):
        return Receiver()


async def test_forgotten_addresses_make_room(monkeypatch):
    monkeypatch.setattr(module, "MAX_PEERS", 4)
    shell = Shell()
    peers = PrefillPeers(shell, DecodeConfig(prefill=("127.0.0.1:1",), request_seconds=30.0))
    peers.connect("127.0.0.1:1")
    for number in range(3):
        peers.check_room(["127.0.0.1:1", f"127.0.0.2:{number + 1}"])
        peers.connect(f"127.0.0.2:{number + 1}")
    with pytest.raises(BatonError, match="at most 4 prefill nodes"):
        peers.check_room(["127.0.0.3:1"])
    shell.now += 30.0 + FORGET_SECONDS + 1.0
    peers.check_room(["127.0.0.3:1"])
    peers.connect("127.0.0.3:1")
    assert {peer.address for peer in peers.describe()} == {"127.0.0.1:1", "127.0.0.3:1"}
    await asyncio.sleep(0.01)
    assert [address for address, link in shell.links.items() if link.closed] == [
        f"127.0.0.2:{number + 1}" for number in range(3)
    ]
    await peers.close()


async def test_a_pool_that_opens_after_its_owner_has_restarted_is_closed():
    shell, opening = Shell(), []

    async def open_receiver(endpoints, address):
        opening.append(asyncio.get_running_loop().create_future())
        return await opening[-1]

    shell.open_receiver = open_receiver
    peers = PrefillPeers(shell, DecodeConfig())
    peers.connect("p0")
    link = shell.links["p0"]
    for incarnation in (3, 4):
        answer = prefill_pb2.PrefillWelcome(incarnation=incarnation, layout=LAYOUT)
        link.peer.welcomed(prefill_pb2.PrefillResponse(events=[prefill_pb2.PrefillEvent(welcome=answer)]))
        await asyncio.sleep(0.01)
        if incarnation == 3:
            link.peer.lost(unavailable("it ended", "PEER_LOST"))
    old, new = Receiver(), Receiver()
    opening[0].set_result(old)
    await asyncio.sleep(0.01)
    assert old.closed and not peers.usable
    opening[1].set_result(new)
    await asyncio.sleep(0.01)
    assert [peer.incarnation for peer in peers.describe()] == [4] and peers.usable == {"p0"}
    link.peer.lost(unavailable("it ended again", "PEER_LOST"))
    assert link.peer.receiver is None, "at once: the next may open before this one is closed"
    await asyncio.sleep(0.01)
    assert new.closed and not peers.usable
    await peers.close()


@pytest.mark.parametrize(
    ("layout", "usable"),
    [(LAYOUT, True), (common_pb2.Layout(model_fingerprint="m", page_size=8, version=1), False)],
)
async def test_a_node_with_another_page_layout_is_not_used(layout, usable):
    shell = Shell()
    peers = PrefillPeers(shell, DecodeConfig())
    peers.connect("p0")
    link = shell.links["p0"]
    welcome = prefill_pb2.PrefillEvent(welcome=prefill_pb2.PrefillWelcome(incarnation=3, layout=layout))
    link.peer.welcomed(prefill_pb2.PrefillResponse(events=[welcome]))
    await asyncio.sleep(0.01)
    assert peers.usable == ({"p0"} if usable else set())
    assert len(shell.calls) == usable, "the core hears of a usable node"
    if not usable:
        assert (
            link.error.reason == "LAYOUT_MISMATCH"
            and "page_size is 8 at the prefill node and 16 at the decode node" in str(link.error)
        )
    await peers.close()


@pytest.mark.parametrize("kinds", [[], ["finished"], ["welcome", "finished"]])
async def test_a_node_that_does_not_begin_with_a_welcome_alone_is_not_used(kinds):
    shell = Shell()
    peers = PrefillPeers(shell, DecodeConfig())
    peers.connect("p0")
    parts = {"welcome": prefill_pb2.PrefillWelcome(layout=LAYOUT), "finished": prefill_pb2.PrefillFinished()}
    events = [prefill_pb2.PrefillEvent(**{kind: parts[kind]}) for kind in kinds]
    shell.links["p0"].peer.welcomed(prefill_pb2.PrefillResponse(events=events))
    await asyncio.sleep(0.01)
    assert shell.links["p0"].error.reason == "PROTOCOL" and not peers.usable and not shell.calls
    await peers.close()


async def test_what_is_lost_is_said_of_configured_nodes_for_ever_and_of_named_ones_for_a_while():
    shell = Shell()
    peers = PrefillPeers(shell, DecodeConfig(prefill=("own:1",)))
    for address in ("own:1", "named:1"):
        peers.connect(address)
    assert [text.split()[0] for text in peers.lost()] == ["own:1", "named:1"]
    shell.now += FORGET_SECONDS + 1.0
    assert [text.split()[0] for text in peers.lost()] == ["own:1"]
    await peers.close()


@pytest.mark.parametrize(("grace_ms", "shortened"), [(1500, [1.5]), (0, [])])
async def test_heartbeats_are_as_frequent_as_a_peers_leases_need(grace_ms, shortened):
    shell, found = Shell(), []
    shell.open_receiver = lambda endpoints, address: opened()

    async def opened():
        return Receiver()

    peers = PrefillPeers(shell, DecodeConfig())
    peers.connect("p0")
    answer = prefill_pb2.PrefillWelcome(incarnation=3, layout=LAYOUT, lease_grace_ms=grace_ms)
    response = prefill_pb2.PrefillResponse(events=[prefill_pb2.PrefillEvent(welcome=answer)])
    shell.links["p0"].peer.welcomed(response)
    await asyncio.sleep(0.01)
    core = SimpleNamespace(fetches=SimpleNamespace(shorten_beat=found.append))
    for call in shell.calls:
        with contextlib.suppress(AttributeError):  # what else the core is told
            call(core, 0.0)
    assert found == shortened and peers.usable == {"p0"}
    await peers.close()


@pytest.mark.parametrize(
    ("answered", "seconds", "closed"), [(False, 6.0, True), (False, 5.0, False), (True, 6.0, False)]
)
async def test_a_peer_that_answers_no_heartbeat_is_connected_to_again(answered, seconds, closed):
    """Counted from the first that was not answered."""
    shell = Shell()
    peer = PagePeer(shell, shell.make_link, lambda core: core, "p0", 5.0)
    peer.send(Beat("p0"))
    shell.now += seconds - 1.0
    if answered:
        peer.received(prefill_pb2.PrefillResponse())
    peer.send(Beat("p0"))
    shell.now += 1.0
    peer.send(CancelPrefill("p0", AttemptName(1, 2, 3, 4)))
    assert peer.link.error is None
    peer.send(Beat("p0"))
    assert (peer.link.error is not None and peer.link.error.reason == "SILENT") == closed
    assert len(peer.link.sent) == (3 if closed else 4)


async def test_pulls_are_measured_by_the_tokens_of_their_pages():
    shell, measured = Shell(), []
    peers = PrefillPeers(shell, DecodeConfig())
    peers.pull_meter.add = lambda tokens, seconds: measured.append((tokens, seconds))

    async def run(receiver):
        pass

    for number, seconds in enumerate((0.25, None)):
        effect = StartPull("p0", number, ((1, 2), (3, 4), (5, 6)), 1)
        pull = peers._pulls[False, number] = SimpleNamespace(run=run, seconds=seconds)
        await peers._pull(None, pull, effect)
    assert measured == [(48, 0.25)] and not peers._pulls
