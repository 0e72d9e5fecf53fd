"""Ranks of several hosts: how they come together, and pages of which each host keeps a part."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton.config import DecodeConfig
from baton.layers.shard import Shard
from baton.ranks import hosts as ranks_hosts
from baton.ranks.channel import Channel, ChannelClosed, ChannelError, Seal
from baton.ranks.followers import End, Setup
from baton.ranks.hosts import MAGIC, NONCE, PAGES, PLANS, Join, JoinError, Master, join
from baton.ranks.pages import PagesOfHosts, Part, RemotePart, serve_pages
from baton.rpc.errors import BatonError
from baton.transport import HostPages, TransportError
from baton.worker.follower import Follower
from baton.worker.hosts import check_hosts, master_address

SECRET = "a secret of sixteen or more"
SECONDS = 60.0


@pytest.fixture
def master():
    master = Master("127.0.0.1", 0, SECRET, [(1, PLANS)], {"--dtype": "float32"})
    master.start({"store": ["127.0.0.1", 1]})
    yield master
    master.close()


def come(master, secret=SECRET, rank=1, purpose=PLANS, **settings):
    what = Join(rank, purpose, {"--dtype": "float32"} | settings)
    return join("127.0.0.1", master.port, secret, what, seconds=SECONDS)


def test_a_rank_joins_and_both_sides_talk(master):
    joined = come(master)
    (channel,) = master.await_all(SECONDS).values()
    assert joined.reply == {"store": ["127.0.0.1", 1]} and joined.own == "127.0.0.1"
    channel.send_plan(b"plan", 3)
    channel.send({"any": "object"})
    joined.channel.send_bytes(bytes(2**20))
    assert joined.channel.next() == (3, b"plan")
    assert joined.channel.next() == {"any": "object"}
    assert channel.receive_bytes(SECONDS) == bytes(2**20)
    channel.close()
    with pytest.raises(ChannelClosed):
        joined.channel.next()
    joined.channel.close()


def test_a_failure_to_accept_does_not_end_listening(monkeypatch):
    accept, failures = socket.socket.accept, iter([OSError(errno.EMFILE, "too many open files")])

    def accept_later(listener):
        for failure in failures:
            raise failure
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    with contextlib.closing(Master("127.0.0.1", 0, SECRET, [(1, PLANS)], {"--dtype": "float32"})) as master:
        master.start({})
        come(master).channel.close()


def test_another_secret_is_refused_on_both_sides(master):
    with pytest.raises(JoinError, match="another cluster secret: give both the same --cluster-secret-file"):
        come(master, secret="quite another secret")
    come(master).channel.close()  # the master still listens
    for channel in master.await_all(SECONDS).values():
        channel.close()


@pytest.mark.parametrize(
    "garbage",
    [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(64), MAGIC + bytes(64)],
    ids=["nothing", "http", "no proof"],
)
def test_a_stranger_is_closed_out(master, garbage):
    answer = b""
    with socket.create_connection(("127.0.0.1", master.port), SECONDS) as stranger:
        stranger.settimeout(SECONDS)
        stranger.sendall(garbage)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            with contextlib.suppress(OSError):  # it may be closed already
                stranger.shutdown(socket.SHUT_WR)
            while data := stranger.recv(4096):
                answer += data
    assert len(answer) in (0, 64)
    come(master).channel.close()
    for channel in master.await_all(SECONDS).values():
        channel.close()


def test_a_stranger_who_says_little_by_little_is_closed_out(master, monkeypatch):
    monkeypatch.setattr("baton.ranks.hosts.HANDSHAKE_SECONDS", 0.3)
    hello, said = MAGIC + bytes(NONCE), 0
    with socket.create_connection(("127.0.0.1", master.port), SECONDS) as stranger:
        stranger.settimeout(0.1)
        for said in range(len(hello)):
            try:
                stranger.sendall(hello[said : said + 1])
                if not stranger.recv(64):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert said < len(hello) - 1


def test_more_strangers_than_handshakes_at_a_time_keep_nobody_out(monkeypatch):
    monkeypatch.setattr("baton.ranks.hosts.MAX_HANDSHAKES", 2)
    monkeypatch.setattr("baton.ranks.hosts.HANDSHAKE_SECONDS", 1.0)
    master = Master("127.0.0.1", 0, SECRET, [(1, PLANS)], {"--dtype": "float32"})
    with contextlib.ExitStack() as strangers:
        for _ in range(2):
            strangers.enter_context(socket.create_connection(("127.0.0.1", master.port), SECONDS))
        master.start({})
        come(master).channel.close()
    for channel in master.await_all(SECONDS).values():
        channel.close()
    master.close()


def test_a_rank_of_another_version_may_say_more(master):
    with socket.create_connection(("127.0.0.1", master.port), SECONDS) as own:
        nonces = bytes(NONCE)
        own.sendall(MAGIC + nonces)
        nonces += ranks_hosts._read(own, 2 * NONCE, time.monotonic() + SECONDS)[:NONCE]
        own.sendall(ranks_hosts._proof(SECRET.encode(), b"rank", nonces))
        channel = ranks_hosts._channel(own, SECRET.encode(), nonces, master=False)
    said = {"rank": 1, "purpose": PLANS, "settings": {"--dtype": "float32", "version": 2}, "more": 1}
    channel.send_bytes(json.dumps(said).encode())
    assert "version is 2" in json.loads(bytes(channel.receive_bytes(SECONDS)))["refused"]
    channel.close()


def test_a_stop_ends_the_wait_for_other_hosts(master):
    stopping = threading.Event()
    threading.Timer(0.1, stopping.set).start()
    with pytest.raises(JoinError, match="stopped before all ranks"):
        master.await_all(SECONDS, stopping)


def test_a_rank_that_has_come_waits_for_the_others_as_long_as_rank_0_does(tmp_path):
    """Meeting has a short time limit, which begins when all have come."""
    ours, theirs = socket.socketpair()
    rank_0 = Channel(ours, SECONDS)
    config = DecodeConfig(model="demo", tp=2, threads=torch.get_num_threads())
    setup = Setup(Shard(1, 2), tmp_path / "store", 0, config)
    with ThreadPoolExecutor(1) as threads:
        follower = threads.submit(Follower, setup, Channel(theirs, SECONDS))
        assert rank_0.receive(SECONDS) == "started"
        rank_0.send(End())
        with pytest.raises(ChannelClosed, match="before all ranks have come"):
            follower.result(SECONDS)
    rank_0.close()


def test_hosts_with_different_flags_are_named(master):
    with pytest.raises(JoinError, match=r"--dtype is 'bfloat16' on rank 1's host and 'float32' on rank 0's"):
        come(master, **{"--dtype": "bfloat16"})
    with pytest.raises(JoinError, match="make them equal"):
        master.await_all(SECONDS)


def test_a_rank_that_comes_twice_is_refused(master):
    come(master).channel.close()
    with pytest.raises(JoinError, match="give each host its own --node-rank"):
        come(master)


def test_a_rank_that_does_not_come_is_named(master):
    with pytest.raises(JoinError, match=r"rank 1 of other hosts did not come within 0\.1 s"):
        master.await_all(0.1)


def test_a_master_that_is_not_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(JoinError, match=f"127.0.0.1:{port} cannot be reached"):
        join("127.0.0.1", port, SECRET, Join(1, PLANS, {}), seconds=0.1)


@pytest.mark.parametrize("change", ["byte", "repeat", "drop"])
def test_a_message_that_was_changed_on_the_way_is_noticed(change):
    """Or repeated, or left out."""
    sender, receiver = Seal(b"one", b"other"), Seal(b"other", b"one")
    first, second = sender.close(b"first"), sender.close(b"second")
    if change == "byte":
        wrong = first[:-1] + b"?"
    elif change == "repeat":
        assert receiver.open(first) == b"first"
        wrong = first
    else:
        wrong = second
    with pytest.raises(ChannelError, match="has not sent"):
        receiver.open(wrong)


PAGE = 24
COUNT = 5


class Hosts:
    """One worker's pages on several hosts: `parts` of a page each; the first is rank 0's."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.memory = [bytearray(COUNT * part.count) for part in parts]
        self.served: list[threading.Thread] = []
        others = []
        for part, memory in zip(parts[1:], self.memory[1:], strict=True):
            ours, theirs = socket.socketpair()
            there = Channel(theirs, SECONDS)
            thread = threading.Thread(target=self.serve, args=(there, memory, part.count))
            thread.start()
            self.served.append(thread)
            others.append(RemotePart(part, Channel(ours, SECONDS)))
        own = HostPages(memoryview(self.memory[0]), parts[0].count)
        self.pages = PagesOfHosts(PAGE, own, parts[0], others)
        self.errors: list[ChannelError] = []

    def serve(self, channel, memory, count):
        try:
            serve_pages(channel, memoryview(memory), count)
        except ChannelError as error:
            self.errors.append(error)
            channel.close()

    def close(self):
        self.pages.close()
        for thread in self.served:
            thread.join(SECONDS)
            assert not thread.is_alive()


