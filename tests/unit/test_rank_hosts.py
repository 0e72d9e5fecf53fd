"""Ranks of several hosts: how they come together, and pages of which each host keeps a part."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

import certificates
from baton.authentication.cluster import ClusterCredentials, ClusterTls
from baton.config import DecodeConfig
from baton.layers.tensor_parallel import Shard
from baton.rpc.errors import BatonError
from baton.transport import HostPages, TransportError
from baton.worker.ranks.channel import Channel, ChannelClosed, ChannelError
from baton.worker.ranks.follower import Follower
from baton.worker.ranks.hosts import check_hosts, master_address
from baton.worker.ranks.messages import End, Loaded, Setup, Started
from baton.worker.ranks.pages import PagesOfHosts, Part, RemotePart, serve_pages
from baton.worker.ranks.rendezvous import PAGES, PLANS, Join, JoinError, Master, join, tls_of_secret

SECRET = "a secret of sixteen or more"
CLUSTER = ClusterCredentials(SECRET)
STORE = ("127.0.0.1", 1)
SETTINGS = {"--dtype": "float32"}
SECONDS = 60.0


@pytest.fixture
def master():
    with listening() as master:
        yield master


@contextlib.contextmanager
def listening(cluster=CLUSTER):
    with contextlib.closing(Master("127.0.0.1", 0, cluster, [(1, PLANS)], SETTINGS)) as master:
        master.start(STORE)
        yield master


def come(master, cluster=CLUSTER, rank=1, purpose=PLANS, **settings):
    """`master`: or what else has a port."""
    what = Join(rank, purpose, SETTINGS | settings, cluster.secret)
    return join("127.0.0.1", master.port, cluster, what, seconds=SECONDS)


def test_a_rank_joins_and_both_sides_talk(master):
    joined = come(master)
    (channel,) = master.await_all(SECONDS).values()
    assert joined.store == STORE and joined.own_address == "127.0.0.1"
    channel.send_plan(b"plan", 3)
    channel.send(Started())
    joined.channel.send_bytes(bytes(2**20))
    assert joined.channel.next() == (3, b"plan")
    assert joined.channel.next() == Started()
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
    with listening() as master:
        come(master).channel.close()


def test_another_secret_is_refused_on_both_sides(master):
    with pytest.raises(JoinError, match="another cluster secret: give both the same --cluster-secret-file"):
        come(master, ClusterCredentials("quite another secret"))
    come(master).channel.close()  # the master still listens
    for channel in master.await_all(SECONDS).values():
        channel.close()


@pytest.mark.parametrize(
    "garbage",
    [b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(64)],
    ids=["nothing", "http"],
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
    assert len(answer) < 64  # at most an alert
    come(master).channel.close()
    for channel in master.await_all(SECONDS).values():
        channel.close()


def test_a_stranger_who_says_little_by_little_is_closed_out(master, monkeypatch):
    monkeypatch.setattr("baton.worker.ranks.rendezvous.HANDSHAKE_SECONDS", 0.3)
    hello, said = b"\x16\x03\x01\x00\x40" + bytes(64), 0
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
    monkeypatch.setattr("baton.worker.ranks.rendezvous.MAX_HANDSHAKES", 2)
    monkeypatch.setattr("baton.worker.ranks.rendezvous.HANDSHAKE_SECONDS", 1.0)
    master = Master("127.0.0.1", 0, CLUSTER, [(1, PLANS)], {"--dtype": "float32"})
    with contextlib.ExitStack() as strangers:
        for _ in range(2):
            strangers.enter_context(socket.create_connection(("127.0.0.1", master.port), SECONDS))
        master.start(STORE)
        come(master).channel.close()
    for channel in master.await_all(SECONDS).values():
        channel.close()
    master.close()


def test_a_rank_of_another_version_may_say_more(master):
    channel = connect(master, tls_of_secret(SECRET))
    said = {"rank": 1, "purpose": PLANS, "settings": SETTINGS | {"version": 2}, "more": 1}
    channel.send_bytes(msgspec.json.encode(said | {"secret": SECRET}))
    assert "version is 2" in msgspec.json.decode(channel.receive_bytes(SECONDS))["refused"]
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
    setup = Setup(Shard(1, 2), str(tmp_path / "store"), 0, config)
    with ThreadPoolExecutor(1) as threads:
        follower = threads.submit(Follower, setup, Channel(theirs, SECONDS))
        assert rank_0.receive(SECONDS) == Started()
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
        join("127.0.0.1", port, CLUSTER, Join(1, PLANS, {}), seconds=0.1)


class Wire:
    """Between a rank and the master: keeps what both send; `change` makes what it passes on of the rank's."""

    def __init__(self, master, change=bytes):
        self.seen = b""
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._there = socket.create_connection(("127.0.0.1", master.port), SECONDS)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        here, _ = self._listener.accept()
        threading.Thread(target=self._pass, args=(self._there, here, bytes), daemon=True).start()
        self._pass(here, self._there, self._change)

    def _pass(self, source, target, change):
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                self.seen += data
                target.sendall(change(data))
        target.close()


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """Of a CA and of another one."""
    found = []
    for name in ("ours", "theirs"):
        pem = certificates.make(tmp_path_factory.mktemp("pem") / name)
        found.append(ClusterTls(*(Path(path).read_bytes() for path in (pem.ca, pem.cert, pem.key))))
    return found