@pytest.fixture(
    params=[
        [Part(0, 12), Part(12, 12)],
        [Part(0, 8), Part(8, 8), Part(16, 8)],
        [Part(0, 24), Part(0, 24)],  # all hold all: latents
        [Part(0, 16), Part(8, 16)],  # a head that two hosts hold
    ],
    ids=["halves", "thirds", "copies", "overlap"],
)
def hosts(request):
    hosts = Hosts(request.param)
    yield hosts
    hosts.close()


async def test_pages_are_written_to_the_hosts_that_keep_them_and_read_from_them(hosts):
    written = {page: bytes((page * 50 + i) % 251 for i in range(PAGE)) for page in (3, 0)}
    writer = hosts.pages.writer()
    for page, data in written.items():
        for offset in range(0, PAGE, 7):
            writer.write(page, offset, data[offset : offset + 7])
    await writer.finish()
    for part, memory in zip(hosts.parts, hosts.memory, strict=True):
        for page in range(COUNT):
            expected = written.get(page, bytes(PAGE))[part.first : part.end]
            assert memory[page * part.count : (page + 1) * part.count] == expected
    reader = hosts.pages.reader()
    for page in range(COUNT):
        assert bytes(await reader.read(page)) == written.get(page, bytes(PAGE))


def serve_until_closed(channel, memory, page_bytes):
    with contextlib.suppress(ChannelError):
        serve_pages(channel, memoryview(memory), page_bytes)


async def test_a_write_ends_when_the_other_host_has_its_part():
    ours, theirs = socket.socketpair()
    other, there = RemotePart(Part(0, PAGE), Channel(ours, SECONDS)), Channel(theirs, SECONDS)
    pages = PagesOfHosts(PAGE, HostPages(memoryview(bytearray(PAGE)), PAGE), Part(0, PAGE), [other])
    memory = bytearray(PAGE)
    writer = pages.writer()
    writer.write(0, 0, bytes(range(PAGE)))
    finished = asyncio.create_task(writer.finish())
    _, waiting = await asyncio.wait([finished], timeout=0.1)
    assert waiting and not any(memory)
    thread = threading.Thread(target=serve_until_closed, args=(there, memory, PAGE))
    thread.start()
    await finished
    assert memory == bytes(range(PAGE))
    pages.close()
    thread.join(SECONDS)


async def test_a_host_that_is_lost_fails_reads_and_writes():
    hosts = Hosts([Part(0, 12), Part(12, 12)])
    hosts.pages.others[0]._channel.end()
    with pytest.raises(TransportError, match="pages of another host"):
        await hosts.pages.reader().read(0)
    writer = hosts.pages.writer()
    writer.write(0, 0, bytes(PAGE))
    with pytest.raises(TransportError, match="pages of another host"):
        await writer.finish()
    hosts.close()
    writer.write(0, 0, bytes(PAGE))
    with pytest.raises(TransportError):
        await writer.finish()


async def test_a_write_to_a_host_that_does_not_answer_ends_only_with_the_worker(monkeypatch):
    """That host may write later what it was sent, into pages that another sequence would have by then."""
    monkeypatch.setattr("baton.ranks.pages.ANSWER_SECONDS", 0.05)
    ours, theirs = socket.socketpair()
    other, there = RemotePart(Part(0, PAGE), Channel(ours, SECONDS)), Channel(theirs, SECONDS)
    lost, ended = threading.Event(), threading.Event()
    other.lost = lambda: lost.set() or ended.wait(SECONDS)
    pages = PagesOfHosts(PAGE, HostPages(memoryview(bytearray(PAGE)), PAGE), Part(0, PAGE), [other])
    writer = pages.writer()
    writer.write(0, 0, bytes(PAGE))
    finished = asyncio.create_task(writer.finish())
    assert await asyncio.to_thread(lost.wait, SECONDS)
    _, waiting = await asyncio.wait([finished], timeout=0.1)
    assert waiting
    ended.set()
    with pytest.raises(TransportError, match="has not answered"):
        await finished
    pages.close()
    there.close()