@pytest.mark.parametrize("by", ["secret", "certificates", "both"])
def test_nothing_travels_in_clear(by, certified):
    cluster = ClusterCredentials(
        "" if by == "certificates" else SECRET, None if by == "secret" else certified[0]
    )
    text = b"a prompt that is nobody else's business"
    with listening(cluster) as master:
        wire = Wire(master)
        joined = come(wire, cluster)
        (channel,) = master.await_all(SECONDS).values()
        channel.send_plan(text, 1)
        assert joined.channel.next() == (1, text)
        joined.channel.send(Loaded(text.decode()))
        assert channel.receive(SECONDS) == Loaded(text.decode())
        assert len(wire.seen) > 200
        for clear in (text, SECRET.encode(), b"dtype"):
            assert clear not in wire.seen


def test_a_message_that_was_changed_on_the_way_is_noticed(master):
    changing = threading.Event()
    joined = come(Wire(master, lambda data: data[:-1] + bytes([data[-1] ^ changing.is_set()])))
    (channel,) = master.await_all(SECONDS).values()
    changing.set()
    joined.channel.send(Started())
    with pytest.raises(ChannelClosed):
        channel.receive(SECONDS)


def connect(master, tls):
    """A TLS connection whose own side checks nothing."""
    context = tls.ssl_context(server=False)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    own_address = socket.create_connection(("127.0.0.1", master.port), SECONDS)
    return Channel(context.wrap_socket(own_address), SECONDS)


@pytest.mark.parametrize("tls", ["another secret", "none", "another CA"])
def test_who_has_no_credentials_is_not_heard(master, tls, certified):
    """Although it takes any master, and knows what to say."""
    credentials = {"another secret": tls_of_secret("quite another secret"), "another CA": certified[1]}
    channel = connect(master, credentials.get(tls, tls_of_secret("")))
    with pytest.raises(ChannelError):
        channel.send_bytes(msgspec.json.encode(Join(1, PLANS, SETTINGS, SECRET)))
        channel.receive_bytes(SECONDS)
    come(master).channel.close()


def test_certificates_of_another_ca_are_refused_on_both_sides(certified):
    ours, theirs = certified
    mixed = ClusterCredentials(tls=ClusterTls(ours.ca, theirs.cert, theirs.key))
    with listening(ClusterCredentials(tls=ours)) as master:
        for wrong in (ClusterCredentials(tls=theirs), mixed, CLUSTER):
            with pytest.raises(JoinError):
                come(master, wrong)
        come(master, ClusterCredentials(tls=ours)).channel.close()


def test_certificates_do_not_replace_a_secret(certified):
    ours = ClusterCredentials(SECRET, certified[0])
    with listening(ours) as master:
        for wrong in ("", "quite another secret"):
            with pytest.raises(JoinError, match="another cluster secret"):
                come(master, ClusterCredentials(wrong, certified[0]))
        come(master, ours).channel.close()


@pytest.mark.parametrize(
    "said", [b"", b"{", b"[]", b"{}", b'{"rank": "1", "purpose": "plans", "settings": {}}'], ids=str
)
def test_what_no_rank_says_is_refused(master, said):
    channel = connect(master, tls_of_secret(SECRET))
    channel.send_bytes(said)
    with pytest.raises(ChannelClosed):
        channel.receive_bytes(SECONDS)
    come(master).channel.close()


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
        own_address = HostPages(memoryview(self.memory[0]), parts[0].count)
        self.pages = PagesOfHosts(PAGE, own_address, parts[0], others)
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
    monkeypatch.setattr("baton.worker.ranks.pages.ANSWER_SECONDS", 0.05)
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
    monkeypatch.setattr("baton.worker.ranks.hosts.RETRY_SECONDS", 0.01)
    flags = {"nnodes": 2, "tp": 2, "master": "first.pods:29500", "insecure": True}
    for rank in (0, 1):
        check_hosts(DecodeConfig(**flags, node_rank=rank))
    assert master_address(DecodeConfig(**flags)) == ("first.pods", 29500, "192.0.2.1")
    answers += [OSError(-2, "not known")] * 1000
    monkeypatch.setattr("baton.worker.ranks.hosts.NAME_SECONDS", 0.05)
    with pytest.raises(BatonError, match=r"'first\.pods' is not known here"):
        master_address(DecodeConfig(**flags))


def test_ranks_may_come_at_the_same_time():
    expected = [(rank, purpose) for rank in range(1, 9) for purpose in (PLANS, PAGES)]
    master = Master("127.0.0.1", 0, CLUSTER, expected, {"--dtype": "float32"})
    master.start(STORE)
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