async def test_pages_that_do_not_exist_are_not_served():
    """Not by a wrong size either: the memory behind a page is another one's."""
    for page, offset, count in ((COUNT, 0, 1), (0, 0, 13), (0, 12, 1)):
        hosts = Hosts([Part(0, 12), Part(12, 12)])
        asked = hosts.pages.others[0].read(page, offset, count)
        with pytest.raises(TransportError):
            await asyncio.wrap_future(asked)
        hosts.close()
        assert "were asked for" in str(hosts.errors[0])


def test_which_heads_a_host_keeps():
    def of(size, hosts, heads):
        return [Shard(rank, size, hosts).host_kv_heads(heads) for rank in range(0, size, size // hosts)]

    assert of(4, 2, 8) == [(0, 4), (4, 4)]
    assert of(4, 2, 2) == [(0, 1), (1, 1)]
    assert of(4, 2, 1) == [(0, 1), (0, 1)]
    assert of(6, 2, 3) == [(0, 2), (1, 2)]
    # Each host has one rank that copies each of its heads.
    for size, hosts, heads in ((4, 2, 1), (4, 2, 2), (6, 2, 3), (4, 1, 2), (4, 4, 2)):
        for host in range(hosts):
            per = size // hosts
            shards = [Shard(rank, size, hosts) for rank in range(host * per, (host + 1) * per)]
            copied = [shard.kv_heads(heads)[0] for shard in shards if shard.keeps(heads)]
            assert copied == sorted(set(copied))
            assert len(copied) == shards[0].host_kv_heads(heads)[1]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"master": "127.0.0.1:1"}, "--master and --node-rank are for --nnodes"),
        ({"nnodes": 2, "tp": 3, "master": "127.0.0.1:1"}, "--nnodes 2 must divide --tp 3"),
        ({"nnodes": 2, "tp": 2, "node_rank": 2, "master": "127.0.0.1:1"}, "from 0 to 1"),
        ({"nnodes": 2, "tp": 2}, "--nnodes needs --master"),
        ({"nnodes": 2, "tp": 2, "master": "nowhere"}, "is not host:port"),
        ({"nnodes": 2, "tp": 2, "master": "127.0.0.1:1", "transports": ("shm",)}, "over grpc alone"),
        ({"nnodes": 2, "tp": 2, "master": "192.0.2.1:1"}, "--cluster-secret-file"),
    ],
)
def test_a_wrong_configuration_is_one_line(flags, text):
    with pytest.raises(BatonError, match=text) as caught:
        check_hosts(DecodeConfig(**flags))
    assert "\n" not in caught.value.message


def test_a_name_that_is_not_known_yet_is_waited_for(monkeypatch):
    """A pod may start before the cluster's DNS knows the first one."""
    answers = [OSError(-2, "not known"), OSError(-2, "not known")]

    def look_up(*given, **options):
        if answers:
            raise answers.pop()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 29500))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr("baton.worker.hosts.RETRY_SECONDS", 0.01)
    flags = {"nnodes": 2, "tp": 2, "master": "first.pods:29500", "insecure": True}
    for rank in (0, 1):
        check_hosts(DecodeConfig(**flags, node_rank=rank))
    assert master_address(DecodeConfig(**flags)) == ("first.pods", 29500, "192.0.2.1")
    answers += [OSError(-2, "not known")] * 1000
    monkeypatch.setattr("baton.worker.hosts.NAME_SECONDS", 0.05)
    with pytest.raises(BatonError, match=r"'first\.pods' is not known here"):
        master_address(DecodeConfig(**flags))


def test_ranks_may_come_at_the_same_time():
    expected = [(rank, purpose) for rank in range(1, 9) for purpose in (PLANS, PAGES)]
    master = Master("127.0.0.1", 0, SECRET, expected, {"--dtype": "float32"})
    master.start({})
    master_port = master.port
    with ThreadPoolExecutor(16) as threads:
        joined = list(threads.map(lambda key: come(master, rank=key[0], purpose=key[1]), expected))
        came = master.await_all(SECONDS)
    assert set(came) == set(expected)
    for each in joined:
        each.channel.close()
    for channel in came.values():
        channel.close()
    master.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", master_port), 1.0)
